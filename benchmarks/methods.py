"""The methods of Ito et al., Fig. 14, measured next to their predictions.

Used by ``host_methods.py`` and ``gpu/methods.py``. One session per network
profiles once; then the methods take turns.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import common

import chainer_hybridmem as hybridmem
from chainer_hybridmem.guide import TIMING_RUNS
from chainer_hybridmem.planners import PLANNERS

OUT_OF_CORE = [name for name in PLANNERS if name not in ('in-core', 'exact')]


def in_core(arch: str, batchsize: int, gpu: bool, iterations: int) -> dict[str, Any]:
    """Time and peak of in-core training, counted but not planned."""
    training = common.Training(arch, batchsize, gpu=gpu)
    with hybridmem.optimize(training.model, '1TB', planner='in-core') as session:
        for _ in range(3 + TIMING_RUNS + iterations):
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
    }


def settle(session: hybridmem.Session, training: common.Training) -> None:
    """Trains until the plan is made and its iterations have been timed."""
    while not session.settled:
        training.step()
    session.finish_iteration()


def out_of_core(
    arch: str,
    batchsize: int,
    limit_bytes: int,
    link_bandwidth: float | None,
    gpu: bool,
    iterations: int,
) -> list[dict[str, Any]]:
    """One row per method at a limit that in-core training does not keep.

    Each method trains ``TIMING_RUNS`` iterations that time its operations, is
    predicted anew, and trains ``iterations`` more. Two errors come of it: that of
    the *forecast*, made before the last iterations, which includes how the
    machine's speed drifts meanwhile; and that of the *simulator*, given the operation
    times of the very iterations it is compared with.
    """
    training = common.Training(arch, batchsize, gpu=gpu)
    options: dict[str, Any] = {'link_bandwidth': link_bandwidth} if not gpu else {}
    rows: list[dict[str, Any]] = []
    with hybridmem.optimize(
        training.model, limit_bytes, progress=sys.stderr, **options
    ) as session:
        settle(session, training)
        for planner in OUT_OF_CORE:
            row = {'arch': arch, 'batchsize': batchsize, 'planner': planner}
            row |= {'limit_bytes': limit_bytes, 'link_bandwidth': link_bandwidth}
            try:
                plan = session.replan(planner)
            except hybridmem.InfeasibleError as error:
                rows.append({**row, 'fits': False, 'why': str(error)})
                continue
            row |= {'first_predicted_seconds': plan.predicted_seconds}
            session.retime()
            timed: list[float] = []
            while not session.settled:
                training.step()
                session.finish_iteration()
                timed.append(session.last_iteration()['seconds'])
            timed = timed[-TIMING_RUNS:]
            simulated = session.plan.predicted_seconds
            row |= {
                'timed_seconds': timed,
                'simulated_seconds': simulated,
                'simulator_error': simulated / statistics.median(timed) - 1,
            }
            for _ in range(iterations):
                training.step()
            session.finish_iteration()
            rows.append({**row, 'fits': True, **session.statistics()})
            rows[-1]['peak_bytes'] = rows[-1]['guided_peak_bytes']
            rows[-1]['all_seconds'] = session.iteration_times()
    return rows


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
        measured, predicted = row['iteration_seconds'], row['predicted_seconds']
        shown.append(
            {
                'arch': f'{row["arch"]} b{row["batchsize"]}',
                'planner': row['planner'],
                'predicted s': f'{predicted:.3f}',
                'measured s': f'{measured:.3f}',
                'forecast error': f'{predicted / measured - 1:+.1%}',
                'simulator error': _percent(row.get('simulator_error')),
                'bound s': _number(row.get('lower_bound_seconds')),
                'overhead': f'{measured / in_core_seconds - 1:+.1%}',
                'speed': f'{base / measured:.2f}x' if base else '',
                'predicted peak': f'{row["predicted_peak_bytes"] / 2**20:.1f}',
                'measured peak': f'{row["peak_bytes"] / 2**20:.1f}',
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
