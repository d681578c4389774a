"""Records the two small iterations that an estimate starts from, and keeps them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from chainer_hybridmem.commands.recording import Network

FORMAT = 'chainer_hybridmem/samples'
VERSION = 1
ITERATIONS = 10


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


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is recorded, and how.

    Attributes:
        arch (str): Name of the architecture, or ``module:Class``.
        batchsizes (tuple of int): Of the samples, ascending.
        insize (int or None): Height and width of the pictures; None for the
            architecture's, or those of a file.
        n_class (int): Number of classes.
        device (str): ``'cpu'``, ``'cuda'`` or ``'auto'``.
        parts (bool): Whether to find out what functions need in parts, which takes most
            of the time; what is written to a file always tells it.
        timed (bool): Whether to measure times, which takes half of it; likewise.
    """

    arch: str
    batchsizes: tuple[int, int]
    insize: int | None = None
    n_class: int = 1000
    device: str = 'cpu'
    parts: bool = True
    timed: bool = True


def count_steps(path: str | None) -> int:
    """How many iterations :func:`obtain` will record."""
    return 0 if path is not None and os.path.isfile(path) else 2


def obtain(sampling: Sampling, path: str | None, progress: Progress) -> Samples:
    """Samples from a file if there is one, else recorded and written to it.

    Args:
        sampling: What to record.
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
        _check(samples, sampling, path)
        return samples
    if path is not None:
        sampling = dataclasses.replace(sampling, parts=True, timed=True)
    samples = record(sampling, progress)
    if path is not None:
        save(samples, path)
    return samples


def record(sampling: Sampling, progress: Progress) -> Samples:
    """Trains with both batch sizes until an iteration of each is recorded.

    Raises:
        OptionError: If the batch sizes are not ascending.
        ProfileMismatchError: If the two iterations differ.
        HybridMemoryError: If the network cannot be trained.
    """
    import_chainer()
    from chainer_hybridmem.commands import recording

    memory = recording.Memory(recording.AMPLE_BYTES, sampling.device)

    def record_one(network: Network, what: str) -> Profile:
        recorded = recording.record(
            network,
            memory,
            ITERATIONS,
            io.StringIO(),
            sampling.parts,
            sampling.timed,
            lambda number: progress.detail(f'{what}, iteration {number}'),
        )
        return recorded.problem.profile

    return record_pair(sampling, progress, record_one)


def record_pair(
    sampling: Sampling,
    progress: Progress,
    record_one: Callable[[Network, str], Profile],
) -> Samples:
    """Records a network at both batch sizes.

    Args:
        sampling: What to record.
        progress: Has two steps.
        record_one: Records a network; is told in words what is recorded.
    """
    arch, insize = sampling.arch, sampling.insize
    batchsizes = check_ascending(sampling.batchsizes, '--sample-batches')
    import numpy as np

    from chainer_hybridmem.commands import recording

    insize = insize or recording.find_insize(arch)  # or there is no such architecture
    recording.choose_device(sampling.device, '--record-on')  # or there is none
    profiles = []
    for batchsize in batchsizes:
        what = f'recording {arch}, batch size {batchsize}'
        progress.step(what, at_once=True)
        network = recording.Network(arch, batchsize, insize, sampling.n_class)
        # Only memory counts here: training may well diverge.
        with np.errstate(all='ignore'):
            profiles.append(record_one(network, what))
    pair = SamplePair.match(profiles[0], profiles[1], batchsizes)
    return Samples(arch, insize, sampling.n_class, pair)


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


def _check(samples: Samples, sampling: Sampling, path: str) -> None:
    found = (samples.arch, samples.insize, samples.n_class)
    wanted = (sampling.arch, sampling.insize or samples.insize, sampling.n_class)
    if found != wanted:
        raise OptionError(
            f'{path} has samples of {found[0]} at {found[1]}x{found[1]} with '
            f'{format_count(found[2], "class", "classes")}, not of {wanted[0]} at '
            f'{wanted[1]}x{wanted[1]} with {wanted[2]}. Name another file with '
            f'--samples, or remove this one.'
        )
