"""HiGHS prints nothing, whatever it is asked."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from scipy import optimize

from chainer_hybridmem.planning.search.bound.solver import run_solver


def solve_what_prints() -> object:
    """A program whose solution HiGHS 1.12 has to mend, which it prints a line about."""
    rng = np.random.default_rng(53)
    n, half, most = 60, 30, 1e6
    rows = np.zeros((half, n))
    for row in rows:
        chosen = rng.choice(n, 6, replace=False)
        row[chosen] = rng.integers(1, 100, 6) * 10.0 ** rng.integers(-3, 4)
    right = rows.sum(1) * rng.uniform(0.3, 0.6, half) * 100
    cost = np.concatenate([rng.uniform(1, 100, half), -rng.uniform(1, 5, half)])
    opened = np.hstack([-most * np.eye(half), np.eye(half)])
    return optimize.milp(
        cost,
        integrality=np.repeat([1, 0], half),
        bounds=optimize.Bounds(0, np.repeat([1, most], half)),
        constraints=[
            optimize.LinearConstraint(rows, -np.inf, right),
            optimize.LinearConstraint(opened, -np.inf, 0),
        ],
    )


def test_what_highs_prints_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    flush = ctypes.CDLL(None).fflush
    solve_what_prints()
    flush(None)
    if 'HighsMip' not in capfd.readouterr().out:
        pytest.skip('This version of HiGHS does not print.')
    run_solver(solve_what_prints)
    flush(None)
    assert capfd.readouterr() == ('', '')
