"""Chainer's own tests of functions, links and optimizers, with every map leaving.

Each test runs as Chainer's authors wrote it, first without us, then under three regimes
(regimes.py): every feature map is swapped; every one is made again where a trial replay
gave the same bits, else swapped; and a random choice for each. What fails only under a
regime is run once more by itself in a process of its own, and then counts as ours.

The tests are those of Chainer's source at v7.8.1 (the source package does not contain
them); nothing of them comes with this project.

    python benchmarks/upstream/run.py FOLDER [--share 5] [--what optimizers_tests ...]

FOLDER is a checkout of Chainer at v7.8.1; it is cloned from GitHub if there is none.
``--share 1`` runs all tests: about 25,000 that run on a CPU, four times each.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import common
import regimes
from worker import PLAIN

SOURCE = 'https://github.com/chainer/chainer'
TAG = 'v7.8.1'
HERE = os.path.dirname(os.path.abspath(__file__))
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
# Tests that look, after backward, at an attribute that only the function node had.
LOOKS_INSIDE = {
    'noise_tests/test_zoneout.py': 'reads creator.flag_x after backward',
}


def obtain(folder: str) -> None:
    """Clones Chainer's source if it is not there."""
    if os.path.isdir(os.path.join(folder, 'tests', 'chainer_tests')):
        return
    command = ['git', 'clone', '--depth', '1', '--branch', TAG, SOURCE, folder]
    subprocess.run(command, check=True)


def work(folder: str, modes: list[str], share: int, what: list[str]) -> dict[str, Any]:
    """What worker.py finds, in a process of its own."""
    path = [common.ROOT, *sys.path[1:]]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(p for p in path if p)}
    with tempfile.TemporaryDirectory() as scratch:
        output, names = (os.path.join(scratch, name) for name in ('out', 'names'))
        with open(names, 'w', encoding='utf-8') as file:
            file.write('\n'.join(what))
        worker = os.path.join(HERE, 'worker.py')
        arguments = [','.join(modes), str(share), output, f'@{names}']
        subprocess.run(
            [sys.executable, worker, *arguments],
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


def confirm(folder: str, body: dict[str, Any]) -> None:
    """Runs by itself what fails only with us: some tests cannot run twice."""
    for regime in regimes.REGIMES:
        tests = only_with_us(body, regime)
        if tests:
            again = work(folder, [regime], 1, tests)
            body['outcomes'][regime].update(again['outcomes'][regime])
            body['reasons'][regime].update(again['reasons'][regime])


def because(test: str) -> str | None:
    """Why a test cannot pass with us, if that is known."""
    return next((why for name, why in LOOKS_INSIDE.items() if name in test), None)


def summary(body: dict[str, Any], part: str) -> dict[str, Any]:
    """Counts of one part, and what fails only with us."""
    row: dict[str, Any] = {'part': part, 'unreadable': body['unreadable'], 'modes': {}}
    for mode, outcomes in body['outcomes'].items():
        counts = collections.Counter(outcomes.values())
        row['modes'][mode] = {
            **{name: counts[name] for name in ('passed', 'failed', 'skipped')},
            **{
                name: body['counts'][mode][name]
                for name in sorted(body['counts'][mode])
            },
        }
        if mode == PLAIN:
            continue
        failing = only_with_us(body, mode)
        reasons = body['reasons'][mode]
        row['modes'][mode]['only_with_us'] = {
            test: reasons.get(test, '') for test in failing if because(test) is None
        }
        row['modes'][mode]['looks_inside'] = {
            test: because(test) for test in failing if because(test) is not None
        }
    return row


def save(rows: list[dict[str, Any]], name: str, share: int) -> None:
    """Writes all parts and their sum."""
    totals: dict[str, dict[str, int]] = {}
    for mode in (PLAIN, *regimes.REGIMES):
        counts = [row['modes'][mode] for row in rows]
        totals[mode] = {
            name: sum(count[name] for count in counts)
            for name in ('passed', 'failed', 'skipped')
        }
        if mode != PLAIN:
            for kind in ('only_with_us', 'looks_inside'):
                totals[mode][kind] = sum(len(count[kind]) for count in counts)
    run = [row['part'] for row in rows]
    body = {
        'chainer_tests': TAG,
        'share': share,
        'not_run': [part for part in PARTS if part not in run],
        'totals': totals,
        'parts': rows,
    }
    common.save(name, body)


def main() -> int:
    """Runs the tests part by part and saves the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder')
    parser.add_argument('--share', type=int, default=1, help='every so many-th test')
    parser.add_argument('--what', nargs='+', default=PARTS)
    parser.add_argument('--name', default='upstream_tests')
    options = parser.parse_args()
    folder = os.path.abspath(options.folder)
    obtain(folder)
    rows = []
    for part in options.what:
        what = [f'tests/chainer_tests/{part}']
        body = work(folder, [PLAIN, *regimes.REGIMES], options.share, what)
        confirm(folder, body)
        rows.append(summary(body, part))
        save(rows, options.name, options.share)
    return 0


if __name__ == '__main__':
    sys.exit(main())
