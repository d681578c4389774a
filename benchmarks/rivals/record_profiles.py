"""Makes the profiles that the package ships, ``chainer_hybridmem/profiles``.

    python -m benchmarks run rivals.record_profiles [NAME ...] [--samples FOLDER]
                                                [--gpu [LABEL]] [--rounds N]
                                                [--output FOLDER]

``*-host``: recorded on this machine's CPU, copies throttled to 72 MB/s as in
host_methods.py; on a quiet machine, for on a busy one the threads of BLAS wait for
each other. ``*-estimated``: extrapolated from two small recordings onto the model of a
GPU. With ``--gpu``, instead: recorded on the GPU of this machine, as ``*-LABEL``
(default ``h200``).

What is recorded is recorded in several rounds; the shortest time of each operation
counts. Times have six significant digits.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gzip
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import common
from chainer_hybridmem import architectures, profiles
from chainer_hybridmem.commands import programs
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)

HOST_BANDWIDTH = 72e6
DIGITS = 6
ROUNDS = 2
# The V100 of Ito et al. trains ResNet-50 in-core at this speed.
V100, V100_SPEED, V100_BATCH = 'v100-16gb-pcie3', 316.0, 128


class Source(NamedTuple):
    """Which iteration a profile is of.

    Attributes:
        arch (str): Name of the architecture, or ``module:Class``.
        batchsize (int): Pictures in it.
        gpu (str or None): Device model; None if it is recorded.
    """

    arch: str
    batchsize: int
    gpu: str | None = None


HOST = {
    'resnet50-b8-host': Source('resnet50', 8),
    'googlenet-b16-host': Source('googlenet', 16),
    'alexnet-b32-host': Source('alexnet', 32),
    'lstm-b128-host': Source('benchmarks.rivals.sequences:LSTM', 128),
    'transformer-b8-host': Source('benchmarks.rivals.sequences:Transformer', 8),
}
ESTIMATED = {
    'resnet50-b640-v100-estimated': Source('resnet50', 640, V100),
    'googlenet-b1024-v100-estimated': Source('googlenet', 1024, V100),
    'alexnet-b1920-v100-estimated': Source('alexnet', 1920, V100),
    'resnet50-b184-gtx1080ti-estimated': Source('resnet50', 184, 'gtx1080ti'),
}
GPU = {
    'resnet50-b256': Source('resnet50', 256),
    'googlenet-b512': Source('googlenet', 512),
    'alexnet-b1024': Source('alexnet', 1024),
    'lstm-b1024': Source('benchmarks.rivals.sequences:LSTM', 1024),
    'transformer-b256': Source('benchmarks.rivals.sequences:Transformer', 256),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('names', nargs='*', metavar='NAME', help='default all')
    parser.add_argument('--samples', metavar='FOLDER', help='keeps small recordings')
    parser.add_argument('--rounds', type=int, default=ROUNDS, metavar='N')
    parser.add_argument('--gpu', nargs='?', const='h200', metavar='LABEL')
    parser.add_argument(
        '--output', default=os.path.dirname(profiles.__file__), metavar='FOLDER'
    )


def main(options: argparse.Namespace) -> None:
    for name, source in chosen(options).items():
        print(f'{name}: {source.batchsize} pictures', file=sys.stderr)
        profile = make(source, options)
        path = os.path.join(options.output, name + profiles.SUFFIX)
        nbytes = write(profile, source, path)
        print(f'{name}: {nbytes / 1e3:.0f} kB', file=sys.stderr)


def chosen(options: argparse.Namespace) -> dict[str, Source]:
    """The profiles to make, by name."""
    known = {**HOST, **ESTIMATED}
    if options.gpu is not None:
        known = {f'{name}-{options.gpu}': source for name, source in GPU.items()}
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        raise SystemExit(f'{", ".join(unknown)}: not among {", ".join(known)}.')
    return {name: known[name] for name in options.names or known}


def make(source: Source, options: argparse.Namespace) -> Profile:
    if source.gpu is not None:
        return estimate(source, options.samples)
    device, link = 'cpu', {'link_bandwidth': HOST_BANDWIDTH}
    if options.gpu is not None:
        device, link = 'cuda', {}
    network = Network(source.arch, source.batchsize, device=device).completed()
    told = {**link, 'progress': True}
    rounds = (
        programs.record(network, told, parts=True, timed=True)
        for _ in range(options.rounds)
    )
    return quickest([recorded.find_largest().profile for recorded in rounds])


def quickest(rounds: list[Profile]) -> Profile:
    """The same iteration, recorded several times, with its shortest times."""
    if len({profile.fingerprint() for profile in rounds}) > 1:
        raise SystemExit('Two rounds have recorded different iterations.')
    times = ('device_seconds', 'host_seconds')
    return dataclasses.replace(
        rounds[0],
        operations=shortest([p.operations for p in rounds], times),
        recipes=shortest([p.recipes for p in rounds], ('seconds',)),
    )


def shortest(rounds: list[tuple[Any, ...]], fields: tuple[str, ...]) -> tuple[Any, ...]:
    """The items of the first round, each field with the least value of all rounds."""
    return tuple(
        dataclasses.replace(
            found[0], **{name: min(getattr(f, name) for f in found) for name in fields}
        )
        for found in zip(*rounds, strict=True)
    )


def estimate(source: Source, folder: str | None) -> Profile:
    """The profile of a batch on the model of a GPU; a V100 is calibrated."""
    model = load_device_model(source.gpu)
    estimator = Estimator.make(common.recordings(source.arch, folder), model)
    if source.gpu == V100:
        reference = Estimator.make(common.recordings('resnet50', folder), model)
        calibrated = reference.calibrated(V100_SPEED, V100_BATCH)
        estimator = estimator.with_factor_of(calibrated)
    return estimator.profile(source.batchsize)


def write(profile: Profile, source: Source, path: str) -> int:
    """Writes it small, with what was recorded when; returns the bytes it takes."""
    body = rounded(json.loads(serialise_profile(profile)))
    environment = common.environment()
    body['device'] |= {
        'date': datetime.date.today().isoformat(),
        'arch': source.arch.rpartition(':')[2],
        'batchsize': source.batchsize,
        'insize': architectures.insize(source.arch),
        'chainer': environment['chainer'],
        'numba': environment['numba'],
        'blas_threads': environment['blas_threads'],
        'commit': environment['commit'],
    }
    text = json.dumps(body, separators=(',', ':'))
    parse_profile(text)  # or it would be of no use to anybody
    contents = gzip.compress(text.encode(), 9, mtime=0)
    pathlib.Path(path).write_bytes(contents)
    return len(contents)


def rounded(value: Any) -> Any:
    """JSON values with fewer digits."""
    kinds: dict[type, Callable[[Any], Any]] = {
        float: lambda number: float(f'{number:.{DIGITS}g}'),
        list: lambda items: [rounded(item) for item in items],
        dict: lambda items: {key: rounded(item) for key, item in items.items()},
    }
    return kinds.get(type(value), lambda other: other)(value)
