"""The folder in which plans are kept, and its files.

See Note: [trust] of :mod:`.plan_cache`.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import tempfile
import zlib

from chainer_hybridmem import files
from chainer_hybridmem.errors import OptionError

ROOT = 0  # who could do anything anyway
Folder = str | os.PathLike[str]


def open_folder(cache_dir: Folder) -> str:
    """The folder for kept plans; it is made if only the last part of it is missing.

    Raises:
        OptionError: If it cannot be a folder, or others could put plans there, with
            the value.
    """
    if not isinstance(cache_dir, str | os.PathLike) or not str(cache_dir):
        raise OptionError(
            f'cache_dir is {cache_dir!r}; the name of a folder is needed.'
        )
    folder = os.path.abspath(os.fspath(cache_dir))
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise OptionError(
            f'cache_dir is {cache_dir!r}, which cannot be made: {reason}; give it a '
            f'folder that exists, or one that can be made in such a folder.'
        ) from error
    if not os.path.isdir(folder):
        raise OptionError(f'cache_dir is {cache_dir!r}, which is no folder.')
    _check_trust(folder)
    return folder


def _check_trust(folder: str) -> None:
    """Refuses a folder that is another user's or everybody's; see [trust]."""
    status = os.stat(folder)
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if status.st_uid not in (user, ROOT):
        raise OptionError(
            f'cache_dir is {folder!r}, which belongs to user {status.st_uid} (mode '
            f'{mode:o}): plans in it could be from there; give user {user} a folder '
            f'of its own.'
        )
    if mode & stat.S_IWOTH:
        raise OptionError(
            f'cache_dir is {folder!r}, where every user may put plans (mode {mode:o}): '
            f'end that with chmod o-w, or name a new folder in it.'
        )


def read_private(path: str) -> str:
    """What a file of this user holds; see [trust].

    Raises:
        FormatError: If it is damaged, too large or not this user's alone.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(number, 'rb') as file:
            status = os.fstat(number)
            others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(status.st_mode):
                raise files.broken('guide', 'it is no regular file')
            if status.st_uid != os.geteuid() or others:
                raise files.broken('guide', 'others than this user could write it')
            with gzip.GzipFile(fileobj=file) as unpacked:
                data = files.read_bounded(unpacked)
        text = data.decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise files.broken('guide', f'it cannot be read ({error})') from error
    if len(data) > files.MAXIMUM_FILE_BYTES:
        raise files.broken(
            'guide', f'it has more than {files.MAXIMUM_FILE_BYTES} bytes'
        )
    return text


def replace_private(path: str, data: bytes) -> None:
    """Writes a private file; a reader sees the old one or the new one as a whole."""
    number, partial = tempfile.mkstemp(dir=os.path.dirname(path), prefix='.partial-')
    try:
        with open(number, 'wb') as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
