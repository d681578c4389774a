"""Profiles and plans as files.

What they are is imported where one is read or written: every command imports this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from chainer_hybridmem import files, profiles
from chainer_hybridmem.errors import FormatError

if TYPE_CHECKING:
    from chainer_hybridmem.records.measured_timeline import Measured
    from chainer_hybridmem.records.plan import Plan
    from chainer_hybridmem.records.profile import Profile

Item = TypeVar('Item', 'Profile', 'Plan', 'Measured')


def load_profile(path: str) -> Profile:
    """Reads a profile that :func:`save` has written, or one that is shipped.

    Args:
        path: A file, or one of :func:`chainer_hybridmem.shipped_profiles`.

    Raises:
        FormatError: If the file is missing, damaged or of another version.
        UnknownNameError: If no profile is shipped with this name.
    """
    from chainer_hybridmem.records.profile_file import parse_profile

    if profiles.is_shipped(path):
        return _parsed(path, profiles.read_text(path), parse_profile)
    shipped = f'shipped:{path}'
    if not os.path.exists(path) and shipped in profiles.shipped_profiles():
        raise FormatError(f'There is no file {path}; did you mean {shipped}?')
    return _read(path, parse_profile)


def load_plan(path: str) -> Plan:
    """Reads a plan that :func:`save` has written.

    Raises:
        FormatError: If the file is missing, damaged or of another version.
    """
    from chainer_hybridmem.records.plan_file import parse_plan

    return _read(path, parse_plan)


def load_timeline(path: str) -> Measured:
    """Reads a measured timeline that :func:`save` has written.

    Raises:
        FormatError: If the file is missing, damaged or of another version.
    """
    from chainer_hybridmem.records.measured_timeline_file import parse_timeline

    return _read(path, parse_timeline)


def _read(path: str, parse: Callable[[str], Item]) -> Item:
    """What a file holds; errors name the file."""
    return _parsed(path, files.read_text(path), parse)


def _parsed(path: str, text: str, parse: Callable[[str], Item]) -> Item:
    with files.named(path):
        return parse(text)


def save(item: Profile | Plan | Measured, path: str) -> None:
    """Writes a profile, plan or measured timeline; an existing file is replaced whole.

    Raises:
        FormatError: If the file cannot be written.
    """
    from chainer_hybridmem.records.measured_timeline_file import serialise_timeline
    from chainer_hybridmem.records.plan import Plan
    from chainer_hybridmem.records.plan_file import serialise_plan
    from chainer_hybridmem.records.profile import Profile
    from chainer_hybridmem.records.profile_file import serialise_profile

    if isinstance(item, Profile):
        text = serialise_profile(item)
    elif isinstance(item, Plan):
        text = serialise_plan(item)
    else:
        text = serialise_timeline(item)
    write_text(path, text)


def write_text(path: str, text: str) -> None:
    """Writes text; see :func:`write_bytes`.

    Raises:
        FormatError: If the file cannot be written; an old one stays.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str, contents: bytes) -> None:
    """Writes a file so that a reader sees the old or the new file, never a part.

    What is no regular file, such as a pipe, is written to directly.

    Raises:
        FormatError: If the file cannot be written; an old one stays.
    """
    direct = os.path.exists(path) and not os.path.isfile(path)
    partial = path if direct else f'{path}.{os.getpid()}.partial'
    try:
        with open(partial, 'wb') as file:
            file.write(contents)
        if not direct:
            os.replace(partial, path)
    except OSError as error:
        if not direct:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        reason = error.strerror or error
        raise FormatError(f'{path} cannot be written: {reason}.') from error
