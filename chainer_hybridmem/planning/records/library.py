"""Profiles and plans as files.

What they are is imported where one is read or written: every command imports this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from chainer_hybridmem import files, profiles
from chainer_hybridmem.errors import FormatError, OptionError

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.measured_timeline import Measured
    from chainer_hybridmem.planning.records.plan import Plan
    from chainer_hybridmem.planning.records.profile import Profile

Path = str | os.PathLike[str]
Item = TypeVar('Item', 'Profile', 'Plan', 'Measured')


def load_profile(path: Path) -> Profile:
    """Reads a profile that :func:`save` has written, or one that is shipped.

    Args:
        path: A file, or one of :func:`chainer_hybridmem.shipped_profiles`.

    Raises:
        FormatError: If the file is missing, damaged or of another version.
        UnknownNameError: If no profile is shipped with this name.
    """
    from chainer_hybridmem.planning.records.profile_file import FORMAT, parse_profile

    path = os.fspath(path)
    if profiles.is_shipped(path):
        return _parsed(path, profiles.read_text(path), parse_profile)
    shipped = f'shipped:{path}'
    if not os.path.exists(path) and shipped in profiles.shipped_profiles():
        raise FormatError(f'There is no file {path}; did you mean {shipped}?')
    return _read(path, FORMAT, parse_profile)


def load_plan(path: Path) -> Plan:
    """Reads a plan that :func:`save` has written.

    Raises:
        FormatError: If the file is missing, damaged or of another version.
    """
    from chainer_hybridmem.planning.records.plan_file import FORMAT, parse_plan

    return _read(path, FORMAT, parse_plan)


def load_timeline(path: Path) -> Measured:
    """Reads a measured timeline that :func:`save` has written.

    Raises:
        FormatError: If the file is missing, damaged or of another version.
    """
    from chainer_hybridmem.planning.records.measured_timeline import (
        FORMAT,
        parse_timeline,
    )

    return _read(path, FORMAT, parse_timeline)


def _read(path: Path, format_name: str, parse: Callable[[str], Item]) -> Item:
    """What a file holds; errors name the file."""
    path = os.fspath(path)
    return _parsed(path, files.read_text(path, format_name), parse)


def _parsed(path: str, text: str, parse: Callable[[str], Item]) -> Item:
    with files.named(path):
        return parse(text)


def save(item: Profile | Plan | Measured | None, path: Path) -> None:
    """Writes a profile, plan or measured timeline; an existing file is replaced whole.

    :func:`load_profile`, :func:`load_plan` and :func:`load_timeline` read it again.

    Args:
        item: Such as ``session.profile``, ``session.plan`` or ``session.timeline``.
        path: The file.

    Raises:
        FormatError: If the file cannot be written.
        OptionError: If it is none of these, as long as a session has none.
    """
    from chainer_hybridmem.planning.records.measured_timeline import (
        Measured,
        serialise_timeline,
    )
    from chainer_hybridmem.planning.records.plan import Plan
    from chainer_hybridmem.planning.records.plan_file import serialise_plan
    from chainer_hybridmem.planning.records.profile import Profile
    from chainer_hybridmem.planning.records.profile_file import serialise_profile

    if isinstance(item, Profile):
        text = serialise_profile(item)
    elif isinstance(item, Plan):
        text = serialise_plan(item)
    elif isinstance(item, Measured):
        text = serialise_timeline(item)
    else:
        found = 'None' if item is None else f'a {type(item).__name__}'
        raise OptionError(
            f'{found} cannot be saved; a profile, a plan or a measured timeline can, '
            f'which a session has once there is one: session.profile, session.plan, '
            f'session.timeline.'
        )
    write_text(os.fspath(path), text)


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
