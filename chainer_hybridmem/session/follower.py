"""A session around whatever a program trains, without the program knowing.

Note: [when a session begins]
    Models are those that optimizers have got by ``setup``. A session begins with the
    first function that is applied for a backward after that: by then the program has
    moved its model to the device it trains on. When another model gets an optimizer,
    the session ends, and the next one has all models whose optimizers live: it learns
    anew. A program that begins a session itself keeps it: ours ends, and none follows.
"""

from __future__ import annotations

import gc
import os
import types
import weakref
from typing import Any

import chainer

from chainer_hybridmem.chainer_access.beginnings import Beginnings
from chainer_hybridmem.session.optimizing import optimize
from chainer_hybridmem.session.session import Session, active_session
from chainer_hybridmem.units import format_apart, format_count


class Follower:
    """Begins and ends sessions inside of ``with``; see [when a session begins].

    Args:
        memory_limit: As for :func:`.optimize`.
        options: Others of :func:`.optimize`, by name.
    """

    def __init__(self, memory_limit: int | str, options: dict[str, Any]) -> None:
        self._limit = memory_limit
        self._options = options
        self._optimizers: list[weakref.ref[Any]] = []
        self._session: Session | None = None
        self._figures: list[dict[str, Any]] = []  # of sessions that have ended
        self._own = False  # the program has a session itself
        self._beginnings = Beginnings(self._meet, self._begin)
        os.register_at_fork(after_in_child=self._begin_in_child)

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: types.TracebackType | None = None,
    ) -> None:
        """The program has ended, perhaps with an error.

        Raises:
            OutOfMemoryError: In place of a MemoryError, with a limit that would do.
        """
        self._beginnings.stop()
        if isinstance(error, SystemExit):
            kind = error = trace = None
        self._leave(kind, error, trace)

    def _meet(self, optimizer: chainer.Optimizer) -> None:
        known = self._find_models()
        if not any(found() is optimizer for found in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        inside = any(optimizer.target is model for model in known)
        if not (self._own or (inside and self._session is not None)):
            self._beginnings.wait()

    def _find_models(self) -> list[chainer.Link]:
        """Models of optimizers that live; what is part of another one is left out."""
        found: list[chainer.Link] = []
        for reference in self._optimizers:
            optimizer = reference()
            target = None if optimizer is None else optimizer.target
            if target is not None and not any(target is model for model in found):
                found.append(target)
        parts = {id(link) for model in found for link in model.links(skipself=True)}
        return [model for model in found if id(model) not in parts]

    def _begin(self) -> None:
        """A function for a backward is about to run."""
        if self._session is not None:
            self._leave()
            gc.collect()  # ended sessions and optimizers are in cycles
        self._own = active_session() is not None
        models = self._find_models()
        if models and not self._own:
            session = self._make_session(models)
            session.gives_way = self._give_way
            session.__enter__()
            self._session = session

    def _make_session(self, models: list[chainer.Link]) -> Session:
        return optimize(models, self._limit, **self._options)

    def _give_way(self) -> None:
        """The program begins a session of its own."""
        self._own = True
        self._leave()

    def _leave(self, *error: Any) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.__exit__(*error)
            finally:
                self._figures.append(session.statistics())

    def _begin_in_child(self) -> None:
        """A forked child has left the session; what it trains has one of its own."""
        self._figures = []
        if self._session is not None:
            self._session = None
            self._beginnings.wait()

    def describe(self) -> str:
        """What has become of the limit, in a sentence."""
        figures = self._figures
        if not figures:
            reason = 'no function has run for a backward since an optimizer had a model'
            if self._own:
                reason = 'the program has a session of its own'
            elif not self._optimizers:
                reason = 'no optimizer of Chainer has got a model'
            return f'the limit was not applied: {reason}'
        peak_bytes = max(one['peak_bytes'] for one in figures)
        peak, limit = format_apart(peak_bytes, figures[-1]['limit_bytes'])
        iterations = sum(one['iterations'] for one in figures)
        guided = sum(one['guided_iterations'] for one in figures)
        sessions = len(figures)
        where = f' in {format_count(sessions, "session")}' if sessions > 1 else ''
        return (
            f'peak {peak} of {limit}; {format_count(iterations, "iteration")}{where}, '
            f'{guided} of them with a plan'
        )
