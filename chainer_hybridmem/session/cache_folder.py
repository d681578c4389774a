"""The folder in which plans are kept; see Note: [trust] of :mod:`.plan_cache`."""

from __future__ import annotations

import contextlib
import os
import stat

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
