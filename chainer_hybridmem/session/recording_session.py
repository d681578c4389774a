"""A session that records iterations for others to plan."""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.chainer_access.models import Model
from chainer_hybridmem.session.iterations.observation import Detail
from chainer_hybridmem.session.session import Session
from chainer_hybridmem.session.setting.options import Options
from chainer_hybridmem.simulation import Problem

# Profiling swaps everything under every planner; this one plans without a search.
PLANNER = 'swap-all'


class RecordingSession(Session):
    """A session that keeps the problem it plans, whether a plan is found or not.

    Args:
        model (Link or list of Link): What is trained.
        options (Options): Of :func:`recording_options`.
        parts (bool): Whether the profile tells what functions need in parts. Finding
            that out takes most of the time.

    Attributes:
        problem (Problem or None): The last one.
    """

    problem: Problem | None = None

    def __init__(self, model: Model, options: Options, parts: bool = True) -> None:
        self.detail = Detail(parts, apart=True)
        super().__init__(model, options)

    def observe_problem(self, problem: Problem) -> None:
        """See :class:`Session`."""
        self.problem = problem


def recording_options(limit_bytes: int, **others: Any) -> Options:
    """What such a session is told: it plans at once, and nothing is done for speed."""
    return Options(limit_bytes, PLANNER, arena=False, feedback=False, **others)
