"""Whether Chainer is repaired in every program of an environment: a file says so.

Python imports what lines of ``*.pth`` in site-packages import, as it starts.
"""

from __future__ import annotations

import os
import sysconfig

from chainer_hybridmem.errors import HybridMemoryError

SWITCH = 'chainer_hybridmem_repair.pth'
CHILDREN = 'chainer_hybridmem.pth'  # comes with the package; reads HYBRIDMEM_RUN
# Without an error where the package has been uninstalled since.
LINE = (
    "import sys; exec('try: import chainer_hybridmem\\nexcept ImportError: pass')  # "
    'hybridmem repair --disable removes this file\n'
)


def find_folder() -> str:
    """Site-packages of this Python."""
    return sysconfig.get_path('purelib')


def is_enabled() -> bool:
    """Whether the file is there."""
    return os.path.exists(os.path.join(find_folder(), SWITCH))


def children_are_reached() -> bool:
    """Whether children of ``hybridmem run`` are repaired, too."""
    return os.path.exists(os.path.join(find_folder(), CHILDREN))


def enable() -> str:
    """Writes the file; returns its path.

    Raises:
        HybridMemoryError: If site-packages cannot be written.
    """
    path = os.path.join(find_folder(), SWITCH)
    try:
        with open(path, 'w', encoding='utf-8') as file:
            file.write(LINE)
    except OSError as error:
        raise _refuse(path, error) from error
    return path


def disable() -> str:
    """Removes the file, if it is there; returns its path.

    Raises:
        HybridMemoryError: If site-packages cannot be written.
    """
    path = os.path.join(find_folder(), SWITCH)
    try:
        os.remove(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _refuse(path, error) from error
    return path


def _refuse(path: str, error: OSError) -> HybridMemoryError:
    return HybridMemoryError(
        f'{path} cannot be written or removed ({error.strerror}): that is for who may '
        f'install packages there. In a virtual environment of your own it works; '
        f'HYBRIDMEM_RUN=1 before a command repairs that one program.'
    )
