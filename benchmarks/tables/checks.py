"""Checks of every bit: our networks, Chainer's own tests, Chainer's examples."""

from __future__ import annotations

from benchmarks.tables.form import Body, Section, megabytes, ratio, table, yes

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
    head = ['run', 'how', 'passed', 'failed', 'skipped', 'fails only with the package']
    head += ['maps compared', 'functions run again']
    lines = []
    for name, content in (('all', body), ('one in ten', tenth)):
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


def programs(body: Body, before: Body) -> str:
    """Returns Chainer's example programs in their limits."""
    old = {(row['program'], row['limit']): row for row in before['rows']}
    head = ['program', 'limit', 'as', 'same bits', 'guided', 'CPU time: all']
    head += ['last 8', 'all, before', 'last 8, before']
    lines = []
    for row in body['rows']:
        former = old.get((row['program'], row['limit']), {})
        lines.append(
            [
                row['program'],
                megabytes(row['limit_bytes'], 1),
                row['limit'],
                yes(row['equal']),
                f'{100 * row["guided"]:.0f} %',
                ratio(row['cpu_all']),
                ratio(row['cpu_last']),
                ratio(former.get('cpu_all')),
                ratio(former.get('cpu_last')),
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
        ('programs_after', 'programs_before'),
        "Chainer's example programs",
        """24 iterations of each program on synthetic data, in twice the in-core peak,
        and at 75 % and 60 % of the way from its least memory to that peak. Times are
        ratios to plain Chainer. *Guided* counts followed plans for each step; dcgan
        has two backward passes. *Before* is the commit of the second file.""",
        programs,
    ),
    Section(
        ('programs_small_functions', 'programs_after'),
        'Programs of small functions',
        """The same since guided iterations look only at functions whose maps the plan
        moves, and small copies are made at once. One round on a noisy machine: where
        nothing has to leave (200 %), nothing has changed, and still ptb and all_new
        took 1.3 to 1.6 times as long as plain Chainer in this run.""",
        programs,
    ),
)
