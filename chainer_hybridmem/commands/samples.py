"""Records the two small iterations that an estimate starts from, and keeps them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.estimation import SamplePair
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.units import format_count

if TYPE_CHECKING:
    from chainer_hybridmem.commands.networks import Network

FORMAT = 'chainer_hybridmem/samples'
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Samples:
    """Two recorded iterations of one network.

    Attributes:
        arch (str): Name of the architecture, or ``module:Class``.
        insize (int): Height and width of the pictures.
        n_class (int): Number of classes.
        pair (SamplePair): The iterations.
    """

    arch: str
    insize: int
    n_class: int
    pair: SamplePair

    @property
    def named(self) -> dict[str, Any]:
        """The network as plain values."""
        return {'arch': self.arch, 'insize': self.insize, 'n_class': self.n_class}


def is_kept(path: str | None) -> bool:
    """Whether there are samples in a file."""
    return path is not None and os.path.isfile(path)


def obtain(
    network: Network, path: str | None, record: Callable[[Network], SamplePair]
) -> Samples:
    """Samples from a file if there is one, else recorded and written to it.

    Args:
        network: What is recorded.
        path: The file; None to record anew and keep nothing.
        record: Records it with two batch sizes.

    Raises:
        FormatError: If the file holds something else.
        OptionError: If it holds samples of another network.
        HybridMemoryError: If the network cannot be recorded.
    """
    if path is not None and is_kept(path):
        samples = load(path)
        _check(samples, network, path)
        return samples
    network = network.completed()
    assert network.insize is not None
    pair = record(network)
    samples = Samples(network.arch, network.insize, network.n_class, pair)
    if path is not None:
        save(samples, path)
    return samples


def save(samples: Samples, path: str) -> None:
    """Writes samples as versioned JSON.

    Raises:
        FormatError: If the file cannot be written.
    """
    pair = samples.pair
    body = {
        'format': FORMAT,
        'version': VERSION,
        **samples.named,
        'batchsizes': list(pair.batchsizes),
        'profiles': [
            json.loads(serialise_profile(p)) for p in (pair.small, pair.large)
        ],
    }
    library.write_text(path, json.dumps(body))


def load(path: str) -> Samples:
    """Reads a file of :func:`save`.

    Raises:
        FormatError: If the file is missing, damaged or of another format.
        ProfileMismatchError: If the two iterations differ.
    """
    text = files.read_text(path)
    with files.named(path), files.reading('file of samples'):
        body = files.parse(text, FORMAT, VERSION)
        small, large = (
            parse_profile(json.dumps(profile)) for profile in body['profiles']
        )
        first, second = (int(b) for b in body['batchsizes'])
        values: dict[str, Any] = {
            'arch': str(body['arch']),
            'insize': int(body['insize']),
            'n_class': int(body['n_class']),
        }
    return Samples(**values, pair=SamplePair.match(small, large, (first, second)))


def _check(samples: Samples, network: Network, path: str) -> None:
    found = (samples.arch, samples.insize, samples.n_class)
    wanted = (network.arch, network.insize or samples.insize, network.n_class)
    if found != wanted:
        raise OptionError(
            f'{path} has samples of {found[0]} at {found[1]}x{found[1]} with '
            f'{format_count(found[2], "class", "classes")}, not of {wanted[0]} at '
            f'{wanted[1]}x{wanted[1]} with {wanted[2]}. Name another file with '
            f'--samples, or remove this one.'
        )
