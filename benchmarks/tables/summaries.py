"""The tables of ``docs/results.md``: what a user wants to know, and what it says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.tables import checks, contest, memory, planning, training
from benchmarks.tables.choice import SHOWN
from benchmarks.tables.form import (
    Body,
    Summary,
    megabytes,
    overhead,
    percent,
    ratio,
    seconds,
    table,
)

MEASURED = ('swap-all', 'superneurons', 'pooch', 'hybrid')
POOLS = {'cupy': "CuPy's pool", 'exact': 'a layout'}
HALF = 2  # the memory over the limit


def _span(values: Iterable[float]) -> str:
    found = sorted(values)
    low, high = ratio(found[0]), ratio(found[-1])
    return f'{low}' if low == high else f'{low} to {high}'


# -- measured on a CPU ---------------------------------------------------------
def _by_network(body: Body) -> list[dict[str, Body]]:
    networks: dict[str, dict[str, Body]] = {}
    for row in body['rows']:
        networks.setdefault(row['arch'], {})[row['planner']] = row
    return list(networks.values())


def half_memory(body: Body) -> str:
    """Returns seconds of an iteration of plain Chainer and of some planners."""
    head = ['network', 'plain Chainer', 'needs', 'limit']
    head += [*(f'`{name}`' for name in MEASURED), 'peak of `hybrid`']
    return table(
        head,
        [
            [
                f'{rows["hybrid"]["arch"]} b{rows["hybrid"]["batchsize"]}',
                f'{seconds(rows["in-core"]["iteration_seconds"])} s',
                megabytes(rows['in-core']['peak_bytes']),
                megabytes(rows['hybrid']['limit_bytes']),
                *(f'{seconds(rows[name]["iteration_seconds"])} s' for name in MEASURED),
                megabytes(rows['hybrid']['peak_bytes']),
            ]
            for rows in _by_network(body)
        ],
    )


def half_memory_says(body: Body) -> str:
    """Returns how much slower training is, and how far off the simulator."""
    networks = _by_network(body)

    def slower(planner: str) -> str:
        return _span(
            rows[planner]['iteration_seconds'] / rows['in-core']['iteration_seconds']
            for rows in networks
        )

    errors = [
        abs(row['simulator_error'])
        for row in body['rows']
        if row.get('simulator_error') is not None
    ]
    return (
        f'With `hybrid` an iteration takes {slower("hybrid")} the time of plain '
        f'Chainer, with `swap-all` {slower("swap-all")}; the link has the speed, '
        'relative to compute, of a V100 on PCIe 3. The simulator is off by '
        f'{percent(statistics.median(errors))} in the median, '
        f'{percent(max(errors))} at worst.'
    )


def judge_says(body: Body) -> str:
    """Returns who judges; the table says how."""
    return 'Both processes train in the same memory control group of Linux.'


# -- predicted -----------------------------------------------------------------
def modelled_says(body: Body) -> str:
    """Returns how close the plans are to the bound."""
    above = max(
        row['iteration_seconds'] / row['lower_bound_seconds'] - 1
        for row in _largest(body)
    )
    return (
        'Predicted time over in-core time with 16 GB, at the largest batch of the '
        f'sweep. No plan of `hybrid` is more than {percent(above)} above the bound, '
        'below which no plan can be.'
    )


def _largest(body: Body) -> list[Body]:
    rows = [row for row in body['rows'] if row['method'] == 'hybrid']
    most = {
        arch: max(row['batchsize'] for row in rows if row['arch'] == arch)
        for arch in {row['arch'] for row in rows}
    }
    return [row for row in rows if row['batchsize'] == most[row['arch']]]


def compared(body: Body) -> str:
    """Returns the planners that a reader compares."""
    return planning.compare(body, (*SHOWN, 'swap-all'))


def compared_says(body: Body) -> str:
    """Returns over what the planners are compared."""
    rows = body['rows']
    profiles = {row['profile'] for row in rows}
    planners = {row['planner'] for row in rows}
    return (
        f'{len(planners)} planners at six limits on each of {len(profiles)} recorded '
        'iterations, from the least memory of any plan to the in-core peak. *Fastest* '
        'counts the limits at which none is faster, *time / bound* is the mean over '
        'the limits that a planner fits.'
    )


def published(body: Body) -> str:
    """Returns figures of papers beside `hybrid`."""
    head = ['published figure', 'as time', '`hybrid`', 'bound', 'what differs']
    return table(
        head,
        [
            [
                f'{row["name"]} ({row["arch"]} b{row["batchsize"]})',
                overhead(row['published_overhead'], 0),
                overhead(row['overhead']),
                overhead(row['bound_overhead']) or 'no plan',
                row['different'],
            ]
            for row in body['settings']
        ],
    )


def published_says(body: Body) -> str:
    """Returns how many figures are reached."""
    rows = body['settings']
    below = sum(row['overhead'] <= row['published_overhead'] for row in rows)
    return (
        f'At {below} of {len(rows)} settings the predicted overhead is at most the '
        'published one. The published figures are measured and these are predicted, '
        'for a model of the same GPU.'
    )


# -- memory --------------------------------------------------------------------
def _planned(body: Body) -> list[Body]:
    shown = ('in-core', 'hybrid, relaxed')
    return [row for row in body['planned'] if row['planner'] in shown]


def footprint(body: Body) -> str:
    """Returns footprints over the load for some pools."""
    head = ['network', 'as', 'peak load', *POOLS.values()]
    return table(
        head,
        [
            [
                row['network'],
                row['planner'],
                megabytes(row['peak_load_bytes']),
                *(f'{row[pool]:.3f}' for pool in POOLS),
            ]
            for row in _planned(body)
        ],
    )


def footprint_says(body: Body) -> str:
    """Returns what pools need at worst."""
    rows = _planned(body)
    worst = {pool: ratio(max(row[pool] for row in rows)) for pool in POOLS}
    return (
        f"Memory taken over memory in use: CuPy's pool takes up to {worst['cupy']}, "
        f'the layouts of this package up to {worst["exact"]}. A session allocates at '
        'the places of such a layout, its *arena*.'
    )


# -- bits and programs ---------------------------------------------------------
def exactness_says(body: Body) -> str:
    """Returns how many planners are exact."""
    rows = [row for row in body['rows'] if row['fits']]
    return (
        f'{sum(row["exact"] for row in rows)} of {len(rows)} trainings have the loss, '
        'gradients, parameters, statistics and random state of plain Chainer. Planners '
        'that do not fit are refused before anything trains.'
    )


def upstream(*bodies: Body) -> str:
    """Returns Chainer's own tests, the three regimes summed."""
    head = ['tests', 'passed without the package', 'fail only with it']
    head += ['maps compared', 'functions run again']
    lines = []
    for name, body in zip(('CPU', 'CuPy 14', 'CuPy 13, cuDNN'), bodies, strict=True):
        regimes = {key: body['totals'][key] for key in body['totals'] if key != 'plain'}
        parts = [part['modes'][key] for part in body['parts'] for key in regimes]
        lines.append(
            [
                name,
                f'{body["totals"]["plain"]["passed"]:,}',
                sum(total['only_with_us'] for total in regimes.values()),
                f'{sum(part.get("verified", 0) for part in parts):,}',
                f'{sum(part.get("replays", 0) for part in parts):,}',
            ]
        )
    return table(head, lines)


def upstream_says(*bodies: Body) -> str:
    """Returns under which regimes the tests run."""
    return (
        'The tests of Chainer v7.8.1 run three times more: with every map swapped, '
        'with every map recomputed where that is exact, and with a random choice for '
        'each. On CuPy a sample runs, with an emulated GPU.'
    )


def programs(*bodies: Body) -> str:
    """Returns CPU times of Chainer's examples over plain Chainer."""
    rows = [row for body in bodies for row in body['rows']]
    limits = list(dict.fromkeys(row['limit'] for row in rows))
    lines = []
    for program in dict.fromkeys(row['program'] for row in rows):
        same = {row['limit']: row for row in rows if row['program'] == program}
        if any(row['error'] for row in same.values()):
            lines.append([program, 'refused'])
            continue
        times = (same[limit]['cpu_last'] for limit in limits)
        lines.append([program, *(ratio(value) for value in times)])
    return table(['program', *limits], lines)


def programs_says(*bodies: Body) -> str:
    """Returns what the limits are."""
    rows = [row for body in bodies for row in body['rows'] if not row['error']]
    equal = sum(row['equal'] for row in rows)
    middle = statistics.median(
        row['cpu_last'] for row in rows if row['limit'] == '75 %'
    )
    return (
        'CPU time over plain Chainer, last iterations of a short run, in twice the '
        'in-core peak and at 75 % and 60 % of the way from the least memory to it; the '
        f'median at 75 % is {ratio(middle)}. {equal} of {len(rows)} runs have the bits '
        'of plain Chainer; `static_graph` is refused.'
    )


def reports_says(body: Body) -> str:
    """Returns how the programs end."""
    rows = body['rows']
    equal = sum(row['same_bits'] for row in rows)
    failed = {row['program'] for row in rows if row['error']}
    named = ' and '.join(f'`{name}`' for name in sorted(failed)) or 'none'
    return (
        f'{equal} of {len(rows)} runs have the bits of plain Chainer as far as they '
        f'get; out of memory: {named}. CPU time over plain Chainer counts learning and '
        'planning, and the programs are short.'
    )


def reports(body: Body) -> str:
    """Returns the CPU times of all programs for each limit and planner."""
    times: dict[tuple[str, float], list[float]] = {}
    for row in body['rows']:
        if row['planner'] in {'none named', 'hybrid'} and not row['error']:
            times.setdefault((row['planner'], row['share']), []).append(
                row['cpu_ratio']
            )
    return table(
        ['planner', 'limit', 'programs', 'least', 'median', 'most'],
        [
            [
                f'`{planner}`' if planner == 'hybrid' else planner,
                f'{100 * share:g} %',
                len(found),
                *map(ratio, (min(found), statistics.median(found), max(found))),
            ]
            for (planner, share), found in times.items()
        ],
    )


def ranks_measured(body: Body) -> str:
    """Returns what processes gain that know of each other, in half the memory."""
    head = ['network', 'processes', 'plain', 'plans for a link alone']
    head += ['one plan that knows', 'gain']
    return table(
        head,
        [
            [
                row['network'].lower(),
                row['processes'],
                f'{seconds(row["plain_seconds"])} s',
                f'{seconds(row["alone_seconds"])} s',
                f'{seconds(row["together_seconds"])} s',
                ratio(row['gain']),
            ]
            for row in body['rows']
            if row['share'] == HALF
        ],
    )


def ranks_says(body: Body) -> str:
    """Returns the gain of a plan that knows the other ranks."""
    gains = _span(row['gain'] for row in body['rows'])
    equal = sum(row['equal'] for row in body['rows'])
    return (
        'Processes that share one throttled link, on two cores. One plan that knows '
        f'of all of them is {gains} as fast as plans made as if each had the link for '
        f'itself, and the bits are equal in {equal} of {len(body["rows"])} runs. The '
        'table has those in half the memory.'
    )


SUMMARIES = (
    Summary(
        ('arena', 'layouts'),
        'Is it better than what others have published?',
        contest.says,
        lambda arena, layouts: contest.by_network(arena),
        ('Every instance of the arena', 'Layouts of public instances'),
    ),
    Summary(
        ('host_methods',),
        'Does it train in half the memory, and how much slower?',
        half_memory_says,
        half_memory,
        (
            'Planners on a CPU, measured beside predicted',
            '`hybrid` against `pooch`, measured in turns',
        ),
    ),
    Summary(
        ('host_os_limit',),
        'Does the operating system agree?',
        judge_says,
        memory.os_limit,
        ('The operating system as the judge', 'A session when everything fits'),
    ),
    Summary(
        ('paper_ito',),
        'How fast would a GPU be?',
        modelled_says,
        training.paper_ito,
        (
            'Three networks on a modelled V100',
            'Gap to the bound against planning time',
        ),
    ),
    Summary(
        ('rivals_compare',),
        'How close to the best is each planner?',
        compared_says,
        compared,
        ('Every planner on every shipped profile', 'Planning time of `hybrid`'),
    ),
    Summary(
        ('rivals_published',),
        'What do papers report?',
        published_says,
        published,
        (
            'Published figures beside plans in the same setting',
            'Largest cut of memory without overhead',
            "Chainer's own `F.forget` beside plans",
        ),
    ),
    Summary(
        ('pools',),
        'How much memory is lost to fragmentation?',
        footprint_says,
        footprint,
        (
            'Footprint of pools and layouts',
            'The arena on a CPU',
            'Plan and layout together',
        ),
    ),
    Summary(
        ('host_exactness',),
        'Are the numbers the same?',
        exactness_says,
        checks.exactness,
        ('Every planner, every bit',),
    ),
    Summary(
        ('upstream_tests', 'upstream_gpu', 'upstream_gpu_cudnn'),
        "Do Chainer's own tests pass?",
        upstream_says,
        upstream,
        ("Chainer's own tests", "Chainer's own tests for GPUs"),
    ),
    Summary(
        ('programs_after', 'programs_vision'),
        "Chainer's example programs",
        programs_says,
        programs,
        (
            "Chainer's example programs",
            "Chainer's larger examples, and chainercv's",
            'Where the cost of an iteration goes',
            'The first iterations',
        ),
    ),
    Summary(
        ('public_reports',),
        'What others have stumbled over',
        reports_says,
        reports,
        ('Programs after public bug reports',),
    ),
    Summary(
        ('ranks_measured',),
        'Do several processes help each other?',
        ranks_says,
        ranks_measured,
        ('Processes on one link, measured', 'Several GPUs on one link'),
    ),
)
