"""The methods of Ito et al., Fig. 14, measured next to their predictions.

Used by ``host_methods.py`` and ``gpu/methods.py``. One session per network
profiles once; then the methods take turns, some iterations each, in several
rounds, so that a machine whose speed drifts is unfair to nobody.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import common

import chainer_hybridmem as hybridmem
from chainer_hybridmem.planners import PLANNERS

OUT_OF_CORE = [name for name in PLANNERS if name != 'in-core']


def in_core(arch: str, batchsize: int, gpu: bool, iterations: int) -> dict[str, Any]:
    """Time and peak of in-core training, counted but not planned."""
    training = common.Training(arch, batchsize, gpu=gpu)
    with hybridmem.optimize(training.model, '1TB', planner='in-core') as session:
        for _ in range(3 + iterations):
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


def out_of_core(
    arch: str,
    batchsize: int,
    limit_bytes: int,
    link_bandwidth: float | None,
    gpu: bool,
    rounds: int,
    iterations: int,
) -> list[dict[str, Any]]:
    """One row per method at a limit that in-core training does not keep."""
    training = common.Training(arch, batchsize, gpu=gpu)
    options: dict[str, Any] = {'link_bandwidth': link_bandwidth} if not gpu else {}
    rows: dict[str, dict[str, Any]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in OUT_OF_CORE}
    with hybridmem.optimize(
        training.model, limit_bytes, 'swap-all', progress=sys.stderr, **options
    ) as session:
        while session.profile is None:
            training.step()
        for _ in range(rounds):
            for planner in OUT_OF_CORE:
                row = {'arch': arch, 'batchsize': batchsize, 'planner': planner}
                try:
                    session.replan(planner)
                except hybridmem.InfeasibleError as error:
                    rows[planner] = {**row, 'fits': False, 'why': str(error)}
                    continue
                for _ in range(iterations):
                    training.step()
                session.finish_iteration()
                seconds[planner] += session.iteration_times()
                rows[planner] = {**row, 'fits': True, **session.statistics()}
                rows[planner]['peak_bytes'] = rows[planner]['guided_peak_bytes']
    for planner, row in rows.items():
        row['limit_bytes'] = limit_bytes
        row['link_bandwidth'] = link_bandwidth
        if row['fits']:
            row['iteration_seconds'] = statistics.median(seconds[planner])
            row['all_seconds'] = seconds[planner]
    return list(rows.values())


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
                'error': f'{predicted / measured - 1:+.1%}',
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


_COLUMNS = (
    'predicted s',
    'measured s',
    'error',
    'overhead',
    'speed',
    'predicted peak',
    'measured peak',
    'keep/swap/recompute',
    'planning s',
    'simulations',
)
