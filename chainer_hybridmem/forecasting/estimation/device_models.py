"""GPUs as a few numbers: how long an operation and a copy would take.

A device model is a roofline with an overhead per kernel (Williams, Waterman,
Patterson: Roofline, 2009). An operation with F FLOPs, N bytes moved and k kernels
takes

    k · t_kernel + max(F / (peak · e), N / (bandwidth · e))

with e the efficiency of its class, see :mod:`.estimation.costs`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import os
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError, UnknownNameError, nearest
from chainer_hybridmem.forecasting.estimation.costs import CLASSES, Cost
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.records.profile_file import find_wrong_figure

FORMAT = 'chainer_hybridmem/device-model'
FORMAT_OF_ALL = 'chainer_hybridmem/device-models'
VERSION = 1
CONVOLUTIONS = ('cudnn', 'im2col')
_DATA = 'device_models.json'


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """One GPU and the bus it hangs on.

    Attributes:
        name (str): How it is called on the command line.
        title (str): For people.
        source (str): Where the figures come from.
        flops_per_second (float): Peak in single precision.
        bytes_per_second (float): Peak of its memory.
        memory_bytes (int): Memory size.
        link (Link): The path to host memory.
        kernel_seconds (float): Least time from one kernel to the next.
        efficiency (dict): Share of the peaks that each class of functions reaches.
        convolution (str): ``'cudnn'`` or ``'im2col'``.
        workspace_bytes (int): What one cuDNN convolution may use.
    """

    name: str
    title: str
    source: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int
    link: Link
    kernel_seconds: float
    efficiency: dict[str, float]
    convolution: str
    workspace_bytes: int

    def seconds(self, cost: Cost) -> float:
        """Seconds that an operation takes."""
        share = self.efficiency[cost.kind]
        compute = cost.flops / self.flops_per_second
        memory = cost.nbytes / self.bytes_per_second
        return cost.launches * self.kernel_seconds + max(compute, memory) / share


def model_names() -> list[str]:
    """Names that :func:`load_device_model` knows."""
    return list(read_catalogue()['models'])


def load_device_model(name: str) -> DeviceModel:
    """Returns a device model.

    Args:
        name: One of :func:`model_names`, or the path of a JSON file with the format
            ``'chainer_hybridmem/device-model'``.

    Raises:
        UnknownNameError: If it is neither.
        FormatError: If the file cannot be used, naming what is wrong.
    """
    catalogue = read_catalogue()
    if name in catalogue['models']:
        return _model(name, catalogue['models'][name])
    if name.lower().endswith('.json') or os.path.sep in name or os.path.isfile(name):
        text = files.read_text(name)
        with files.named(name):
            body = files.parse(text, FORMAT, VERSION)
        body = {k: v for k, v in body.items() if k not in ('format', 'version')}
        return _model(str(body.pop('name', name)), body)
    lower, models = name.lower(), catalogue['models']
    begun = [model for model in models if name and model.startswith(lower)]
    hint = nearest(begun[0] if begun else lower, models, 0.5)
    raise UnknownNameError(
        f'There is no device model {name!r}.{hint} Models: '
        f'{", ".join(models)}, or a JSON file of your own.'
    )


@functools.lru_cache(maxsize=1)
def read_catalogue() -> dict[str, Any]:
    """Models, their defaults and nodes, as the package's file has them."""
    folder = importlib.resources.files('chainer_hybridmem.forecasting.estimation')
    text = folder.joinpath(_DATA).read_text(encoding='utf-8')
    return files.parse(text, FORMAT_OF_ALL, VERSION)


def _model(name: str, given: dict[str, Any]) -> DeviceModel:
    """Checks a model's values and fills in what it leaves to the defaults."""
    defaults = read_catalogue()['defaults']
    known = {field.name for field in dataclasses.fields(DeviceModel)} - {'name'}
    for key in given:
        if key not in known:
            raise _wrong(name, f'{key!r} is not a value of it', known)
    body = {'title': name, 'source': 'not given', **defaults, **given}
    for key in ('flops_per_second', 'bytes_per_second', 'memory_bytes', 'link'):
        if key not in body:
            raise _wrong(name, f'{key!r} is missing', known)
    for key in ('title', 'source'):
        if not isinstance(body[key], str):
            raise _wrong(name, f'{key} is {body[key]!r}, not text')
    if body['convolution'] not in CONVOLUTIONS:
        raise _wrong(
            name,
            f'convolution is {body["convolution"]!r}; it is '
            f'{" or ".join(map(repr, CONVOLUTIONS))}',
        )
    efficiency = _mapping(name, 'efficiency', body['efficiency'])
    for key, value in efficiency.items():
        if key not in CLASSES:
            raise _wrong(name, f'efficiency has no class {key!r}', CLASSES)
        if not 0 < _number(name, f'efficiency of {key}', value) <= 1:
            raise _wrong(name, f'efficiency of {key} is {value}, not in (0, 1]')
    return DeviceModel(
        name=name,
        title=body['title'],
        source=body['source'],
        flops_per_second=_positive(name, body, 'flops_per_second'),
        bytes_per_second=_positive(name, body, 'bytes_per_second'),
        memory_bytes=_bytes(name, body, 'memory_bytes', 1),
        link=_link(name, _mapping(name, 'link', body['link'])),
        kernel_seconds=_not_negative(name, body, 'kernel_seconds'),
        efficiency={**defaults['efficiency'], **efficiency},
        convolution=body['convolution'],
        workspace_bytes=_bytes(name, body, 'workspace_bytes', 0),
    )


def _link(name: str, body: dict[str, Any]) -> Link:
    # What one GPU has while no other copies: how many share it is asked for each time.
    fields = [field for field in dataclasses.fields(Link) if field.name != 'ranks']
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if not needed <= set(body) <= names:
        raise _wrong(name, f'its link has {sorted(body)}', names)
    figures: Any = {key: _number(name, key, value) for key, value in body.items()}
    link = Link(**figures)
    if wrong := find_wrong_figure(link):
        raise _wrong(name, wrong)
    return link


def _mapping(name: str, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(name, f'{key} is {json.dumps(value)}, not an object')
    return value


def _number(name: str, key: str, value: Any) -> float:
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not math.isfinite(value):
        raise _wrong(name, f'{key} is {value!r}, not a number')
    return float(value)


def _positive(name: str, body: dict[str, Any], key: str) -> float:
    number = _number(name, key, body[key])
    if number <= 0:
        raise _wrong(name, f'{key} is {number}; it must be above zero')
    return number


def _not_negative(name: str, body: dict[str, Any], key: str) -> float:
    number = _number(name, key, body[key])
    if number < 0:
        raise _wrong(name, f'{key} is {number}; it must not be below zero')
    return number


def _bytes(name: str, body: dict[str, Any], key: str, least: int) -> int:
    number = _number(name, key, body[key])
    if not least <= number < files.LARGEST_SIZE:
        raise _wrong(name, f'{key} is {body[key]}, not a size in bytes')
    return int(number)


def _wrong(name: str, why: str, known: Any = ()) -> FormatError:
    hint = f' Known are: {", ".join(sorted(known))}.' if known else ''
    return FormatError(f'Device model {name!r} cannot be used: {why}.{hint}')
