"""The Trainer extension."""

from __future__ import annotations

from typing import Any, TextIO

import chainer
from chainer.training import extension

from chainer_hybridmem.chainer_access.models import Model, trained_by
from chainer_hybridmem.devices.host_limit import host_limit_bytes
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.execution.verifier import iterations_of
from chainer_hybridmem.planners import DEFAULT, check_name, check_options
from chainer_hybridmem.session.plan_cache import Folder, open_folder
from chainer_hybridmem.session.session import (
    Session,
    check_feedback,
    check_switches,
    optimize,
)
from chainer_hybridmem.simulation.problem import CrossIteration, crossing_of
from chainer_hybridmem.splitting import EXACT, Splitting, check_splitting
from chainer_hybridmem.units import parse_bandwidth, parse_bytes

# Figures of the last iteration that are reported as observations.
_OBSERVED = ('peak_bytes', 'stall_seconds', 'swapped_bytes', 'recomputed_bytes')


class HybridMemory(extension.Extension):
    """Keeps a Trainer's run inside a memory limit.

    Starts a session when the trainer starts, ends it when the trainer ends,
    and reports per iteration ``hybridmem/peak_bytes``,
    ``hybridmem/stall_seconds``, ``hybridmem/swapped_bytes``,
    ``hybridmem/recomputed_bytes``, ``hybridmem/iteration_seconds`` and, once a
    plan is followed, ``hybridmem/overhead`` (measured) and, of the plan,
    ``hybridmem/predicted_seconds``, ``hybridmem/lower_bound_seconds`` and
    ``hybridmem/gap``.

    Args:
        memory_limit: Most bytes on the compute device, such as ``'16GiB'``.
        planner: As in :func:`chainer_hybridmem.optimize`.
        model: The model or, in a list, the models; by default the targets of all
            optimizers of the updater.
        device: As in :func:`chainer_hybridmem.optimize`.
        swap_dir: As in :func:`chainer_hybridmem.optimize`.
        link_bandwidth: As in :func:`chainer_hybridmem.optimize`.
        progress: As in :func:`chainer_hybridmem.optimize`.
        improve: As in :func:`chainer_hybridmem.optimize`.
        arena: As in :func:`chainer_hybridmem.optimize`.
        feedback: As in :func:`chainer_hybridmem.optimize`.
        cross_iteration: As in :func:`chainer_hybridmem.optimize`.
        host_limit: As in :func:`chainer_hybridmem.optimize`.
        disk_bandwidth: As in :func:`chainer_hybridmem.optimize`.
        splitting: As in :func:`chainer_hybridmem.optimize`.
        cache_dir: As in :func:`chainer_hybridmem.optimize`.
        verify: As in :func:`chainer_hybridmem.optimize`.
        options: Options of the planner.

    Raises:
        UnknownNameError: If there is no such planner.
        OptionError: If the limit or bandwidth cannot be read, or the planner has no
            such option or not with this value.

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
        device: str | None = None,
        swap_dir: str | None = None,
        link_bandwidth: float | str | None = None,
        progress: bool | TextIO = False,
        improve: bool = False,
        arena: bool = True,
        feedback: bool | None = None,
        cross_iteration: CrossIteration = False,
        host_limit: int | str | None = None,
        disk_bandwidth: float | str | None = None,
        splitting: Splitting = EXACT,
        cache_dir: Folder | None = None,
        verify: bool | int = False,
        **options: Any,
    ) -> None:
        check_options(check_name(DEFAULT if planner is None else planner), options)
        check_switches(improve=improve, arena=arena)
        check_feedback(feedback)
        crossing_of(cross_iteration)
        iterations_of(verify)
        parse_bytes(memory_limit, 'memory_limit')
        host_limit_bytes(host_limit, swap_dir)
        if link_bandwidth is not None:
            parse_bandwidth(link_bandwidth, 'link_bandwidth')
        if disk_bandwidth is not None:
            parse_bandwidth(disk_bandwidth, 'disk_bandwidth')
        if cache_dir is not None:
            open_folder(cache_dir)
        self.session: Session | None = None
        self._model = model
        self._arguments = {
            'memory_limit': memory_limit,
            'planner': planner,
            'device': device,
            'swap_dir': swap_dir,
            'link_bandwidth': link_bandwidth,
            'progress': progress,
            'improve': improve,
            'arena': arena,
            'feedback': feedback,
            'cross_iteration': cross_iteration,
            'host_limit': host_limit,
            'disk_bandwidth': disk_bandwidth,
            'splitting': check_splitting(splitting),
            'cache_dir': cache_dir,
            'verify': verify,
            **options,
        }

    def initialize(self, trainer: Any) -> None:
        """Starts the session."""
        model = self._model
        if model is None:
            model = trained_by(trainer.updater)
        session = optimize(model, **self._arguments)
        session.__enter__()
        self.session = session

    def __call__(self, trainer: Any) -> None:
        """Ends the iteration and reports its figures."""
        session = self.session
        if session is None:
            return
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
        becomes its cause.
        """
        del trainer, tb
        if self.session is None:
            return
        try:
            self.session.__exit__(type(exc), exc, exc.__traceback__)
        except HybridMemoryError as explained:
            explained.__cause__ = None
            exc.__cause__ = explained

    def finalize(self) -> None:
        """Ends the session and restores allocator and hooks."""
        if self.session is not None:
            self.session.__exit__(None, None, None)
