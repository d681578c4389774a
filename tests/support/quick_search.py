"""Short searches, for tests of what follows a plan and not of how good it is.

A session's planner takes up to a second of each test, and the layout of its arena as
long: most of what a test of a small network takes. ``HYBRIDMEM_MATRICES=full`` leaves
the searches as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from chainer_hybridmem.planning.layouts import ejection, offline
from chainer_hybridmem.planning.search import annealing

from .matrices import FULL

QUICK = 'HYBRIDMEM_TESTS_QUICK'  # that forks do so, too: see ``forks.py``
EFFORTS = (
    (annealing, 'STEPS_TIMES_OPERATIONS', 2_000_000),
    (annealing, 'LARGE_STEPS_TIMES_OPERATIONS', 12_000_000),
    (ejection, 'MOST_ATTEMPTS', 6),
    (ejection, 'BISECTIONS', 1),
    (offline, 'SEARCH_TIMES', 0.5),
    (offline, 'BISECTING_SHARE', 0.02),
)


@contextlib.contextmanager
def quick_search() -> Iterator[None]:
    """Plans and layouts are searched for briefly, by the same rules; in forks, too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {QUICK: 'yes'}))
        for module, name, effort in () if FULL else EFFORTS:
            stack.enter_context(mock.patch.object(module, name, effort))
        yield
