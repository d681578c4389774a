"""The methods of Ito et al., Fig. 14, measured next to their predictions.

Used by ``host_methods.py`` and ``gpu/methods_on_gpu.py``. One session per network
profiles once; then the methods take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common
from chainer_hybridmem.planning.planners import DEFAULT, PLANNERS
from chainer_hybridmem.training.session.guides.guide import LONGEST_WAIT, TIMING_RUNS

OUT_OF_CORE = [name for name in PLANNERS if name not in ('in-core', 'exact')]
WARM_UPS = 2  # iterations of plain Chainer
FIRST = 5  # losses that a row keeps
MOST_ITERATIONS = 40  # until a plan has settled


def in_core(arch: str, batchsize: int, gpu: bool, iterations: int) -> dict[str, Any]:
    """Time and peak of in-core training, counted but not planned."""
    training = common.Training(arch, batchsize, gpu=gpu)
    with hybridmem.optimize(training.model, '1TB', planner='in-core') as session:
        for _ in range(3 + LONGEST_WAIT + TIMING_RUNS + iterations):
            training.step()
        fixed = training.fixed_bytes()
    figures = session.statistics()
    return {
        'arch': arch,
        'batchsize': batchsize,
        'planner': 'in-core',
        'iteration_seconds': figures['iteration_seconds'],
        'predicted_seconds': figures['predicted_seconds'],
        'peak_bytes': figures['guided_peak_bytes'],
        'predicted_peak_bytes': figures['in_core_peak_bytes'],
        'fixed_bytes': fixed,
        'losses': training.losses,
    }


def plain(
    arch: str, batchsize: int, iterations: int, insize: int = 224
) -> dict[str, Any]:
    """Time and memory of plain Chainer on the current GPU: the pool's, as it grows."""
    import cupy

    common.free_gpu()
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    training = common.Training(arch, batchsize, insize, gpu=True)
    seconds = []
    for _ in range(WARM_UPS + iterations):
        began = time.perf_counter()
        training.step()
        cupy.cuda.Device().synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        'arch': arch,
        'batchsize': batchsize,
        'planner': 'in-core',
        'iteration_seconds': statistics.median(seconds[WARM_UPS:]),
        'all_seconds': seconds,
        'footprint_bytes': pool.total_bytes() - before,
        'fixed_bytes': training.fixed_bytes(),
        'losses': training.losses,
    }


def settle(session: hybridmem.Session, training: common.Training) -> list[float]:
    """Trains until the plan is made and its iterations have been timed.

    Returns:
        Seconds of each iteration.

    Raises:
        RuntimeError: If that does not come.
    """
    seconds: list[float] = []
    while not session.settled:
        if len(seconds) == MOST_ITERATIONS:
            raise RuntimeError(f'not settled after {MOST_ITERATIONS} iterations')
        training.step()
        session.finish_iteration()
        seconds.append(session.last_iteration()['seconds'])
    return seconds


def out_of_core(
    arch: str,
    batchsize: int,
    limit_bytes: int,
    link_bandwidth: float | None,
    gpu: bool,
    iterations: int,
    planners: Sequence[str] = OUT_OF_CORE,
    keep: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row per method at a limit that in-core training does not keep.

    Each method trains ``TIMING_RUNS`` iterations that time its operations, is
    predicted anew, and trains ``iterations`` more. Two errors come of it: that of
    the *forecast*, made before the last iterations, which includes how the
    machine's speed drifts meanwhile; and that of the *simulator*, given the operation
    times of the very iterations it is compared with. The session begins with the
    first method, if that is the default.

    Args:
        arch: Name of the architecture.
        batchsize: Pictures per iteration.
        limit_bytes: The memory limit.
        link_bandwidth: Bytes per second of copies on the host; None for its own speed.
        gpu: Whether to train on the current GPU.
        iterations: Of each method, after those that time its operations.
        planners: The methods.
        keep: Called with each row as it is measured.
    """
    if gpu:
        common.free_gpu()
    training = common.Training(arch, batchsize, gpu=gpu)
    options: dict[str, Any] = {'link_bandwidth': link_bandwidth} if not gpu else {}
    rows: list[dict[str, Any]] = []
    with hybridmem.optimize(
        training.model, limit_bytes, DEFAULT, progress=sys.stderr, **options
    ) as session:
        settle(session, training)
        for planner in planners:
            row = {'arch': arch, 'batchsize': batchsize, 'planner': planner}
            row |= {'limit_bytes': limit_bytes, 'link_bandwidth': link_bandwidth}
            try:
                row |= _measure(session, training, planner, iterations, not rows)
            except (hybridmem.HybridMemoryError, RuntimeError) as error:
                # No plan here, or one that asks for options: the others go on.
                why = f'{type(error).__name__}: {error}'
                row |= {'fits': False, 'why': why}
            rows.append(row)
            keep(row)
    return rows


def _measure(
    session: hybridmem.Session,
    training: common.Training,
    planner: str,
    iterations: int,
    first: bool,
) -> dict[str, Any]:
    """What one method's row says of its iterations."""
    before = session.statistics()
    if first and planner == DEFAULT:
        assert session.plan is not None
        plan = session.plan
    else:
        plan = session.replan(planner)
    row: dict[str, Any] = {'first_predicted_seconds': plan.predicted_seconds}
    session.retime()
    timed = settle(session, training)[-TIMING_RUNS:]
    simulated = session.plan.predicted_seconds
    row |= {
        'timed_seconds': timed,
        'simulated_seconds': simulated,
        'simulator_error': _error(simulated, statistics.median(timed)),
    }
    for _ in range(iterations):
        training.step()
    session.finish_iteration()
    figures = session.statistics()
    row |= {**figures, 'fits': True, 'peak_bytes': figures['guided_peak_bytes']}
    for name in ('evictions', 'restores'):  # of this method only
        row[name] = figures[name] - before[name]
    row['losses'] = training.losses[:FIRST]
    return {**row, 'all_seconds': session.iteration_times()}


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def show(rows: list[dict[str, Any]], in_core_seconds: float) -> str:
    """The table of one network; speeds relative to swap-all-unscheduled."""
    base = next(
        (r['iteration_seconds'] for r in rows if r['planner'].endswith('unscheduled')),
        None,
    )
    shown = []
    for row in rows:
        if not row.get('fits', True):
            shown.append({**row, **dict.fromkeys(_COLUMNS, ''), 'fits': False})
            shown[-1] |= {'arch': row['arch'], 'planner': row['planner'] + ': no plan'}
            continue
        measured, predicted = row['iteration_seconds'], row.get('predicted_seconds')
        shown.append(
            {
                'arch': f'{row["arch"]} b{row["batchsize"]}',
                'planner': row['planner'],
                'predicted s': _number(predicted),
                'measured s': f'{measured:.3f}',
                'forecast error': _percent(_error(predicted, measured)),
                'simulator error': _percent(row.get('simulator_error')),
                'bound s': _number(row.get('lower_bound_seconds')),
                'overhead': _percent(_error(measured, in_core_seconds)),
                'speed': f'{base / measured:.2f}x' if base and measured else '',
                'predicted peak': _mebibytes(row.get('predicted_peak_bytes')),
                'measured peak': _mebibytes(row.get('peak_bytes')),
                'keep/swap/recompute': '/'.join(
                    str(row.get(key, '')) for key in ('keep', 'swap', 'recompute')
                ),
                'planning s': f'{row.get("planning_seconds") or 0:.3f}',
                'simulations': str(row.get('simulations', '')),
            }
        )
    return common.table(shown, dict.fromkeys(['arch', 'planner', *_COLUMNS], str))


def _percent(value: float | None) -> str:
    return '' if value is None else f'{value:+.1%}'


def _mebibytes(value: int | None) -> str:
    return '' if value is None else f'{value / 2**20:.1f}'


def _number(value: float | None) -> str:
    return '' if value is None else f'{value:.3f}'


_COLUMNS = (
    'predicted s',
    'measured s',
    'forecast error',
    'simulator error',
    'bound s',
    'overhead',
    'speed',
    'predicted peak',
    'measured peak',
    'keep/swap/recompute',
    'planning s',
    'simulations',
)
