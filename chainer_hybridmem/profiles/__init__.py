"""Recorded iterations that come with the package, to compare planners on.

``benchmarks/rivals/record_profiles.py`` makes them. Names end in where the times are
from: ``-host`` and the like are measured, ``-estimated`` are those of a model.
"""

from __future__ import annotations

import gzip
import zlib
from importlib import resources

from chainer_hybridmem.errors import FormatError, UnknownNameError, nearest

PREFIX = 'shipped:'
SUFFIX = '.json.gz'


def shipped_profiles() -> list[str]:
    """Names that :func:`chainer_hybridmem.load_profile` takes instead of a file."""
    files = resources.files(__name__).iterdir()
    found = (file.name for file in files if file.name.endswith(SUFFIX))
    return sorted(PREFIX + name.removesuffix(SUFFIX) for name in found)


def is_shipped(path: str) -> bool:
    """Whether a path is the name of a shipped profile, known or not."""
    return str(path).startswith(PREFIX)


def read_text(name: str) -> str:
    """The JSON text of a shipped profile.

    Raises:
        UnknownNameError: Naming the profiles there are.
        FormatError: If its file is damaged.
    """
    known = shipped_profiles()
    if name not in known:
        raise UnknownNameError(
            f'There is no profile {name!r}.{nearest(name, known)} Profiles: '
            f'{", ".join(known)}.'
        )
    file = resources.files(__name__) / (name.removeprefix(PREFIX) + SUFFIX)
    try:
        return gzip.decompress(file.read_bytes()).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise FormatError(
            f'{name} is damaged ({error}); install the package again, or take another '
            f'one of {", ".join(known)}.'
        ) from error
