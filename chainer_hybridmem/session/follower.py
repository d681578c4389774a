"""A session around whatever a program trains, without the program knowing.

Note: [when a session begins]
    Models are those that optimizers have got by ``setup``. A session begins with the
    first function that is applied for a backward after that: by then the program has
    moved its model to the device it trains on. When another model gets an optimizer,
    the session ends, and the next one has all models whose optimizers live: it learns
    anew. A program that begins a session itself keeps it: ours ends, and none follows.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

import chainer

from chainer_hybridmem.chainer_access.beginnings import Beginnings
from chainer_hybridmem.session.optimizing import optimize
from chainer_hybridmem.session.session import Session, active_session
from chainer_hybridmem.units import format_apart, format_count


class Follower:
    """Begins and ends sessions as a program goes on; see [when a session begins].

    Args:
        memory_limit: As for :func:`.optimize`.
        options: Others of :func:`.optimize`, by name.
    """

    def __init__(self, memory_limit: int | str, options: dict[str, Any]) -> None:
        self._limit = memory_limit
        self._options = options
        self._optimizers: list[weakref.ref[Any]] = []
        self._session: Session | None = None
        self._ended: list[Session] = []
        self._own = False  # the program has a session itself
        self._met = False  # an optimizer has got a model
        self._beginnings = Beginnings(self._meet, self._begin)
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _meet(self, optimizer: chainer.Optimizer) -> None:
        self._met = True
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
        self._leave()
        models = self._find_models()
        if not models or active_session() is not None:
            self._own = active_session() is not None
            return
        session = optimize(models, self._limit, **self._options)
        session.gives_way = self._give_way
        session.__enter__()
        self._session = session

    def _give_way(self) -> None:
        """The program begins a session of its own."""
        self._own = True
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        self._ended.append(session)
        if error is None:
            session.__exit__()
        else:
            session.__exit__(type(error), error, error.__traceback__)

    def _begin_in_child(self) -> None:
        """A forked child has left the session; what it trains has one of its own."""
        self._ended = []
        if self._session is not None:
            self._session = None
            self._beginnings.wait()

    def end(self, error: BaseException | None = None) -> None:
        """The program has ended; once is enough.

        Args:
            error: With this.

        Raises:
            OutOfMemoryError: In place of a MemoryError, with a limit that would do.
        """
        atexit.unregister(self.end)
        self._beginnings.stop()
        self._leave(error)

    def describe(self) -> str:
        """What has become of the limit, in a sentence."""
        if not self._ended:
            reason = 'no function has run for a backward since an optimizer had a model'
            if self._own:
                reason = 'the program has a session of its own'
            elif not self._met:
                reason = 'no optimizer of Chainer has got a model'
            return f'the limit was not applied: {reason}'
        figures = [session.statistics() for session in self._ended]
        peak_bytes = max(one['peak_bytes'] for one in figures)
        peak, limit = format_apart(peak_bytes, self._ended[-1].limit_bytes)
        iterations = sum(one['iterations'] for one in figures)
        guided = sum(one['guided_iterations'] for one in figures)
        sessions = len(self._ended)
        where = f' in {format_count(sessions, "session")}' if sessions > 1 else ''
        return (
            f'peak {peak} of {limit}; {format_count(iterations, "iteration")}{where}, '
            f'{guided} of them with a plan'
        )
