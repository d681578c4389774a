"""Chainer's own tests of functions, links and optimizers, with every map leaving.

Each test runs as Chainer's authors wrote it, first without us, then under three regimes
(regimes.py): every feature map is swapped; every one is made again where a trial replay
gave the same bits, else swapped; and a random choice for each. What fails only under a
regime is run once more by itself in a process of its own, and then counts as ours.

What is skipped without us (no GPU, no ChainerX) is not run with us. Under the regimes
every map is also compared with what forward has made, bit for bit, before backward
reads it (`Verifier`).

The tests are those of Chainer's source at v7.8.1 (the source package does not contain
them); nothing of them comes with this project.

    python -m benchmarks run upstream.run FOLDER [--what links_tests ...]
                                          [--device cuda]

FOLDER is a checkout of Chainer at v7.8.1; it is cloned from GitHub if there is none.
A part may have a share: ``:5`` runs every fifth test, chosen by its name, and of every
method of every class at least one that is not skipped, if there is one. The result is
written after each part; ``--add`` keeps the parts of the file that are not run again.
With ``--device cuda`` those tests are run that need a GPU (or the emulator).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from benchmarks import common, saving
from benchmarks.upstream import regimes
from benchmarks.upstream.worker import PLAIN, method_of

SOURCE = 'https://github.com/chainer/chainer'
TAG = 'v7.8.1'
# A script, not -m: the current folder is Chainer's source and must not be imported.
WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'worker.py')
PARTS = [
    *(
        f'functions_tests/{part}_tests'
        for part in (
            'activation', 'array', 'connection', 'evaluation', 'loss', 'math', 'noise',
            'normalization', 'pooling', 'rnn', 'util',
        )
    ),
    'links_tests',
    'optimizers_tests',
]  # fmt: skip


def obtain(folder: str) -> None:
    """Clones Chainer's source if it is not there."""
    if os.path.isdir(os.path.join(folder, 'tests', 'chainer_tests')):
        return
    command = ['git', 'clone', '--depth', '1', '--branch', TAG, SOURCE, folder]
    subprocess.run(command, check=True)


def work(
    folder: str,
    device: str,
    modes: list[str],
    share: int,
    what: list[str],
    only: Iterable[str] = (),
) -> dict[str, Any]:
    """What worker.py finds, in a process of its own."""
    path = [common.ROOT, *sys.path[1:]]
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join(p for p in path if p),
        # The Caffe tests need what newer versions of protobuf leave out otherwise.
        'PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION': 'python',
    }
    with tempfile.TemporaryDirectory() as scratch:
        output, names = (os.path.join(scratch, name) for name in ('out', 'names'))
        arguments = [device, ','.join(modes), str(share), output, *what]
        if only:
            with open(names, 'w', encoding='utf-8') as file:
                json.dump(list(only), file)
            arguments.append(f'@{names}')
        subprocess.run(
            [sys.executable, WORKER, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        with open(output, encoding='utf-8') as file:
            body: dict[str, Any] = json.load(file)
    return body


def only_with_us(body: dict[str, Any], regime: str) -> list[str]:
    """Tests that fail under a regime and not without."""
    plain, ours = (body['outcomes'][mode] for mode in (PLAIN, regime))
    return [t for t, o in ours.items() if o == 'failed' and plain[t] != 'failed']


def confirm(folder: str, device: str, body: dict[str, Any]) -> None:
    """Runs by itself what fails only with us: some tests cannot run twice."""
    for regime in regimes.REGIMES:
        tests = only_with_us(body, regime)
        if tests:
            files = sorted({test.split('::')[0] for test in tests})
            again = work(folder, device, [regime], 1, files, tests)
            body['outcomes'][regime].update(again['outcomes'][regime])
            body['reasons'][regime].update(again['reasons'][regime])


def not_covered(body: dict[str, Any]) -> list[str]:
    """Classes of which every test is skipped without us."""
    run: dict[str, bool] = collections.defaultdict(bool)
    for test, outcome in body['outcomes'][PLAIN].items():
        run['::'.join(method_of(test)[:-1])] |= outcome != 'skipped'
    return sorted(name for name, any_run in run.items() if not any_run)


def summary(body: dict[str, Any], part: str, share: int) -> dict[str, Any]:
    """Counts of one part, and what fails only with us."""
    row: dict[str, Any] = {
        'part': part,
        'share': share,
        'commit': common.environment()['commit'],
        'collected': body['collected'],
        'unreadable': body['unreadable'],
        'classes_skipped': not_covered(body),
        'modes': {},
    }
    for mode, outcomes in body['outcomes'].items():
        counts = collections.Counter(outcomes.values())
        row['modes'][mode] = {
            **{name: counts[name] for name in ('passed', 'failed', 'skipped')},
            'seconds': round(body['seconds'][mode], 1),
            **{
                name: body['counts'][mode][name]
                for name in sorted(body['counts'][mode])
            },
        }
        if mode == PLAIN:
            why = collections.Counter(body['reasons'][PLAIN].values())
            row['modes'][mode]['fails_without_us'] = dict(why.most_common())
            continue
        failing = only_with_us(body, mode)
        reasons = body['reasons'][mode]
        row['modes'][mode]['only_with_us'] = {
            test: reasons.get(test, '') for test in failing
        }
    return row


def save(rows: list[dict[str, Any]], name: str) -> None:
    """Writes all parts and their sum."""
    totals: dict[str, dict[str, int]] = {}
    for mode in (PLAIN, *regimes.REGIMES):
        counts = [row['modes'][mode] for row in rows]
        totals[mode] = {
            name: sum(count[name] for count in counts)
            for name in ('passed', 'failed', 'skipped')
        }
        if mode != PLAIN:
            totals[mode]['only_with_us'] = sum(
                len(count['only_with_us']) for count in counts
            )
    run = [row['part'] for row in rows]
    body = {
        'chainer_tests': TAG,
        'not_run': [part for part in PARTS if part not in run],
        'collected': sum(row['collected'] for row in rows),
        'totals': totals,
        'parts': rows,
    }
    common.save(name, body)


def saved(name: str) -> list[dict[str, Any]]:
    """The parts of a result that is there."""
    rows: list[dict[str, Any]] = saving.read(name)['parts']
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('folder')
    parser.add_argument('--what', nargs='+', default=PARTS, help='parts, as PART:SHARE')
    parser.add_argument('--device', choices=('host', 'cuda'), default='host')
    parser.add_argument('--add', action='store_true', help='keep the other parts')
    parser.add_argument('--name', default='upstream_tests')


def main(options: argparse.Namespace) -> int:
    """Runs the tests part by part and saves the counts."""
    unknown = [entry for entry in options.what if entry.partition(':')[0] not in PARTS]
    if unknown:
        raise SystemExit(f'no part {unknown[0]!r}; known are {", ".join(PARTS)}')
    folder = os.path.abspath(options.folder)
    obtain(folder)
    rows = {row['part']: row for row in saved(options.name)} if options.add else {}
    for entry in options.what:
        part, _, share = entry.partition(':')
        what = [f'tests/chainer_tests/{part}']
        modes = [PLAIN, *regimes.REGIMES]
        body = work(folder, options.device, modes, int(share or 1), what)
        confirm(folder, options.device, body)
        rows[part] = summary(body, part, int(share or 1))
        order = sorted(rows.values(), key=lambda row: PARTS.index(row['part']))
        save(order, options.name)
    return 0
