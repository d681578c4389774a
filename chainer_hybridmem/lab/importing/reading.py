"""Reads files of others: of bounded size, compressed or not."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.errors import FormatError

_GZIP = b'\x1f\x8b'
_TAR_MAGIC = slice(257, 262)


def read_data(path: str) -> bytes:
    """A file's bytes; of what ``gzip`` has compressed, or of a tar's first file.

    Raises:
        FormatError: If it is missing, damaged or larger than allowed.
    """
    try:
        with open(path, 'rb') as file:
            data = files.read_bounded(file)
        if data[:2] == _GZIP:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = files.read_bounded(packed)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatError(f'{path} is damaged: {error}. Fetch it again.') from error
    except OSError as error:
        reason = error.strerror or error
        raise FormatError(f'{path!r} cannot be read: {reason}.') from error
    if len(data) > files.MAXIMUM_FILE_BYTES:
        raise FormatError(
            f'{path} has more than {files.MAXIMUM_FILE_BYTES} bytes, unpacked.'
        )
    return _first_member(path, data) if data[_TAR_MAGIC] == b'ustar' else data


def _first_member(path: str, data: bytes) -> bytes:
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if member.isreg():
                    file = archive.extractfile(member)
                    return b'' if file is None else file.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FormatError(f'{path} is damaged: {error}. Fetch it again.') from error
    raise FormatError(f'{path} is an archive without a file.')


def parse_json(data: bytes) -> Any:
    """The JSON value that a file holds.

    Raises:
        FormatError: If it holds something else.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f'This is not JSON ({error}).') from error


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Looks for no garbage meanwhile: a parsed file has millions of objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
