"""The version of the package, which kept plans name too, its commit and its extras."""

from __future__ import annotations

import pathlib
import re

__version__ = '0.2.0'

COMMIT_FILE = 'commit.txt'  # written by setup.py into what is built
_DISTRIBUTION = 'chainer_hybridmem'
_FOLDER = pathlib.Path(__file__).parent
_SECONDS = 5  # that git may take


def describe() -> str:
    """Version and commit: ``'0.2.0 (1a2b3c4)'``; the version alone if none is known."""
    commit = find_commit()
    return f'{__version__} ({commit})' if commit else __version__


def describe_installation(extra: str) -> str:
    """The command that installs what an extra brings.

    The package is in no index: what the extra needs is named, as the installed package
    says it, or else as its source does.

    >>> describe_installation('plot')
    'pip install matplotlib'
    """
    from importlib import metadata

    try:
        required = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        required = []
    marker = re.compile(rf'extra *== *.{re.escape(extra)}[\'"]')  # to its quote
    words = []
    for line in required:
        name, _, condition = line.partition(';')
        if marker.search(condition):
            name = name.strip()
            words.append(f"'{name}'" if set(name) & set('<>=*[') else name)
    if not words:
        return f"pip install '.[{extra}]' in the folder of chainer_hybridmem's source"
    return ' '.join(['pip install', *words])


def find_commit(folder: pathlib.Path = _FOLDER) -> str:
    """The commit that a build has noted, else that of the checkout; may be empty.

    Args:
        folder: Of the package. A repository around an installed package is another's.
    """
    try:
        return (folder / COMMIT_FILE).read_text(encoding='ascii').strip()
    except (OSError, UnicodeDecodeError):
        return ask_git(folder.parent)


def ask_git(root: pathlib.Path) -> str:
    """The commit of a checkout, ``-dirty`` if files differ; empty without one or git.

    Args:
        root: Of the checkout.
    """
    import subprocess

    if not (root / '.git').exists():
        return ''
    command = ['git', 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=7']
    try:
        done = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ''
    return done.stdout.strip()
