"""The page of packages that other people have made, trained inside of limits."""

from __future__ import annotations

import re

from benchmarks.tables.form import Body, Section, anchor, megabytes, ratio, table, yes

TITLE = 'Packages inside of a limit'
FULL = f'../../benchmarks/results/tables_checks.md#{anchor(TITLE)}'
SHARES = (75, 55)
COMMIT_LETTERS = 10
HEAD = (
    '# Packages that run',
    'Which packages made for Chainer run on a Python and NumPy of today, and what does '
    'a limit cost them?',
    '<!-- python -m benchmarks render writes this page; edit what it is made of -->',
    'Each is installed unmodified into a fresh environment, and trains networks of its '
    'own on drawn data by `hybridmem run` (Chainer: its examples as they are): without '
    'a limit, and at 75 % and 55 % of what can leave above what is permanent.',
)
TEXT = """Each package of [the guide](guide/packages.md) trains networks of its own on
    drawn data, without a limit, and at 75 % and 55 % of what can leave above what is
    permanent. CPU is that of the last quarter of the updates, and in brackets of all,
    over plain Chainer; learning and planning count. Bits are equal if all parameters
    are, and every printed word but those that differ from run to run."""


def page(body: Body) -> list[str]:
    """Returns the paragraphs of the page.

    Args:
        body: Content of ``packages.json``.
    """
    rows = body['rows']
    head = ['package', 'version', 'trains', *(f'CPU at {s} %' for s in SHARES)]
    lines = []
    for name in dict.fromkeys(row['package'] for row in rows):
        own = [row for row in rows if row['package'] == name]
        trained = [row for row in own if not row.get('error')]
        told = own[0].get('note') or (own[0].get('error', '') if not trained else '')
        jobs = f'{len(trained)} of {len(own)} jobs'
        costs = [_range(trained, share) for share in SHARES]
        version = own[0]['version'][:COMMIT_LETTERS]
        lines.append([name, version, jobs, *costs, told])
    equal = [row[f'equal_{s}'] for row in rows for s in SHARES if f'equal_{s}' in row]
    compared = [same for same in equal if same is not None]
    figures = (
        'CPU is that of the last quarter of the updates over plain Chainer. Functions '
        'of most of these networks take less than a millisecond, so that what a '
        'session adds to each weighs most. A job is refused where what it needs at '
        'once does not fit. '
        f'{sum(compared)} of {len(compared)} limited runs have the bits of '
        'plain Chainer; programs that draw anew are not counted. [Each job, and why it '
        f'is refused]({FULL}).'
    )
    return [*HEAD, table([*head, 'to know'], lines), figures]


def jobs(body: Body) -> str:
    """Returns the table of all jobs, and what has not come to its end."""
    rows = body['rows']
    head = ['job', 'plain peak']
    for share in SHARES:
        head += [f'CPU at {share} %', 'with a plan', 'same bits']
    lines = [
        [_name(row), megabytes(row['peak_bytes']), *_at(row, 75), *_at(row, 55)]
        for row in rows
        if 'peak_bytes' in row
    ]
    failed = [
        f'- {_name(row)}{where}: {_told(row[key])}'
        for row in rows
        for key, where in (
            ('error', ''), ('error_75', ' at 75 %'), ('error_55', ' at 55 %')
        )
        if row.get(key)
    ]  # fmt: skip
    told = ['What has not come to its end:', '\n'.join(failed)] if failed else []
    return '\n\n'.join([table(head, lines), *told])


SECTIONS = (Section(('packages',), TITLE, TEXT, jobs),)


def _range(rows: list[Body], share: int) -> str:
    """CPU of the jobs that have ended, from the least to the most."""
    found = sorted(row[key] for row in rows if (key := f'cpu_last_{share}') in row)
    ends = dict.fromkeys(map(ratio, (*found[:1], *found[-1:])))
    refused = len(rows) - len(found)
    told = [' to '.join(map(str, ends))] if ends else []
    return ', '.join([*told, f'{refused} refused'] if refused else told)


def _name(row: dict[str, object]) -> str:
    script, *arguments = str(row.get('job', '')).split(' ')
    told = [script] if '/' in script else arguments[:-1]  # a program as it is, or ours
    return ' '.join([str(row['package']), *told])


def _told(error: str) -> str:
    """What has been asked for, of an error that also says what is in use."""
    found = re.search(r'OutOfMemoryError: (.*?) \(\d+ bytes\) (.*?) do not fit', error)
    return error if found is None else f'{found[1]} {found[2]} do not fit'


def _at(row: dict[str, object], share: int) -> list[object]:
    if f'cpu_last_{share}' not in row:
        return ['refused', None, None]
    last, whole = row[f'cpu_last_{share}'], row[f'cpu_all_{share}']
    guided = f'{row[f"guided_{share}"]:.0%}'
    return [f'{ratio(last)} ({ratio(whole)})', guided, _same(row[f'equal_{share}'])]


def _same(equal: bool | None) -> str:
    return 'draws anew' if equal is None else yes(equal)
