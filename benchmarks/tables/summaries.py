"""The tables of ``docs/results.md``: what a user wants to know, and what it says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.tables import contest, gpu, planning, training
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
PLANNED = 'hybrid, relaxed'
SHOWN_RANKS = 4
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


def half_memory(body: Body, *_: Body) -> str:
    """Returns seconds of an iteration of plain Chainer and of some planners."""
    head = ['network', 'plain Chainer', 'needs', 'limit']
    head += [*(f'`{name}`' for name in MEASURED), 'its peak']
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


def half_memory_says(body: Body, judged: Body, turns: Body) -> str:
    """Returns how much slower training is, how far off the simulator, who judges."""
    networks = _by_network(body)
    ratios = [row['measured_ratio'] for row in turns['rows']]

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
        f'Chainer; the link is as slow beside compute as PCIe 3 beside a V100; '
        f'measured in turns, `pooch` takes {ratio(min(ratios))} to '
        f'{ratio(max(ratios))} of that. The simulator is off by '
        f'{percent(statistics.median(errors))} in the median, '
        f'{percent(max(errors))} at worst. In a memory control group of Linux, with '
        f'{megabytes(judged["margin_bytes"])} beyond the limit, plain Chainer '
        f'{_ending(judged, "plain")} and the session {_ending(judged, "session")}.'
    )


def _ending(judged: Body, name: str) -> str:
    return 'finishes' if judged['children'][name]['exit'] == 0 else 'is killed'


# -- predicted -----------------------------------------------------------------
def modelled_says(body: Body) -> str:
    """Returns how close the plans are to the bound."""
    above = max(
        row['iteration_seconds'] / row['lower_bound_seconds'] - 1
        for row in _largest(body)
    )
    return (
        'Predicted time over in-core time with 16 GB, at the largest batch of the '
        f'sweep. `hybrid` is at most {percent(above)} above the bound, below which no '
        'plan can be.'
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
        'iterations. *Fastest* counts the limits at which none is '
        'faster, *time / bound* is the mean over the limits that a planner fits.'
    )


def published(body: Body) -> str:
    """Returns figures of papers beside `hybrid`: the hardest setting of each."""
    hardest: dict[str, Body] = {}
    for row in sorted(body['settings'], key=lambda row: float(row['overhead'])):
        hardest[row['name'].split()[0].strip(',')] = row
    rows = [row for row in body['settings'] if row in hardest.values()]
    head = ['setting', 'published', '`hybrid`', 'bound']
    return table(
        head,
        [
            [
                f'{row["name"]} ({row["arch"]} b{row["batchsize"]})',
                overhead(row['published_overhead'], 0),
                overhead(row['overhead']),
                overhead(row['bound_overhead']) or 'no plan',
            ]
            for row in rows
        ],
    )


def published_says(body: Body) -> str:
    """Returns how many figures are reached."""
    rows = body['settings']
    below = sum(row['overhead'] <= row['published_overhead'] for row in rows)
    return (
        f'At {below} of {len(rows)} settings the predicted overhead is at most the '
        'published one; the table has the hardest of each paper. Theirs are measured, '
        'these are predicted for a model of the GPU, and no setting is quite the '
        "paper's: the full table says what differs."
    )


# -- memory --------------------------------------------------------------------
def _planned(body: Body, planner: str) -> list[Body]:
    return [row for row in body['planned'] if row['planner'] == planner]


def footprint(body: Body) -> str:
    """Returns footprints over the load for some pools."""
    head = ['network', f'in-core: {POOLS["cupy"]}']
    head += [f'planned: {pool}' for pool in POOLS.values()]
    pairs = zip(_planned(body, 'in-core'), _planned(body, PLANNED), strict=True)
    return table(
        head,
        [
            [
                planned['network'],
                f'{in_core["cupy"]:.3f}',
                *(f'{planned[pool]:.3f}' for pool in POOLS),
            ]
            for in_core, planned in pairs
        ],
    )


def footprint_says(body: Body) -> str:
    """Returns what pools need at worst."""
    rows = [*_planned(body, 'in-core'), *_planned(body, PLANNED)]
    worst = {pool: ratio(max(row[pool] for row in rows)) for pool in POOLS}
    return (
        f"Memory taken over memory in use: CuPy's pool takes up to {worst['cupy']}, "
        f'the layouts of this package, which a session follows, {worst["exact"]}.'
    )


# -- bits and programs ---------------------------------------------------------
_RUNS = ('CPU', 'CuPy 14, cuDNN 9', 'CuPy 13, cuDNN 8.9')


def upstream(_: Body, *bodies: Body) -> str:
    """Returns Chainer's own tests, the three regimes summed."""
    head = ['tests', 'passed without the package', 'fail only with it']
    head += ['maps compared', 'functions run again']
    lines = []
    for name, body in zip(_RUNS, bodies, strict=True):
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


def upstream_says(exact: Body, *_: Body) -> str:
    """Returns how many planners are exact, and under which regimes the tests run."""
    rows = [row for row in exact['rows'] if row['fits']]
    return (
        f'{sum(row["exact"] for row in rows)} of {len(rows)} trainings, three networks '
        'with every planner that fits, have the loss, gradients, parameters, '
        'statistics and random state of plain Chainer. The tests of Chainer v7.8.1 run '
        'with every map swapped, with every map recomputed where that is exact, and '
        'with a random choice for each; on CuPy, a sample with an emulated GPU.'
    )


def programs(*bodies: Body) -> str:
    """Returns CPU times of Chainer's examples over plain Chainer, for each limit."""
    examples = bodies[:-1]
    rows = [row for body in examples for row in body['rows'] if not row['error']]
    lines = []
    for limit in dict.fromkeys(row['limit'] for row in rows):
        same = [row for row in rows if row['limit'] == limit]
        slowest = max(same, key=lambda row: float(row['cpu_last']))
        times = [row['cpu_last'] for row in same]
        found = (min(times), statistics.median(times), max(times))
        lines.append([limit, len(same), *map(ratio, found), f'`{slowest["program"]}`'])
    head = ['limit', 'programs', 'least', 'median', 'most', 'the slowest']
    return table(head, lines)


def programs_says(*bodies: Body) -> str:
    """Returns what the limits are, what is refused, and how the others end."""
    *examples, reports = bodies
    rows = [row for body in examples for row in body['rows']]
    runs = [row for row in rows if not row['error']]
    refused = {row['program'] for row in rows if row['error']}
    failed = {row['program'] for row in reports['rows'] if row['error']}
    times = [row['cpu_ratio'] for row in reports['rows'] if not row['error']]
    return (
        f'{sum(row["equal"] for row in runs)} of {len(runs)} runs have the bits of '
        f'plain Chainer; refused: {_named(refused)}. CPU time over plain Chainer late '
        'in a short run, in twice the in-core peak and at 75 % and 60 % of the way '
        'from the least memory to it. Short programs after public bug reports, with '
        'learning and planning, take '
        f'{ratio(statistics.median(times))} in the median and {ratio(max(times))} at '
        f'worst, with the same bits in {sum(r["same_bits"] for r in reports["rows"])} '
        f'of {len(reports["rows"])} runs; out of memory: {_named(failed)}.'
    )


def _named(programs: Iterable[str]) -> str:
    return ' and '.join(f'`{name}`' for name in sorted(programs)) or 'none'


def ranks_measured(body: Body) -> str:
    """Returns what processes gain that know of each other, in half the memory."""
    head = ['network', 'plain', 'link alone', 'knows of all', 'gain']
    return table(
        head,
        [
            [
                row['network'].lower(),
                f'{seconds(row["plain_seconds"])} s',
                f'{seconds(row["alone_seconds"])} s',
                f'{seconds(row["together_seconds"])} s',
                ratio(row['gain']),
            ]
            for row in body['rows']
            if row['share'] == HALF and row['processes'] == SHOWN_RANKS
        ],
    )


def ranks_says(body: Body) -> str:
    """Returns the gain of a plan that knows the other ranks."""
    gains = _span(row['gain'] for row in body['rows'])
    equal = sum(row['equal'] for row in body['rows'])
    return (
        'On one throttled link, a plan that knows of all processes is '
        f'{gains} as fast as plans for a link alone, and the bits are equal in {equal} '
        f'of {len(body["rows"])} runs. The table has those of four in half the memory.'
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
        ('host_methods', 'host_os_limit', 'host_pairs'),
        'Does it train in half the memory, and how much slower?',
        half_memory_says,
        half_memory,
        (
            'Planners on a CPU, measured beside predicted',
            '`hybrid` against `pooch`, measured in turns',
            'The operating system as the judge',
            'What an iteration of a session costs',
        ),
    ),
    Summary(
        ('gpu_methods', 'gpu_smoke', 'gpu_torch', 'gpu_tests'),
        'And on a real GPU?',
        gpu.methods_says,
        lambda methods, *others: gpu.methods(methods),
        (
            'Planners on a GPU, measured beside predicted',
            'PyTorch in the same memory on the same GPU',
            'Tests on a real GPU',
        ),
    ),
    Summary(
        ('paper_ito',),
        'How fast would other GPUs be?',
        modelled_says,
        training.paper_ito,
        ('Three networks on a modelled V100',),
    ),
    Summary(
        ('rivals_compare',),
        'How close to the best is each planner?',
        compared_says,
        compared,
        ('Every planner on every shipped profile',),
    ),
    Summary(
        ('rivals_published',),
        'What do papers report?',
        published_says,
        published,
        (
            'Published figures beside plans in the same setting',
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
        ),
    ),
    Summary(
        ('host_exactness', 'upstream_tests', 'upstream_gpu', 'upstream_gpu_cudnn'),
        "Are the numbers the same, and do Chainer's own tests pass?",
        upstream_says,
        upstream,
        (
            'Every planner, every bit',
            "Chainer's own tests",
            "Chainer's own tests for GPUs",
        ),
    ),
    Summary(
        ('programs_after', 'programs_vision', 'public_reports'),
        "Chainer's example programs",
        programs_says,
        programs,
        (
            "Chainer's example programs",
            "Chainer's larger examples, and chainercv's",
            'Programs after public bug reports',
            'Where the cost of an iteration goes',
            'The first iterations',
        ),
    ),
    Summary(
        ('ranks_measured',),
        'Do several processes help each other?',
        ranks_says,
        ranks_measured,
        ('Processes on one link, measured', 'Several GPUs on one link'),
    ),
)
