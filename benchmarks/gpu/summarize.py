"""Sums up in ``benchmarks/results/gpu.md`` what a run has saved so far.

    python -m benchmarks run gpu.summarize [STEPS]

``STEPS`` is the file that ``run.sh`` writes: name, outcome, code and seconds a line.
Beside it ``gpu_tests.txt`` is what ``pytest -v`` has printed, if the run had tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import saving

# How pytest -v tells of a test: it begins and ends in one line, in several processes
# (pytest-xdist) in two, of which the second begins with the outcome.
_WORDS = ('PASSED', 'FAILED', 'ERROR', 'SKIPPED', 'XFAIL')
_OUTCOMES = f'({"|".join(_WORDS)})'
_BEGUN = re.compile(rf'^(tests/\S+::.*?)(?: {_OUTCOMES}\b.*)?\s*$')
_ENDED = re.compile(rf'^\[gw\d+\] \[ *\d+%\] {_OUTCOMES} (tests/.*?)\s*$')
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RESULTS = os.path.join(ROOT, 'benchmarks', 'results')
Row = dict[str, Any]


def load(name: str) -> Row | None:
    """A result file; None if it is not there or damaged."""
    try:
        with open(os.path.join(RESULTS, f'{name}.json'), encoding='utf-8') as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def table(rows: Iterable[Row], columns: dict[str, Callable[[Row], Any]]) -> str:
    """A Markdown table; what a row lacks is left empty."""
    lines = ['| ' + ' | '.join(columns) + ' |', '|---' * len(columns) + '|']
    for row in rows:
        cells = []
        for show in columns.values():
            try:
                cells.append(str(show(row)))
            except (KeyError, TypeError, ZeroDivisionError):
                cells.append('')
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def gib(key: str) -> Callable[[Row], str]:
    """Shows bytes."""
    return lambda row: f'{row[key] / 2**30:.2f} GiB'


def mib(key: str) -> Callable[[Row], str]:
    """Shows bytes of less than a gibibyte."""
    return lambda row: f'{row[key] / 2**20:.0f} MiB'


def number(key: str) -> Callable[[Row], str]:
    """Shows seconds and the like."""
    return lambda row: f'{row[key]:.3f}'


def percent(key: str) -> Callable[[Row], str]:
    """Shows a share."""
    return lambda row: f'{row[key]:+.1%}'


def _bits(row: Row) -> str:
    if row['same_bits']:
        return 'the same'
    difference = row['largest_difference']
    return f'differ by {difference:.1e}' if difference is not None else 'differ'


def cudnn(body: Row) -> str:
    """What cuDNN computes beside the same functions without it, and how fast."""
    rows = body['rows']
    arithmetics = {
        'convolution': lambda r: r['way'],
        'float32': lambda r: f'{r["float32_difference"]:.1e}',
        'TF32': lambda r: f'{r["tf32_difference"]:.1e}',
        'agrees': lambda r: r['agrees'],
        'repeats its bits': lambda r: r['repeats'],
        'why not': lambda r: r['why'],
    }
    speeds = {
        'case': lambda r: r['case'].removeprefix('speed/').replace('/', ', '),
        'pictures': lambda r: r['batchsize'],
        's / iteration': number('iteration_seconds'),
        'pictures / s': lambda r: f'{r["pictures_per_second"]:.0f}',
        'first iteration': lambda r: f'{r["all_seconds"][0]:.1f} s',
        'footprint': gib('footprint_bytes'),
        'largest workspace': lambda r: (
            f'{r["largest_workspace_bytes"] / 2**20:.0f} MiB'
        ),
        'refused': lambda r: r['refused'],
        'first loss': lambda r: f'{r["losses"][0]:.4f}',
        'why not': lambda r: r['why'],
    }

    def of(*kinds: str) -> list[Row]:
        return [row for row in rows if row['case'].split('/')[0] in kinds]

    parts = [f'{body.get("says", "Not judged yet")}; cuDNN {body["cudnn"]}.']
    parts += [table(of('speed'), speeds), table(of('arithmetic'), arithmetics)]
    parts.append(_families(of(*_TYPES)))
    return '\n\n'.join(parts)


_TYPES = ('float32', 'float16', 'float64')


def _families(rows: list[Row]) -> str:
    """A row for each family, with its largest difference in each type."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        dtype, _, family = row['case'].partition('/')
        found.setdefault(family, {})[dtype] = row

    def show(dtype: str) -> Callable[[Row], str]:
        def cell(family: Row) -> str:
            row = family[dtype]
            if 'largest_difference' not in row:
                return 'failed'
            words = f'{row["largest_difference"]:.1e}'
            return words if row['agrees'] else f'{words}: does not agree'

        return cell

    def repeats(family: Row) -> bool:
        return all(family[dtype]['repeats'] for dtype in _TYPES if dtype in family)

    def why(family: Row) -> str:
        told = (family[dtype].get('why') for dtype in _TYPES if dtype in family)
        return '; '.join(filter(None, told)).replace('|', '/')

    columns = {
        'family': lambda family: family['name'],
        **{dtype: show(dtype) for dtype in _TYPES},
        'repeats its bits': repeats,
        'why not': why,
    }
    return table(({'name': name, **found[name]} for name in sorted(found)), columns)


def smoke(body: Row) -> str:
    """The first step."""
    columns = {
        'way': lambda r: r['way'],
        'bits': lambda r: r.get('why') or _bits(r),
        's / iteration': number('iteration_seconds'),
        'forecast': number('predicted_seconds'),
        'limit': gib('limit_bytes'),
        'footprint': gib('footprint_bytes'),
        'keep / swap / recompute': _actions,
        'evictions': lambda r: r['evictions'],
        'state': lambda r: r['state'],
    }
    return f'{body["network"]}\n\n{table(body["rows"], columns)}'


def _actions(row: Row) -> str:
    return f'{row["keep"]} / {row["swap"]} / {row["recompute"]}'


def exactness(body: Row) -> str:
    """Small networks."""
    columns = {
        'network': lambda r: r['network'],
        'way': lambda r: r['way'],
        'verdict': lambda r: r['verdict'],
        'largest difference': lambda r: f'{r["largest_difference"]:.1e}',
        'inside the limit': lambda r: r['inside'],
        'adds atomically': lambda r: ', '.join(r['atomic']),
    }
    return table(body['rows'], columns)


def methods(body: Row) -> str:
    """Speeds under the limit."""
    base = {
        _case(row): row.get('iteration_seconds')
        for row in body['rows']
        if row['planner'] == 'in-core'
    }
    rows = [{**row, 'base': base.get(_case(row))} for row in body['rows']]
    error = lambda r: r['predicted_seconds'] / r['iteration_seconds'] - 1  # noqa: E731
    columns = {
        'network': lambda r: f'{r["arch"]} b{r["batchsize"]}',
        'arithmetic': lambda r: r.get('arithmetic', 'float32'),
        'planner': lambda r: r['planner'],
        's / iteration': number('iteration_seconds'),
        'forecast': number('predicted_seconds'),
        'forecast error': lambda r: f'{error(r):+.1%}',
        'simulator error': percent('simulator_error'),
        'bound': number('lower_bound_seconds'),
        'over in-core': lambda r: f'{r["iteration_seconds"] / r["base"] - 1:+.1%}',
        'pictures / s': lambda r: f'{r["batchsize"] / r["iteration_seconds"]:.1f}',
        'peak': gib('peak_bytes'),
        'predicted': gib('predicted_peak_bytes'),
        'footprint': gib('footprint_bytes'),
        'keep / swap / recompute': _actions,
        'evictions': lambda r: r['evictions'],
        'unplaced': lambda r: r['unplaced'],
        'first losses the same': lambda r: r['same_losses'],
        'commit': lambda r: r['commit'],
        'why not': lambda r: r['why'],
    }
    return table(rows, columns)


def _case(row: Row) -> tuple[Any, ...]:
    return row['arch'], row['batchsize'], row.get('arithmetic', 'float32')


def small(body: Row) -> str:
    """A program of small functions."""
    columns = {
        'way': lambda r: r['way'],
        's / iteration': number('iteration_seconds'),
        'over plain': percent('over_plain'),
        'issuing': number('issuing_seconds'),
        'forecast': number('predicted_seconds'),
        'limit': lambda r: gib('limit_bytes')(r) if r['limit_bytes'] < 1 << 40 else '',
        'footprint': gib('footprint_bytes'),
        'keep / swap / recompute': _actions,
        'evictions': lambda r: r['evictions'],
    }
    return table(body['rows'], columns)


def arena(body: Row) -> str:
    """What the driver sees."""
    columns = {
        'network': lambda r: r['network'],
        'arena': lambda r: r['arena'],
        'limit': lambda r: gib('limit_bytes')(r) if r['limit_bytes'] < 1 << 40 else '',
        'taken from the driver': gib('driver_bytes'),
        'footprint': gib('footprint_bytes'),
        's / iteration': number('iteration_seconds'),
        'forecast': number('predicted_seconds'),
        'same losses': lambda r: r['same_losses'],
        'evictions': lambda r: r['evictions'],
        'placed': lambda r: r['placed'],
        'unplaced': lambda r: r['unplaced'],
    }
    text = table(body['rows'], columns)
    if 'allocation' in body:
        text += f'\n\nAllocation: `{json.dumps(body["allocation"])}`'
    return text


def rivals(body: Row) -> str:
    """PyTorch's own ways."""
    if 'skipped' in body:
        return f'Left out: {body["skipped"]}'
    columns = {
        'way': lambda r: r.get('name', r['way']),
        'arithmetic': lambda r: r.get('arithmetic', 'float32'),
        's / iteration': number('iteration_seconds'),
        'pictures / s': lambda r: f'{r["pictures_per_second"]:.1f}',
        'allocated': gib('allocated_bytes'),
        'reserved': gib('reserved_bytes'),
        'why not': lambda r: r['why'],
    }
    pairs = {
        'arithmetic': lambda r: r.get('arithmetic', 'float32'),
        'ours': lambda r: r['ours'],
        'theirs': lambda r: r['theirs'],
        'speed, ours : theirs': lambda r: f'{r["speed_ratio"]:.2f}',
        'ours over our in-core': percent('our_overhead'),
        'theirs over their in-core': percent('their_overhead'),
    }
    return '\n\n'.join((table(body['rows'], columns), table(body['ratios'], pairs)))


def steps(path: str) -> str:
    """The table of the steps."""
    lines = ['| step | outcome | code | seconds |', '|---|---|---|---|']
    with open(path, encoding='utf-8') as file:
        lines += [
            '| ' + ' | '.join(line.rstrip('\n').split('\t')) + ' |' for line in file
        ]
    return '\n'.join(lines)


def tests(body: Row) -> str:
    """How many tests have passed and not, and which have not."""
    counts = ', '.join(f'{body[word.lower()]} {word.lower()}' for word in _WORDS)
    lines = [f'- `{test}` {end}' for test, end in body['bad'].items()]
    return '\n\n'.join([counts, '\n'.join(lines)]) if lines else counts


def read_tests(lines: Iterable[str]) -> Row | None:
    """What ``pytest -v`` has printed; None if it is about no test."""
    ends: dict[str, str | None] = {}
    for line in lines:
        if found := _ENDED.match(line):
            ends[found[2]] = found[1]
        elif found := _BEGUN.match(line):
            ends[found[1]] = found[2]
    if not ends:
        return None
    counts = {word.lower(): list(ends.values()).count(word) for word in _WORDS}
    bad = {test: 'did not end' for test, end in ends.items() if end is None}
    bad |= {t: end.lower() for t, end in ends.items() if end in ('FAILED', 'ERROR')}
    return {**counts, 'bad': bad}


def save_tests(path: str) -> None:
    """Saves what the tests of this run have come to, if there were any."""
    with contextlib.suppress(OSError), open(path, encoding='utf-8') as file:
        found = read_tests(file)
        if found is not None:
            saving.save('gpu_tests', found)


PARTS = {
    'gpu_cudnn': ('cuDNN', cudnn),
    'gpu_smoke': ('The same bits in half the memory', smoke),
    'gpu_exactness': ('Exactness of small networks', exactness),
    'gpu_methods': ('Speeds under the limit', methods),
    'gpu_torch': ('PyTorch in the same memory', rivals),
    'gpu_small': ('A program of small functions', small),
    'gpu_arena': ('The arena, as the driver sees it', arena),
    'gpu_tests': ('Tests', tests),
    'gpu_torch_compile': ('PyTorch, compiled', rivals),
    'gpu_large': ('The largest batch', methods),
}


def _differences(first: Row, body: Row) -> str:
    """In what a result's run differs from the first one's."""
    about, here = first.get('environment', {}), body.get('environment', {})
    pairs = [f'{k}: {v}' for k, v in here.items() if v != about.get(k)]
    return f'Of another run: {", ".join(pairs)}.' if pairs else ''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('steps', nargs='?', help='file that run.sh writes')


def main(options: argparse.Namespace) -> int:
    if options.steps:
        save_tests(os.path.join(os.path.dirname(options.steps), 'gpu_tests.txt'))
    bodies = {name: load(name) for name in PARTS}
    parts = ['# Measured on a GPU']
    known = [body for body in bodies.values() if body is not None]
    if known:
        about = known[0].get('environment', {})
        parts.append('\n'.join(f'- {key}: {value}' for key, value in about.items()))
    if options.steps and os.path.exists(options.steps):
        parts += ['## Steps', steps(options.steps)]
    for name, (title, show) in PARTS.items():
        body = bodies[name]
        if body is None:
            continue
        parts.append(f'## {title}')
        if other := _differences(known[0], body):
            parts.append(other)
        try:
            parts.append(show(body))
        except Exception as error:  # a result of half a run must not hide the others
            parts.append(f'`{name}.json` cannot be shown: {error!r}')
        for failure in body.get('failures', ()):
            parts.append(f'Failed: `{failure.get("why")}`')
    text = '\n\n'.join([*parts, ''])
    with open(os.path.join(RESULTS, 'gpu.md'), 'w', encoding='utf-8') as file:
        file.write(text)
    print(text)
    return 0
