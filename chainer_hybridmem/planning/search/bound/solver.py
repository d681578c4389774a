"""Calls HiGHS through SciPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from chainer_hybridmem.interrupts import run_aside
from chainer_hybridmem.terminal import c_output_dropped

Result = TypeVar('Result')


def run_solver(solve: Callable[[], Result]) -> Result:
    """Calls a solver in a way that Ctrl-C gets out of, and of which nothing is seen.

    HiGHS prints some lines from C whatever its options say. A solver that Ctrl-C has
    left alone is quiet until it ends.
    """

    def quiet() -> Result:
        with c_output_dropped():
            return solve()

    return run_aside(quiet)
