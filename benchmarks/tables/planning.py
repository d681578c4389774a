"""Predicted plans: planners beside each other, beside papers, and their own cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.tables import contest
from benchmarks.tables.form import (
    Body,
    Section,
    gigabytes,
    megabytes,
    overhead,
    percent,
    ratio,
    seconds,
    table,
)

EQUAL = 1e-4  # as fast as the fastest, as in hybridmem compare


def compare(body: Body, chosen: Sequence[str] = ()) -> str:
    """Returns planners over all profiles and limits, the best ones first.

    Args:
        body: Content of ``rivals_compare.json``.
        chosen: Planners to show; all if empty.
    """
    cases: dict[tuple[str, int], list[Body]] = {}
    for row in body['rows']:
        cases.setdefault((row['profile'], row['memory_limit_bytes']), []).append(row)
    lines = []
    for planner in chosen or dict.fromkeys(row['planner'] for row in body['rows']):
        rows = [row for row in body['rows'] if row['planner'] == planner]
        lines.append((planner, *_over_all(rows, cases), len(rows)))
    lines.sort(key=lambda line: (-line[1], line[2]))
    head = ['planner', 'fits', 'time / bound', 'fastest', 'longest planning']
    return table(
        head,
        [
            [
                f'`{planner}`',
                f'{fits} of {limits}',
                f'{mean:.3f}',
                fastest,
                short_seconds(longest),
            ]
            for planner, fits, mean, fastest, longest, limits in lines
        ],
    )


def _over_all(
    rows: list[Body], cases: dict[tuple[str, int], list[Body]]
) -> tuple[int, float, int, float]:
    """Returns how often a planner fits and wins, its mean gap and longest planning."""
    fitting = [row for row in rows if row['fits']]
    gaps = [math.log1p(row['gap']) for row in fitting]
    fastest = 0
    for row in fitting:
        rivals = cases[row['profile'], row['memory_limit_bytes']]
        best = min(rival['iteration_seconds'] for rival in rivals if rival['fits'])
        fastest += row['iteration_seconds'] <= best * (1 + EQUAL)
    longest = max(row['planning_seconds'] for row in fitting)
    return len(fitting), math.exp(statistics.fmean(gaps)), fastest, longest


def short_seconds(value: float) -> str:
    """Returns seconds, or milliseconds if they are few."""
    return f'{value:.1f} s' if value >= 0.1 else f'{1000 * value:.0f} ms'


def published(body: Body) -> str:
    """Returns figures of papers beside plans in the same modelled setting."""
    head = ['published figure', 'published', 'as time', '`hybrid`', 'bound']
    head += ['best other planner here', 'what differs']
    return table(
        head,
        [
            [
                f'{row["name"]} ({row["arch"]} b{row["batchsize"]})',
                row['published'],
                overhead(row['published_overhead'], 0),
                overhead(row['overhead']),
                overhead(row['bound_overhead']) or 'no plan',
                _rival(row),
                row['different'],
            ]
            for row in body['settings']
        ],
    )


def _rival(row: Body) -> str:
    if row['best_rival'] is None:
        return 'no plan'
    return f'{overhead(row["best_rival_overhead"])} `{row["best_rival"]}`'


def autoswap(body: Body) -> str:
    """Returns the largest cut of the load without overhead."""
    head = ['network', 'speed', 'may leave', 'in-core load', '`autoswap-bo`']
    head += ['`hybrid`', 'at most']
    return table(
        head,
        [
            [
                row['network'],
                row['speed'],
                row['moving'],
                megabytes(row['in_core_peak_bytes']),
                percent(row['cuts']['autoswap-bo']),
                percent(row['cuts']['hybrid']),
                percent(row['bound_cut']),
            ]
            for row in body['networks']
        ],
    )


def scale(body: Body) -> str:
    """Returns what planning takes, from small networks to a thousand layers."""
    head = ['network', 'operations', 'feature maps', 'planning', 'simulations', 'gap']
    return table(
        head,
        [
            [
                row['network'],
                f'{row["operations"]:,}',
                f'{row["maps"]:,}',
                f'{row["planning_seconds"]:.1f} s',
                f'{row["simulations"]:,}',
                percent(row['gap'], 2),
            ]
            for row in body['rows']
        ],
    )


def gap(body: Body) -> str:
    """Returns the gap to the bound against planning time."""
    lines: list[list[Any]] = []
    for network in body['networks']:
        for plan in network['plans']:
            budget = plan['time_budget']
            lines.append(
                [
                    network['network'],
                    'default steps' if budget is None else f'{budget} s',
                    f'{plan["planning_seconds"]:.2f} s',
                    f'{plan["simulations"]:,}',
                    overhead(plan['overhead'], 2),
                    percent(plan['gap'], 2),
                ]
            )
    head = ['network', 'time budget', 'planning', 'simulations', 'over in-core', 'gap']
    return table(head, lines)


def evaluations(body: Body) -> str:
    """Returns how fast candidates are simulated."""
    head = ['network', 'operations', 'candidates', 'limit', 'evaluations / s']
    head += ['ns / operation', 'annealing, µs / step']
    return table(
        head,
        [
            [
                row['network'],
                f'{row["operations"]:,}',
                row['candidates'],
                gigabytes(row['limit_bytes']),
                f'{row["evaluations_per_second"]:,.0f}',
                seconds(row['ns_per_operation'], 1),
                seconds(row['annealing_us_per_step'], 1),
            ]
            for row in body['rows']
        ],
    )


def many_allocations(body: Body, before: Body) -> str:
    """Returns the longest pause of a session with many small allocations."""
    old = {(row['allocations'], row['planner']): row for row in before['rows']}
    lines = []
    for row in body['rows']:
        former = old[row['allocations'], row['planner']]['longest_pause_cpu_seconds']
        now = row['longest_pause_cpu_seconds']
        lines.append(
            [
                f'{row["allocations"]:,}',
                f'`{row["planner"]}`',
                f'{former:.2f} s',
                f'{now:.2f} s',
            ]
        )
    layouts = [
        [f'{row["blocks"]:,}', f'{row["cpu_seconds"]:.2f} s', percent(row['gap'], 2)]
        for row in body['layouts']
    ]
    return '\n\n'.join(
        [
            table(['allocations', 'planner', 'pause before', 'pause now'], lines),
            table(['blocks of an arena', 'layout', 'above the bound'], layouts),
        ]
    )


def cuda_counts(body: Body) -> str:
    """Returns what an iteration calls of CUDA beside plain Chainer."""
    head = ['iteration', 'issuing', 'over plain', 'bytecodes over plain']
    head += ['launches', 'copies', 'mallocs', 'events', 'synchronisations']
    once = {'guided_over_plain': 1.0, 'bytecodes_over_plain': 1.0}
    last = [
        (
            'plain Chainer',
            body['plain'],
            {**once, 'guided_seconds': body['sessions'][0]['plain_seconds']},
        )
    ]
    last += [
        (f'guided, `{session["planner"]}`', session['rows'][-1], session)
        for session in body['sessions']
    ]
    return table(
        head,
        [
            [
                name,
                f'{1000 * found["guided_seconds"]:.0f} ms',
                ratio(found['guided_over_plain'], 2),
                ratio(found['bytecodes_over_plain'], 2),
                f'{row["launch"]:,}',
                row['copy'],
                row['malloc'],
                row['event_create'],
                row['synchronize'],
            ]
            for name, row, found in last
        ],
    )


def first_plan(body: Body) -> str:
    """Returns what first plans and sessions take, and what plans take again."""
    packages = list(dict.fromkeys(row['package'] for row in body['commands']))
    rows: dict[str, list[str]] = {}
    for row in body['commands']:
        of = rows.setdefault(row['command'], [])
        of += [seconds(row[f'{when}_cpu_seconds']) for when in ('first', 'again')]
    head = [f'{name}, {when}' for name in packages for when in ('first', 'again')]
    text = table(['command', *head], [[name, *of] for name, of in rows.items()])
    planning = body['planning']
    if 'median_ratio' not in planning:
        return text
    return (
        f'{text}\n\nOf {planning["plans"]} default plans with a full cache '
        f'{planning["different_plans"]} differ from before; their CPU time is '
        f'{planning["median_ratio"]:.2f} times that of before (median).'
    )


SECTIONS = (
    *contest.SECTIONS,
    Section(
        ('rivals_compare',),
        'Every planner on every shipped profile',
        """Nine shipped profiles (recorded on a CPU, or estimated for a V100 and a GTX
        1080 Ti), six limits each, from the least memory of any plan to the in-core
        peak. *Time / bound* is the predicted time over the proven bound, as a
        geometric mean over the limits that a planner fits; a mean over few limits is
        no better for being small. *Fastest* counts the limits at which no planner is
        faster. Each profile:
        [rivals_compare.md](../benchmarks/results/rivals_compare.md),
        [picture](../benchmarks/results/rivals_compare.png).""",
        compare,
    ),
    Section(
        ('rivals_published',),
        'Published figures beside plans in the same setting',
        """Predicted time over in-core time; one kernel replays normalisations,
        additions and ReLU; the planner of `hybrid (whole)` has whole forwards only.
        The conditions of the papers differ, as the last column says. In 1/7.5
        of the memory a single backward convolution of ResNet-50 needs more than there
        is; with [functions in parts](guide/splitting.md), which this table does not
        use, a smaller batch trains there. Every planner:
        [rivals_published.md](../benchmarks/results/rivals_published.md).""",
        published,
    ),
    Section(
        ('rivals_autoswap',),
        'Largest cut of memory without overhead',
        """As AutoSwap: CIFAR-10 shapes, batch 100, modelled GTX 1080 Ti. *At most* is
        what the bound does not exclude. *Speed* is that of the device model, or
        calibrated on the VGG-16 of Zhang et al., who publish 30.9 % for VGG-16 and
        34.2 % for ResNet-50. More:
        [rivals_autoswap.md](../benchmarks/results/rivals_autoswap.md).""",
        autoswap,
    ),
    Section(
        ('planning_scale',),
        'Planning time of `hybrid`',
        """Default options, modelled V100 with 16 GB, one core. *Gap* is predicted
        time over the proven bound, minus 1.""",
        scale,
    ),
    Section(
        ('first_plan',),
        'The first plan on a machine',
        """CPU seconds of whole processes, each with a cache of compiled functions of
        its own: empty at first, then what that has left. *Before* is an earlier commit,
        in turns with this one.""",
        first_plan,
    ),
    Section(
        ('paper_gap',),
        'Gap to the bound against planning time',
        """`hybrid` on a modelled V100. More:
        [paper_gap.md](../benchmarks/results/paper_gap.md).""",
        gap,
    ),
    Section(
        ('evaluations',),
        'Speed of the simulator',
        """Evaluations of random candidates, by network and kind of candidate.""",
        evaluations,
    ),
    Section(
        ('many_allocations', 'many_allocations_before'),
        'Programs with very many small allocations',
        """A made-up detector whose NumPy loops allocate. The longest pause of a
        session in CPU seconds, and layouts of as many blocks. *Before*: at the commit
        of the second file, which counted every small array by itself. How long
        `hybrid` searches depends on measured times and varies between runs.""",
        many_allocations,
    ),
    Section(
        ('cuda_counts',),
        'What an iteration calls of CUDA',
        """ResNet-50, batch 256, in 16 GiB on the emulated GPU with kernels skipped:
        calls of the last iteration of each kind. *Issuing* is the time of Python and
        the driver calls: medians of iterations that were taken in turns with plain
        ones. *Bytecodes* are those of Python.""",
        cuda_counts,
    ),
)
