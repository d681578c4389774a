"""Records the two small iterations that an estimate starts from, and keeps them."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.commands.base import import_chainer
from chainer_hybridmem.commands.progress import Progress
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.estimation import SamplePair, check_ascending
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.units import format_count

FORMAT = 'chainer_hybridmem/samples'
VERSION = 1
ITERATIONS = 10
# Nothing is to be in the way of two small iterations; the machine has its own limit.
NO_LIMIT_BYTES = 2**50


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


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How samples are recorded.

    Attributes:
        batchsizes (tuple of int): Of the samples, ascending.
        device (str): ``'cpu'``, ``'cuda'`` or ``'auto'``.
        parts (bool): Whether to find out what functions need in parts, which takes most
            of the time; what is written to a file always tells it.
        timed (bool): Whether to measure times, which takes half of it; likewise.
    """

    batchsizes: tuple[int, int]
    device: str = 'cpu'
    parts: bool = True
    timed: bool = True


def count_steps(path: str | None) -> int:
    """How many iterations :func:`obtain` will record."""
    return 0 if path is not None and os.path.isfile(path) else 2


def obtain(
    arch: str,
    insize: int | None,
    n_class: int,
    sampling: Sampling,
    path: str | None,
    progress: Progress,
) -> Samples:
    """Samples from a file if there is one, else recorded and written to it.

    Args:
        arch: Name of the architecture, or ``module:Class``.
        insize: Height and width of the pictures; None for the architecture's, or
            the file's.
        n_class: Number of classes.
        sampling: How to record.
        path: The file; None to record anew and keep nothing.
        progress: Has two steps for recordings, :func:`count_steps`.

    Raises:
        FormatError: If the file holds something else.
        OptionError: If it holds samples of another network.
        ProfileMismatchError: If the two iterations differ.
        HybridMemoryError: If the network cannot be trained.
    """
    if path is not None and os.path.isfile(path):
        samples = load(path)
        _check(samples, arch, insize, n_class, path)
        return samples
    if path is not None:
        sampling = dataclasses.replace(sampling, parts=True, timed=True)
    samples = record(arch, insize, n_class, sampling, progress)
    if path is not None:
        save(samples, path)
    return samples


def record(
    arch: str,
    insize: int | None,
    n_class: int,
    sampling: Sampling,
    progress: Progress,
) -> Samples:
    """Trains with both batch sizes until an iteration of each is recorded.

    Raises:
        OptionError: If the batch sizes are not ascending.
        ProfileMismatchError: If the two iterations differ.
        HybridMemoryError: If the network cannot be trained.
    """
    batchsizes = sampling.batchsizes
    check_ascending(batchsizes, '--sample-batches')
    import_chainer()
    import numpy as np

    from chainer_hybridmem.commands import recording

    insize = insize or recording.find_insize(arch)  # or there is no such architecture
    recording.choose_device(sampling.device, '--record-on')  # or there is none
    profiles: list[Profile] = []
    memory = recording.Memory(NO_LIMIT_BYTES, sampling.device)
    for batchsize in batchsizes:
        what = f'recording {arch}, batch size {batchsize}'
        progress.step(what, at_once=True)
        network = recording.Network(arch, batchsize, insize, n_class)
        # Only memory counts here: training may well diverge.
        with np.errstate(all='ignore'):
            recorded = recording.record(
                network,
                memory,
                ITERATIONS,
                io.StringIO(),
                sampling.parts,
                sampling.timed,
                functools.partial(_show_iteration, progress, what),
            )
        profiles.append(recorded.problem.profile)
    pair = SamplePair.match(profiles[0], profiles[1], batchsizes)
    return Samples(arch, insize, n_class, pair)


def _show_iteration(progress: Progress, what: str, number: int) -> None:
    progress.detail(f'{what}, iteration {number}')


def save(samples: Samples, path: str) -> None:
    """Writes samples as versioned JSON.

    Raises:
        FormatError: If the file cannot be written.
    """
    pair = samples.pair
    body = {
        'format': FORMAT,
        'version': VERSION,
        'arch': samples.arch,
        'insize': samples.insize,
        'n_class': samples.n_class,
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


def _check(
    samples: Samples, arch: str, insize: int | None, n_class: int, path: str
) -> None:
    found = (samples.arch, samples.insize, samples.n_class)
    wanted = (arch, insize or samples.insize, n_class)
    if found != wanted:
        raise OptionError(
            f'{path} has samples of {found[0]} at {found[1]}x{found[1]} with '
            f'{format_count(found[2], "class", "classes")}, not of {wanted[0]} at '
            f'{wanted[1]}x{wanted[1]} with {wanted[2]}. Name another file with '
            f'--samples, or remove this one.'
        )
