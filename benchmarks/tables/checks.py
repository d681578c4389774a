"""Checks of every bit: our networks, Chainer's own tests, Chainer's examples."""

from __future__ import annotations

import collections

from benchmarks.tables.form import Body, Section, megabytes, ratio, table, yes

LONG_KERNEL = 12
MODES = {
    'plain': 'without the package',
    'swap': 'every map swapped',
    'recompute': 'every map recomputed where exact',
    'random': 'a random choice for each map',
}


def exactness(body: Body) -> str:
    """Returns how many planners train each network with the bits of plain Chainer."""
    head = ['network', 'limit', 'planners', 'that fit', 'same bits', 'in the limit']
    lines = []
    for arch in dict.fromkeys(row['arch'] for row in body['rows']):
        rows = [row for row in body['rows'] if row['arch'] == arch]
        fitting = [row for row in rows if row['fits']]
        lines.append(
            [
                f'{arch} b{rows[0]["batchsize"]}',
                megabytes(rows[0]['limit_bytes']),
                len(rows),
                len(fitting),
                sum(row['exact'] for row in fitting),
                sum(row['peak_bytes'] <= row['limit_bytes'] for row in fitting),
            ]
        )
    return table(head, lines)


def upstream(body: Body, tenth: Body) -> str:
    """Returns Chainer's own tests under three regimes."""
    return _upstream({'all': body, 'one in ten': tenth})


def upstream_gpu(body: Body, cudnn: Body) -> str:
    """Returns those that need a GPU."""
    return _upstream({'CuPy 14, cuDNN 9': body, 'CuPy 13, cuDNN 8.9': cudnn})


def kernel_rounding(body: Body) -> str:
    """Returns the arithmetic of kernels: in order, or how often if that is long."""
    kernels: dict[str, list[str]] = body['kernels']['compute_70']
    lines = []
    for label, instructions in kernels.items():
        names = [name.replace('.f32', '') for name in instructions]
        if len(names) > LONG_KERNEL:
            counts = collections.Counter(names).most_common()
            names = [f'{number} {name}' for name, number in counts]
        else:
            names = [name.split('.')[0] for name in names]
        lines.append([label, ', '.join(names)])
    return table(['kernel', 'arithmetic, in order'], lines)


def _upstream(runs: dict[str, Body]) -> str:
    head = ['run', 'how', 'passed', 'failed', 'skipped', 'fails only with the package']
    head += ['maps compared', 'functions run again']
    lines = []
    for name, content in runs.items():
        for mode, total in content['totals'].items():
            parts = [part['modes'][mode] for part in content['parts']]
            lines.append(
                [
                    name,
                    MODES[mode],
                    f'{total["passed"]:,}',
                    total['failed'],
                    f'{total["skipped"]:,}',
                    total.get('only_with_us'),
                    f'{sum(part.get("verified", 0) for part in parts):,}',
                    f'{sum(part.get("replays", 0) for part in parts):,}',
                ]
            )
    return table(head, lines)


def programs(body: Body, before: Body | None = None) -> str:
    """Returns Chainer's example programs in their limits."""
    rows = [] if before is None else before['rows']
    old = {(row['program'], row['limit']): row for row in rows}
    head = ['program', 'limit', 'as', 'same bits', 'guided', 'CPU time: first']
    head += ['last', 'all', *(['last, before', 'all, before'] if old else [])]
    lines = []
    for row in body['rows']:
        if row['error']:
            lines.append([row['program'], None, row['limit'], row['error']])
            continue
        former = old.get((row['program'], row['limit']), {})
        lines.append(
            [
                row['program'],
                megabytes(row['limit_bytes'], 1),
                row['limit'],
                yes(row['equal']),
                f'{100 * row["guided"]:.0f} %',
                *(ratio(row[f'cpu_{part}']) for part in ('first', 'last', 'all')),
                *(ratio(former.get(f'cpu_{part}')) for part in ('last', 'all') if old),
            ]
        )
    return table(head, lines)


def costs(body: Body) -> str:
    """Returns the parts of an iteration's cost, over plain Chainer."""
    parts = ('hooks', 'decisions', 'copies', 'replays', 'rest')
    head = ['program', 'limit', 'plain', 'session', 'timed', *parts]
    lines = [
        [
            row['program'],
            row['limit'],
            f'{1e3 * row["plain_seconds"]:.1f} ms',
            ratio(row['whole']),
            ratio(row['whole_timed']),
            *(f'{row[part]:+.2f}' for part in parts),
        ]
        for row in body['rows']
    ]
    return table(head, lines)


def first(body: Body) -> str:
    """Returns what iterations cost before a plan is followed."""
    head = ['program', 'limit', 'plain', 'later iterations']
    head += ['extra at first', 'extra with a plan in `cache_dir`']
    lines = [
        [
            row['program'],
            megabytes(row['limit_bytes'], 1),
            f'{row["plain_seconds"]:.2f} s',
            ratio(row['steady']),
            f'{row["extra_iterations"]:.1f} iterations',
            f'{row["extra_iterations_cached"]:.1f} iterations',
        ]
        for row in body['rows']
    ]
    return table(head, lines)


def public_reports(body: Body) -> str:
    """Returns programs after public bug reports, one row for each and its limit."""
    rows = body['rows']
    planners = list(dict.fromkeys(row['planner'] for row in rows))
    head = ['program', 'limit', 'same bits', 'guided']
    head += ['no planner named' if ' ' in name else f'`{name}`' for name in planners]
    lines = []
    for program, share in dict.fromkeys((row['program'], row['share']) for row in rows):
        same = [
            row for row in rows if (row['program'], row['share']) == (program, share)
        ]
        told = {row['planner']: ratio(row['cpu_ratio']) or row['error'] for row in same}
        guided = sorted({row['guided_iterations'] for row in same})
        span = ' to '.join(dict.fromkeys(map(str, (guided[0], guided[-1]))))
        lines.append(
            [
                program,
                f'{100 * share:g} %',
                yes(all(row['same_bits'] for row in same)),
                f'{span} of {same[0]["iterations"]}',
                *(told.get(planner) for planner in planners),
            ]
        )
    return table(head, lines)


SECTIONS = (
    Section(
        ('host_exactness',),
        'Every planner, every bit',
        """At the limits of the first table, 5 iterations with each planner: loss,
        gradients, parameters, statistics of batch normalisation and the random state
        are compared with plain Chainer in a second process. Planners that do not fit
        are refused.""",
        exactness,
    ),
    Section(
        ('upstream_tests', 'upstream_tenth'),
        "Chainer's own tests",
        """The tests of functions, links and optimizers of Chainer v7.8.1 that run on
        a CPU, without the package and with three regimes. Tests that fail in every
        run fail because of newer NumPy and SciPy versions. The second run takes one
        test in ten at a later commit.""",
        upstream,
    ),
    Section(
        ('upstream_gpu', 'upstream_gpu_cudnn'),
        "Chainer's own tests for GPUs",
        """Those that Chainer's authors have marked `gpu` or `cudnn`, on the
        [emulator](internals/cuda_emulator.md): of each part one test in so many, and
        of each method of each class at least one. What fails in every run fails because
        of newer versions, or needs parts of CUDA that the emulator lacks: linear
        algebra, Fourier transforms, inverse error functions.""",
        upstream_gpu,
    ),
    Section(
        ('kernel_rounding',),
        'How fused replays round on a GPU',
        """What NVIDIA's compiler (NVRTC 12.9, `compute_70`; `compute_90` is the same)
        makes of Chainer's and CuPy's kernels, and of the one kernel that replays
        several functions. The same arithmetic in the same order gives the same bits.
        Loops are unrolled, a power is a sequence: of kernels with many instructions
        the table counts each; `mul.rn` is the square that no sum contracts with.
        No GPU has run them yet.""",
        kernel_rounding,
    ),
    Section(
        ('programs_after', 'programs_before'),
        "Chainer's example programs",
        """32 iterations of each program on synthetic data, in twice the in-core peak,
        and at 75 % and 60 % of the way from its least memory to that peak: three
        sessions in turns with plain Chainer. Times are ratios to plain Chainer, medians
        of the first and of the last eight iterations, and the sum of all. *Guided*
        counts followed plans for each step; dcgan has two backward passes. *Before* is
        the commit of the second file (24 iterations, one session).""",
        programs,
    ),
    Section(
        ('programs_vision',),
        "Chainer's larger examples, and chainercv's",
        """The same for one session each; where an iteration takes seconds, 12 of them,
        and medians of the first and of the last six.""",
        programs,
    ),
    Section(
        ('public_reports',),
        'Programs after public bug reports',
        """Small programs that do what public reports about other packages tell of:
        penalties of gradients, weights that are normalised, several updates, new sizes
        and lengths, graphs that live over several iterations. CPU time over plain
        Chainer's, in turns, of all iterations: learning and planning count, and the
        programs are short. *Guided*: iterations that have followed a plan, over the
        planners.""",
        public_reports,
    ),
    Section(
        ('programs_costs',),
        'Where the cost of an iteration goes',
        """Shares of what the iteration takes plain Chainer, medians of the last eight:
        in all, and again with every part timed, which itself takes half a microsecond
        a call. *Hooks* note functions and follow the plan. *Decisions* choose what
        leaves and returns without one, *copies* include waiting for them. The *rest* is
        counting allocations, and other memory in the caches.""",
        costs,
    ),
    Section(
        ('programs_first',),
        'The first iterations',
        """Warm-up, profiling and planning: what twelve iterations take beyond their
        steady pace, in iterations of plain Chainer.""",
        first,
    ),
)
