"""The Trainer extension."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import chainer
from chainer.training import extension

from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.training.chainer_access import graph, tables
from chainer_hybridmem.training.chainer_access.models import Model, trained_by
from chainer_hybridmem.training.session.session import Session
from chainer_hybridmem.training.session.setting.options import (
    Options,
    documents_options,
)
from chainer_hybridmem.units import format_bytes

# Figures of the last iteration that are reported as observations.
_OBSERVED = ('peak_bytes', 'stall_seconds', 'swapped_bytes', 'recomputed_bytes')
PREFIX = 'hybridmem/'


@documents_options
class HybridMemory(extension.Extension):
    """Keeps a Trainer's run inside a memory limit.

    Starts a session when the trainer starts, ends it when the trainer ends,
    and reports per iteration ``hybridmem/peak_bytes``,
    ``hybridmem/stall_seconds``, ``hybridmem/swapped_bytes``,
    ``hybridmem/recomputed_bytes``, ``hybridmem/iteration_seconds`` and, once a
    plan is followed, ``hybridmem/overhead`` (measured) and, of the plan,
    ``hybridmem/predicted_seconds``, ``hybridmem/lower_bound_seconds`` and
    ``hybridmem/gap``. Of several iterations, ``LogReport`` tells the mean, as of all
    that is reported, but of ``hybridmem/peak_bytes`` the highest. ``PrintReport``
    prints bytes with a unit.

    Args:
        model: The model or, in a list, the models; by default the targets of all
            optimizers of the updater.
        {options}

    Raises:
        UnknownNameError: If there is no such planner or device.
        OptionError: If a value cannot be used, or an option is unknown.

    Attributes:
        session (Session or None): The session, once training has started.
    """

    name = 'HybridMemory'
    trigger = (1, 'iteration')
    # After the update, before LogReport (100) and PrintReport collect.
    priority = extension.PRIORITY_WRITER

    def __init__(
        self,
        memory_limit: int | str,
        planner: str | None = None,
        model: Model | None = None,
        **options: Any,
    ) -> None:
        self.session: Session | None = None
        self._model = model
        self._options = Options.of(memory_limit, planner, options)

    def __repr__(self) -> str:
        if self.session is not None:
            return f'<HybridMemory: {self.session!r}>'
        nbytes = self._options.limit_bytes
        limit = format_bytes(nbytes) if nbytes else self._options.memory_limit
        return f'<HybridMemory: planner {self._options.planner}, memory limit {limit}>'

    def initialize(self, trainer: Any) -> None:
        """Starts the session."""
        model = self._model
        if model is None:
            model = trained_by(trainer.updater)
        tables.print_sizes(trainer, PREFIX)
        session = Session(model, self._options)
        session.__enter__()
        session.gives_way = functools.partial(self._give_way, weakref.ref(trainer))
        self.session = session

    def _give_way(self, trainer: weakref.ref[Any]) -> None:
        """Another session begins: this one ends if its trainer has left it open.

        Another extension may have failed where that finalizes none.
        """
        run = chainer.training.Trainer.run
        frame = graph.frame_of(run, sys._getframe(1))
        while frame is not None and frame.f_locals['self'] is not trainer():
            frame = graph.frame_of(run, frame.f_back)
        if frame is None:
            self.finalize()

    def __call__(self, trainer: Any) -> None:
        """Ends the iteration and reports its figures."""
        session = self.session
        if session is None:
            return
        tables.log_highest(trainer, f'{PREFIX}peak_bytes')
        session.finish_iteration()
        figures = session.last_iteration()
        observation = {
            f'hybridmem/{name}': float(figures[name])
            for name in _OBSERVED
            if name in figures
        }
        if figures:
            observation['hybridmem/iteration_seconds'] = figures['seconds']
        plan = session.plan
        if figures.get('guided') and plan is not None:
            observation['hybridmem/predicted_seconds'] = plan.predicted_seconds
            observation['hybridmem/lower_bound_seconds'] = plan.lower_bound_seconds
            observation['hybridmem/gap'] = plan.gap
            if plan.in_core_seconds > 0:
                ratio = figures['seconds'] / plan.in_core_seconds
                observation['hybridmem/overhead'] = ratio - 1
        chainer.report(observation)

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        """Ends the session; out of memory is explained with numbers.

        The trainer raises the original error again, whatever happens here: ours
        becomes its cause and, as what is printed last, a note of it.
        """
        del trainer, tb
        if self.session is None:
            return
        try:
            self.session.__exit__(type(exc), exc, exc.__traceback__)
        except HybridMemoryError as explained:
            explained.__cause__ = None
            exc.__cause__ = explained
            if sys.version_info >= (3, 11):
                exc.add_note(str(explained))

    def finalize(self) -> None:
        """Ends the session and restores allocator and hooks."""
        if self.session is not None:
            self.session.__exit__(None, None, None)
