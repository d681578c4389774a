"""Plan first, layout second: footprint against overhead, in the setting of Zhang et al.

    python -m benchmarks run combined [--samples FOLDER] [--only NETWORK ...] [--redraw]

VGG and ResNets on CIFAR-10 shapes (``cifar.py``), batch 100, recorded with 2 and 4
pictures on the CPU and extrapolated to a GTX 1080 Ti with cuDNN
(docs/guide/estimate.md).
``hybrid`` plans for limits from the in-core peak down, and ``exact`` lays out what it
plans; then bisection between the last limit with a property and the first without. Two
speeds: that of the device model, and that of the paper, whose VGG-16 needs 24 ms for
forward and 28.9 ms to copy 300 MB; all networks are slowed down by the same factor.

Overhead is predicted time over in-core time, minus 1; up to ``NO_OVERHEAD`` counts as
none. Cuts are parts of the in-core load and of the in-core footprint: exact's, and
CnMem's, which is the baseline of the paper. Writes ``combined.json``, ``.md`` and
``.png`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import common, pools, saving
from chainer_hybridmem import InfeasibleError, make_plan
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.lab.pools.replay import replay
from chainer_hybridmem.planning.layouts import (
    check_layout,
    exact,
    in_core_trace,
    planned_trace,
)
from chainer_hybridmem.planning.records.profile import Phase, Profile
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem

Row = dict[str, Any]

NETWORKS = pools.TABLE_1
PLANNER = 'hybrid'
STEP = 0.05  # of the in-core peak
HALVINGS, PROOF_HALVINGS = 5, 12
NO_OVERHEAD, LITTLE_OVERHEAD = 0.0005, 0.15
CALIBRATED_ON, FORWARD_SECONDS = 'VGG16', 0.024  # section VI-B of the paper
COPIED_BYTES, COPY_SECONDS = 300e6, 0.0289
SPEEDS = ('model', 'paper')
PUBLISHED = {
    'VGG16': {'no_overhead_load_cut': 0.309},
    'ResNet50': {'no_overhead_load_cut': 0.342},
    'every network': {'little_overhead_footprint_cut': 0.60},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument('--only', nargs='+', choices=NETWORKS, metavar='NETWORK')
    parser.add_argument(
        '--redraw', action='store_true', help='table and picture from the JSON file'
    )


def main(options: argparse.Namespace) -> int:
    """Runs all networks, writes the results, prints the tables."""
    if options.redraw:
        publish(saving.read('combined'))
        return 0
    body: Row = {
        'planner': PLANNER,
        'alignment': pools.ALIGNMENT,
        'no_overhead': NO_OVERHEAD,
        'little_overhead': LITTLE_OVERHEAD,
        'published': PUBLISHED,
        'networks': [],
    }
    makers = estimators(options.samples)
    for arch in options.only or NETWORKS:
        pair = common.recordings(
            f'benchmarks.cifar:{arch}', options.samples, pools.CIFAR_CLASSES
        )
        for speed, like in makers.items():
            estimator = dataclasses.replace(like, samples=pair)
            profile = estimator.profile(pools.CIFAR_BATCH)
            row = {'network': arch, 'speed': speed, **network(profile)}
            body['networks'].append(row)
            common.save('combined', body)
    publish(body)
    return 0


def estimators(folder: str | None) -> dict[str, Estimator]:
    """One for each speed."""
    model = load_device_model(pools.CIFAR_GPU)
    name = f'benchmarks.cifar:{CALIBRATED_ON}'
    plain = Estimator.make(common.recordings(name, folder, pools.CIFAR_CLASSES), model)
    forward = sum(
        op.device_seconds
        for op in plain.profile(pools.CIFAR_BATCH).operations
        if op.phase is Phase.FORWARD
    )
    rate = COPIED_BYTES / COPY_SECONDS
    link = dataclasses.replace(
        model.link, d2h_bytes_per_second=rate, h2d_bytes_per_second=rate
    )
    slow = dataclasses.replace(
        plain,
        model=dataclasses.replace(model, link=link),
        factor=FORWARD_SECONDS / forward,
    )
    return dict(zip(SPEEDS, (plain, slow), strict=True))


# -- one network -------------------------------------------------------------------


class Sweep:
    """Plans and layouts of one network, by limit.

    Args:
        problem: The iteration.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.points: dict[int, Row | None] = {}

    def at(self, limit_bytes: int) -> Row | None:
        """The point for a limit; None if no plan fits it."""
        if limit_bytes not in self.points:
            self.points[limit_bytes] = self._point(limit_bytes)
        return self.points[limit_bytes]

    def _point(self, limit_bytes: int) -> Row | None:
        try:
            plan = make_plan(self.problem, limit_bytes, PLANNER)
        except InfeasibleError:
            return None
        trace = planned_trace(self.problem.profile, plan)
        layout = exact(trace, pools.ALIGNMENT)
        check_layout(trace, layout)
        row = {
            'limit_bytes': limit_bytes,
            'overhead': plan.predicted_seconds / plan.in_core_seconds - 1,
            'bound_overhead': plan.lower_bound_seconds / plan.in_core_seconds - 1,
            'peak_load_bytes': trace.peak_load_bytes,
            'footprint_bytes': layout.footprint_bytes,
            'optimal': layout.optimal,
            'layout_gap': layout.gap,
            'planning_seconds': plan.planning_seconds,
        }
        print(row, file=sys.stderr, flush=True)
        return row

    def below(self, overhead: float) -> list[Row]:
        """Points with so little overhead."""
        rows = self.points.values()
        return [row for row in rows if row is not None and row['overhead'] <= overhead]

    def halve(self, overhead: float) -> None:
        """Looks between the least limit with so little overhead and the next one."""
        halve(
            lambda limit: (
                (row := self.at(limit)) is not None and row['overhead'] <= overhead
            ),
            max((x for x in self.points if not self._holds(x, overhead)), default=0),
            min(x for x in self.points if self._holds(x, overhead)),
            HALVINGS,
        )

    def _holds(self, limit_bytes: int, overhead: float) -> bool:
        row = self.points[limit_bytes]
        return row is not None and row['overhead'] <= overhead


def halve(holds: Callable[[int], bool], low: int, high: int, times: int) -> int:
    """The least number for which something holds, nearly, by bisection."""
    for _ in range(times):
        middle = (low + high) // 2
        if not low < middle < high:
            break
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def network(profile: Profile) -> Row:
    """All points of one network, and what they come to."""
    problem = make_problem(profile)
    trace = in_core_trace(profile)
    peak, least = problem.in_core_peak_bytes, least_memory(problem)[0]
    sweep = Sweep(problem)
    for k in range(round(1 / STEP)):
        limit = max(least, round(peak * (1 - k * STEP)))
        if sweep.at(limit) is None or limit == least:
            break
    sweep.halve(NO_OVERHEAD)
    sweep.halve(LITTLE_OVERHEAD)
    in_core = problem.in_core_seconds
    most = in_core * (1 + NO_OVERHEAD)
    proven = halve(
        lambda limit: lower_bound(problem, limit).seconds <= most,
        least,
        peak,
        PROOF_HALVINGS,
    )
    moving = sum(s.nbytes for s in profile.feature_maps())
    points = [row for row in sweep.points.values() if row is not None]
    return {
        'in_core_seconds': in_core,
        'peak_load_bytes': peak,
        'exact_bytes': exact(trace, pools.ALIGNMENT).footprint_bytes,
        'cnmem_bytes': replay(trace, 'cnmem').footprint_bytes,
        'feature_map_bytes': moving,
        'initial_bytes': profile.initial_bytes,
        'least_memory_bytes': least,
        'no_overhead': summary(sweep.below(NO_OVERHEAD)),
        'no_overhead_bound_bytes': proven,
        'little_overhead': summary(sweep.below(LITTLE_OVERHEAD)),
        'smallest': summary(points),
        'points': sorted(points, key=lambda row: -row['limit_bytes']),
    }


def summary(rows: list[Row]) -> Row:
    """The least load, and the row with the least footprint."""
    best = min(rows, key=lambda row: row['footprint_bytes'])
    return {'least_load_bytes': min(row['peak_load_bytes'] for row in rows), **best}


# -- text and picture --------------------------------------------------------------


def publish(body: Row) -> None:
    """Writes and prints the tables, draws the picture."""
    text = markdown(body)
    saving.save_text('combined', text)
    print(text)
    draw(body['networks'])


def cuts(row: Row) -> Row:
    """What the table shows of one network."""
    peak, in_core, cnmem = (
        row[key] for key in ('peak_load_bytes', 'exact_bytes', 'cnmem_bytes')
    )
    none, little, least = (
        row[key] for key in ('no_overhead', 'little_overhead', 'smallest')
    )
    published = PUBLISHED.get(row['network'], {}).get('no_overhead_load_cut')
    return {
        'network': row['network'],
        'in-core load': peak,
        'stays': row['initial_bytes'] / peak,
        'largest operation': row['least_memory_bytes'] / peak,
        'no overhead: load': 1 - none['least_load_bytes'] / peak,
        'at most': 1 - row['no_overhead_bound_bytes'] / peak,
        'published': published,
        'no overhead: footprint': 1 - none['footprint_bytes'] / in_core,
        "no overhead: of CnMem's": 1 - none['footprint_bytes'] / cnmem,
        'below 15 %: footprint': 1 - little['footprint_bytes'] / in_core,
        "below 15 %: of CnMem's": 1 - little['footprint_bytes'] / cnmem,
        'below 15 %: overhead': little['overhead'],
        'smallest: footprint': 1 - least['footprint_bytes'] / in_core,
        'smallest: overhead': least['overhead'],
        'largest layout gap': max(point['layout_gap'] for point in row['points']),
    }


def percent(value: float | None) -> str:
    return '' if value is None else f'{value:.1%}'


def markdown(body: Row) -> str:
    """One table for each speed."""
    parts = [
        '# Plan and layout together: what is cut, and at which overhead\n',
        f'CIFAR-10 shapes, batch {pools.CIFAR_BATCH}, {pools.CIFAR_GPU}, planner '
        f'`{body["planner"]}`, layout `exact`, whole forwards replayed. Cuts of load '
        f'and footprint are parts of the in-core ones. No overhead: predicted time at '
        f'most {NO_OVERHEAD:.2%} above in-core. At most: what the lower bound does not '
        f'exclude. Stays: parameters, gradients, optimizer state and batch. Largest '
        f'operation: with what stays, the least memory there is a plan for.\n',
        'Zhang et al.: 30.9 % (VGG16) and 34.2 % (ResNet50) of the load without '
        "overhead, 60 % or more of CnMem's footprint below 15 %.\n",
    ]
    titles = {'model': 'Speed of the device model', 'paper': 'Speed of the paper'}
    for speed, title in titles.items():
        rows = [cuts(row) for row in body['networks'] if row['speed'] == speed]
        if not rows:
            continue
        columns = dict.fromkeys(rows[0], percent)
        columns['network'] = str
        columns['in-core load'] = lambda n: f'{n / 1e6:.0f} MB'
        parts.append(f'## {title}\n\n{common.table(rows, columns)}\n')
    return '\n'.join(parts)


def draw(networks: list[Row]) -> None:
    """Overhead against footprint, one panel for each family."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for panel, family in zip(panels, ('VGG', 'ResNet'), strict=True):
        names = [arch for arch in NETWORKS if arch.startswith(family)]
        for color, arch in enumerate(names):
            for row in (row for row in networks if row['network'] == arch):
                curve = frontier(row)
                paper = row['speed'] == 'paper'
                panel.plot(
                    [x for x, _ in curve],
                    [y for _, y in curve],
                    color=f'C{color}',
                    linestyle='-' if paper else ':',
                    marker='.' if paper else None,
                    label=arch if paper else None,
                )
        for arch, cut in (('VGG16', 0.309), ('ResNet50', 0.342)):
            if arch in names:
                label = f'Zhang et al., {arch}: load'
                panel.plot([1 - cut], [0], 'k^', label=label, zorder=3)
        panel.plot([0.4], [0.15], 'k*', label='Zhang et al., all: of CnMem', zorder=3)
        panel.set(xlim=(0.2, 0.8), ylim=(-0.005, 0.24), xlabel='footprint / in-core')
        panel.xaxis.set_major_formatter(lambda x, _: f'{x:.0%}')
        panel.yaxis.set_major_formatter(lambda y, _: f'{y:.0%}')
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    panels[0].set(ylabel='overhead (predicted)')
    figure.suptitle('speed of the paper (solid), of the device model (dotted)', size=10)
    figure.tight_layout()
    figure.savefig(saving.path('combined', 'png'), dpi=110)
    plt.close(figure)


def frontier(row: Row) -> list[tuple[float, float]]:
    """Footprint and overhead of points that no other one beats in both."""
    points = sorted(
        (point['footprint_bytes'] / row['exact_bytes'], point['overhead'])
        for point in row['points']
    )
    best, curve = float('inf'), []
    for x, y in points:
        if y < best:
            best = y
            curve.append((x, y))
    return curve
