"""Keeps the two small iterations of a network that an estimate starts from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from chainer_hybridmem import files
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.forecasting.estimation import SamplePair
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.units import format_count

FORMAT = 'chainer_hybridmem/samples'
VERSION = 1
NAMES = 'arch', 'insize', 'n_class'


def is_kept(path: str | None) -> bool:
    """Whether there are samples in a file."""
    return path is not None and os.path.isfile(path)


def obtain(
    network: Network, path: str | None, record: Callable[[Network], SamplePair]
) -> tuple[Network, SamplePair]:
    """Samples from a file if there is one, else recorded and written to it.

    Args:
        network: What is recorded.
        path: The file; None to record anew and keep nothing.
        record: Records it with two batch sizes.

    Returns:
        tuple: The network with its size of pictures, and its samples.

    Raises:
        FormatError: If the file holds something else.
        OptionError: If it holds samples of another network.
        HybridMemoryError: If the network cannot be recorded.
    """
    if path is not None and is_kept(path):
        kept, pair = load(path)
        _check(kept, network, path)
        return kept, pair
    network = network.completed()
    pair = record(network)
    if path is not None:
        save(network, pair, path)
    return network, pair


def save(network: Network, pair: SamplePair, path: str) -> None:
    """Writes samples as versioned JSON.

    Raises:
        FormatError: If the file cannot be written.
    """
    body = {
        'format': FORMAT,
        'version': VERSION,
        **{name: getattr(network, name) for name in NAMES},
        'batchsizes': list(pair.batchsizes),
        'profiles': [
            json.loads(serialise_profile(p)) for p in (pair.small, pair.large)
        ],
    }
    library.write_text(path, json.dumps(body))


def load(path: str) -> tuple[Network, SamplePair]:
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
        insize, n_class = int(body['insize']), int(body['n_class'])
        network = Network(str(body['arch']), second, insize, n_class)
    return network, SamplePair.match(small, large, (first, second))


def _check(kept: Network, network: Network, path: str) -> None:
    found = kept.arch, kept.insize, kept.n_class
    wanted = network.arch, network.insize or kept.insize, network.n_class
    if found != wanted:
        raise OptionError(
            f'{path} has samples of {found[0]} at {found[1]}x{found[1]} with '
            f'{format_count(found[2], "class", "classes")}, not of {wanted[0]} at '
            f'{wanted[1]}x{wanted[1]} with {wanted[2]}. Name another file with '
            f'--samples, or remove this one.'
        )
