"""AutoSwap's experiments in the setting of Zhang et al. (2019), sections VI-B and VI-C.

    python -m benchmarks run rivals.autoswap [--samples FOLDER] [--only NETWORK ...]
                                         [--redraw]

VGG and ResNets on CIFAR-10 shapes, batch 100, on a modelled GTX 1080 Ti, at the speed
of the paper (``combined.py`` says how), VGG-16 and ResNet-50 also at that of the
device model. Three things:

- overhead against load limit for each score, their Bayesian combination and the default
  planner, beside the proven bound (Fig. 9);
- the largest cut of the load without overhead, by bisection (Table II);
- of the communication that a plan could have hidden, how much it hides (section
  VI-B3): 1 - (time - bound) / seconds of all swap-outs. Since the bound allows
  recomputes and parts of maps, too, this is less than what the paper counts.

Without cross-iteration variables only feature maps leave; with them parameters and
optimizer states as well, as in the paper. Writes ``rivals_autoswap.json``, ``.md`` and
``.png`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from benchmarks import combined, common, pools, saving
from chainer_hybridmem import InfeasibleError, make_plan
from chainer_hybridmem.planning.records.plan import Action
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem

Row = dict[str, Any]

NAME = 'rivals_autoswap'
PLANNERS = (
    *('autoswap-doa', 'autoswap-aoa', 'autoswap-wdoa', 'autoswap-swdoa'),
    *('autoswap-bo', 'hybrid'),
)
CUT = ('autoswap-bo', 'hybrid')  # whose largest cut is looked for
CROSSING = {'feature maps': False, 'and states, parameters': 'all'}
NO_OVERHEAD = combined.NO_OVERHEAD
STEP, LEAST_SHARE = 0.1, 0.4  # of the in-core peak
HALVINGS = 7
PUBLISHED = {'VGG16': 0.309, 'ResNet50': 0.342}
PUBLISHED_HIDDEN = 0.94


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument('--only', nargs='+', choices=pools.TABLE_1, metavar='NETWORK')
    parser.add_argument('--redraw', action='store_true', help='from the JSON file')


def main(options: argparse.Namespace) -> int:
    if options.redraw:
        publish(saving.read(NAME)['networks'])
        return 0
    rows: list[Row] = []
    makers = combined.estimators(options.samples)
    for network in options.only or pools.TABLE_1:
        pair = common.recordings(
            f'benchmarks.cifar:{network}', options.samples, pools.CIFAR_CLASSES
        )
        for speed, like in makers.items():
            if speed == 'model' and network not in PUBLISHED:
                continue
            profile = dataclasses.replace(like, samples=pair).profile(pools.CIFAR_BATCH)
            for moving, crossing in CROSSING.items():
                problem = make_problem(profile, crossing)
                about = {'network': network, 'speed': speed, 'moving': moving}
                print(*about.values(), file=sys.stderr, flush=True)
                rows.append({**about, **experiments(problem)})
        common.save(NAME, {'networks': rows})
    publish(rows)
    return 0


def experiments(problem: Problem) -> Row:
    """Everything about one network."""
    peak, least = problem.in_core_peak_bytes, least_memory(problem)[0]
    points = []
    share = 1.0
    while share >= LEAST_SHARE and share * peak >= least:
        points.append(point(problem, int(share * peak)))
        share -= STEP
    return {
        'in_core_seconds': problem.in_core_seconds,
        'in_core_peak_bytes': peak,
        'least_memory_bytes': least,
        'points': points,
        'cuts': {planner: largest_cut(problem, least, planner) for planner in CUT},
        'bound_cut': proven_cut(problem, least),
    }


def point(problem: Problem, limit_bytes: int) -> Row:
    """Overhead of every planner under one limit, and the bound."""
    row: Row = {
        'limit_bytes': limit_bytes,
        'bound_overhead': lower_bound(problem, limit_bytes).seconds
        / problem.in_core_seconds
        - 1,
    }
    for planner in PLANNERS:
        try:
            plan = make_plan(problem, limit_bytes, planner)
        except InfeasibleError:
            continue
        copying = problem.swap_out_seconds.sum(
            where=[entry.action is Action.SWAP for entry in plan.maps]
        )
        avoidable = plan.predicted_seconds - plan.lower_bound_seconds
        row[planner] = {
            'overhead': plan.overhead,
            'peak_bytes': plan.predicted_peak_bytes,
            'swap_out_seconds': float(copying),
            'hidden': 1 - avoidable / copying if copying > 0 else 1.0,
        }
    return row


def largest_cut(problem: Problem, least: int, planner: str) -> float:
    """Share of the in-core load that goes without overhead."""
    most = problem.in_core_seconds * (1 + NO_OVERHEAD)
    lowest = problem.in_core_peak_bytes

    def holds(limit_bytes: int) -> bool:
        nonlocal lowest
        try:
            plan = make_plan(problem, limit_bytes, planner)
        except InfeasibleError:
            return False
        if plan.predicted_seconds <= most:
            lowest = min(lowest, plan.predicted_peak_bytes)
            return True
        return False

    combined.halve(holds, least, problem.in_core_peak_bytes, HALVINGS)
    return 1 - lowest / problem.in_core_peak_bytes


def proven_cut(problem: Problem, least: int) -> float:
    """What the bound does not exclude."""
    most = problem.in_core_seconds * (1 + NO_OVERHEAD)
    limit_bytes = combined.halve(
        lambda limit: lower_bound(problem, limit).seconds <= most,
        least,
        problem.in_core_peak_bytes,
        combined.PROOF_HALVINGS,
    )
    return 1 - limit_bytes / problem.in_core_peak_bytes


# -- text and picture --------------------------------------------------------------


def publish(rows: list[Row]) -> None:
    """Writes and prints the tables, draws the picture."""
    parts = [
        '# AutoSwap and the default planner in the setting of Zhang et al. (2019)',
        f'CIFAR-10 shapes, batch {pools.CIFAR_BATCH}, {pools.CIFAR_GPU}; predicted. No '
        f'overhead: at most {NO_OVERHEAD:.2%}. Cuts are shares of the in-core load of '
        f'plain Chainer.',
        '## Largest cut of the load without overhead (Table II)',
        common.table([cut(row) for row in rows], dict.fromkeys(cut(rows[0]), _cell)),
        '## Worst score, best score and combination, at the limits in the picture',
        common.table([spread(r) for r in rows], dict.fromkeys(spread(rows[0]), _cell)),
        '## Hidden share of the communication that could be hidden (VI-B3)',
        f'Published: more than {PUBLISHED_HIDDEN:.0%}, VGG-16.',
        common.table([hidden(r) for r in rows], dict.fromkeys(hidden(rows[0]), _cell)),
        '',
    ]
    text = '\n\n'.join(parts)
    saving.save_text(NAME, text)
    print(text)
    draw(rows)


def _cell(value: Any) -> str:
    if value is None:
        return ''
    return f'{value:.1%}' if isinstance(value, float) else str(value)


def _about(row: Row) -> Row:
    return {key: row[key] for key in ('network', 'speed', 'moving')}


def cut(row: Row) -> Row:
    """Table II: ours beside the published cut and what is proven."""
    published = PUBLISHED.get(row['network'])
    return {
        **_about(row),
        'in-core load': f'{row["in_core_peak_bytes"] / 1e6:.0f} MB',
        'largest operation': row['least_memory_bytes'] / row['in_core_peak_bytes'],
        'published': published,
        **row['cuts'],
        'at most': row['bound_cut'],
    }


def spread(row: Row) -> Row:
    """Largest differences between the scores over all limits."""
    scores = [name for name in PLANNERS if name.startswith('autoswap')][:-1]
    differences, gains, behind = [0.0], [0.0], [0.0]
    for found in row['points']:
        values = [found[name]['overhead'] for name in scores if name in found]
        if not values or 'autoswap-bo' not in found:
            continue
        best = found['autoswap-bo']['overhead']
        differences.append(max(values) - min(values))
        gains.append(min(values) - best)
        behind.append(best - found['hybrid']['overhead'])
    return {
        **_about(row),
        'scores differ by at most': max(differences),
        'combination gains at most': max(gains),
        'combination behind hybrid by at most': max(behind),
    }


def hidden(row: Row) -> Row:
    """Smallest and median hidden shares over all limits."""
    result = _about(row)
    for planner in CUT:
        shares = sorted(p[planner]['hidden'] for p in row['points'] if planner in p)
        result[f'{planner}: least'] = shares[0]
        result[f'{planner}: median'] = shares[len(shares) // 2]
    return result


def draw(rows: list[Row]) -> None:
    """Fig. 9 at the speed of the paper, for VGG-16 and ResNet-50."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    shown = [
        row for row in rows if row['network'] in PUBLISHED and row['speed'] == 'paper'
    ]
    if not shown:
        return
    figure, panels = plt.subplots(
        1, len(shown), figsize=(4.2 * len(shown), 4), squeeze=False
    )
    for panel, row in zip(panels[0], shown, strict=True):
        panel_of(panel, row)
    panels[0][0].set(ylabel='overhead (predicted)')
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(saving.path(NAME, 'png'), dpi=110)
    plt.close(figure)


def panel_of(panel: Any, row: Row) -> None:
    """Overhead against load limit, one line for each planner."""
    limits = [found['limit_bytes'] / 1e6 for found in row['points']]
    for number, planner in enumerate(PLANNERS):
        values = [
            found[planner]['overhead'] if planner in found else float('nan')
            for found in row['points']
        ]
        wide = 2.2 if planner in CUT else 1.0
        panel.plot(limits, values, '.-', label=planner, color=f'C{number}', lw=wide)
    bound = [found['bound_overhead'] for found in row['points']]
    panel.fill_between(limits, bound, color='0.85', label='impossible')
    reported = row['in_core_peak_bytes'] * (1 - PUBLISHED[row['network']]) / 1e6
    panel.plot([reported], [0], 'k^', label='Zhang et al.', zorder=3)
    panel.set(xlabel='load limit [MB]', title=f'{row["network"]}, {row["moving"]}')
    panel.yaxis.set_major_formatter(lambda y, _: f'{y:.0%}')
    panel.grid(alpha=0.3)
