"""Packages of other people, unmodified, trained by ``hybridmem run``.

Installs each package into a fresh environment below FOLDER, then runs jobs that train
networks of it on drawn data: with the repair alone, with a limit that nothing meets,
and at 75 % and 55 % of what can leave above what is permanent. Chainer's own examples
run as they are; their source is cloned from GitHub if FOLDER/chainer-source does not
have it, and so is EEND, which no index has. Bits are equal if all parameters are, and
every printed word that is the same in each run without a limit. CPU seconds of the last
quarter of all updates, and of all, are divided by those of the same updates with the
repair alone; what other programs take from an update is left out by running everything
again in other rounds, of which each update counts with its least seconds. So what is
compiled once in an environment does not count. What is not installed, or ends with an
error, is a row with the error.

    python -m benchmarks run packages.run FOLDER [names...] [--rounds 3] [--job BEGIN]

Rows of an earlier run stay until others take their places.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import common
from benchmarks.packages import drawn_data
from benchmarks.packages.catalogue import PACKAGES, Package
from benchmarks.saving import Rows
from benchmarks.upstream.run import obtain

JOBS = pathlib.Path(__file__).parent / 'jobs'
DATASETS = '.datasets'  # beside scripts; what they would download
SHARES = (75, 55)  # percent of what can leave
ROOMY = '1000GiB'  # nothing has to leave
MOST_SECONDS = 1800
MOST_MESSAGE = 300  # characters


def prepare(package: Package, folder: pathlib.Path) -> pathlib.Path:
    """The Python of an environment that has the package; made if it is not there.

    Raises:
        subprocess.CalledProcessError: If the package cannot be installed.
    """
    place = folder / package.name
    python = place / 'bin' / 'python'
    if (place / 'installed').exists():
        return python
    subprocess.run([sys.executable, '-m', 'venv', '--clear', place], check=True)
    constraints = os.path.join(common.ROOT, 'constraints.txt')
    environment = {
        **os.environ,
        'PIP_CONSTRAINT': constraints,
        'PIP_BUILD_CONSTRAINT': constraints,
    }
    install = [python, '-m', 'pip', 'install', '--quiet']
    own = f'{package.name}=={package.version}'
    steps = [[common.ROOT, *package.needs]]
    if not package.repository:
        steps.append(['--no-deps', own] if package.alone else [own])
    for step in steps:
        subprocess.run(
            [*install, *step], check=True, env=environment, text=True,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    (place / 'installed').touch()
    return python


def find_source(package: Package, folder: pathlib.Path) -> pathlib.Path | None:
    """The folder that a package is imported from; None if it is installed.

    Raises:
        subprocess.CalledProcessError: If it cannot be cloned, or lacks the commit.
    """
    if not package.repository:
        return None
    source = folder / f'{package.name}-source'
    if not source.exists():
        _run_git('clone', package.repository, source)
    _run_git('-C', source, 'checkout', '--quiet', '--detach', package.version)
    return source


def _run_git(*arguments: str | pathlib.Path) -> None:
    subprocess.run(['git', *arguments], check=True, text=True, stderr=subprocess.PIPE)


def find_scripts(package: Package, folder: pathlib.Path) -> pathlib.Path:
    """Where the scripts of a package's jobs are; copies of those of its source."""
    if not package.source:
        return JOBS
    source, scripts = folder / 'chainer-source', folder / package.name / 'examples'
    obtain(str(source))
    shutil.rmtree(scripts, ignore_errors=True)
    shutil.copytree(source / 'examples', scripts)
    drawn_data.draw(scripts / DATASETS, scripts)
    return scripts


class Ran:
    """What one process has shown.

    Attributes:
        steps: CPU seconds of each update; the least ones, once more rounds are merged.
        repeats: Whether all rounds have had the same bits.
    """

    def __init__(
        self,
        python: pathlib.Path,
        scripts: pathlib.Path,
        job: str,
        source: pathlib.Path | None,
        options: list[str],
    ) -> None:
        name, *arguments = job.split()
        script = scripts / name
        output = python.parent / 'seen.json'
        output.unlink(missing_ok=True)
        path = [common.ROOT] if source is None else [common.ROOT, str(source)]
        process = subprocess.run(
            [python, '-m', 'benchmarks.packages.worker', output, *options, script,
             *arguments],
            env={
                **os.environ, 'PYTHONPATH': os.pathsep.join(path),
                'PYTHONHASHSEED': '0',
                'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
                'CHAINER_DATASET_ROOT': str(scripts / DATASETS),
            },
            cwd=script.parent,
            capture_output=True, text=True, timeout=MOST_SECONDS, check=False,
        )  # fmt: skip
        self._words = process.stdout.split()
        self._varying: set[int] = set()  # words that another round does not print
        self.errors = process.stderr.strip().splitlines()
        self.seen: dict[str, Any] = {}
        self.steps: list[float] = []
        self.repeats = True
        if output.exists():
            self.seen = json.loads(output.read_text())
            times = [self.seen['begin_seconds'], *self.seen['cpu_seconds']]
            self.steps = [b - a for a, b in itertools.pairwise(times)]

    def merge(self, again: Ran) -> None:
        """The same in another round."""
        self._varying.update(self._find_other_words(again))
        self.repeats &= self.seen.get('digest') == again.seen.get('digest')
        if len(again.steps) == len(self.steps):  # neither has failed
            self.steps = list(map(min, self.steps, again.steps))

    def is_like(self, other: Ran) -> bool:
        """Whether another one has the same bits, and has printed the same."""
        others = set(self._find_other_words(other))
        return others <= self._varying and self.seen['digest'] == other.seen['digest']

    def _find_other_words(self, other: Ran) -> Iterator[int]:
        pairs = itertools.zip_longest(self._words, other._words)
        return (i for i, (own, others) in enumerate(pairs) if own != others)

    @property
    def error(self) -> str | None:
        """What it has ended with; None if it has come to its end."""
        if self.seen.get('status') == 0:
            return None
        told = [line for line in self.errors if not line.startswith('hybridmem:')]
        return (told or self.errors or ['ended without a word'])[-1][:MOST_MESSAGE]

    @property
    def peak_bytes(self) -> int:
        return max(session['peak_bytes'] for session in self.seen['sessions'])


def ratio(ours: Ran, plain: Ran, part: slice) -> float:
    """CPU seconds over those of plain Chainer."""
    return sum(ours.steps[part]) / sum(plain.steps[part])


def compare(ours: Ran, plain: Ran, share: int) -> dict[str, Any]:
    """One share of a row."""
    if ours.error is not None:
        return {f'error_{share}': ours.error}
    quarter = slice(-max(1, len(plain.steps) // 4), None)
    sessions = ours.seen['sessions']
    iterations = sum(one['iterations'] for one in sessions)
    guided = sum(one['guided_iterations'] for one in sessions)
    return {
        f'equal_{share}': plain.is_like(ours) if plain.repeats else None,
        f'kept_{share}': all(s['peak_bytes'] <= s['limit_bytes'] for s in sessions),
        f'guided_{share}': guided / iterations if iterations else 0.0,
        f'cpu_last_{share}': ratio(ours, plain, quarter),
        f'cpu_all_{share}': ratio(ours, plain, slice(1, None)),
    }


def try_job(
    python: pathlib.Path,
    scripts: pathlib.Path,
    package: Package,
    job: str,
    source: pathlib.Path | None,
    rounds: int,
) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {'package': package.name, 'version': package.version}
    row |= {'job': job, 'note': package.note}
    own = ['--old-names'] if package.old_names else []
    run = functools.partial(Ran, python, scripts, job, source)
    plain = run(own)
    if plain.error is not None:
        return row | {'error': plain.error}
    options = {100: [*own, '--memory-limit', ROOMY]}
    limited = {100: run(options[100])}
    roomy = limited[100]
    if roomy.error is not None or not roomy.seen['sessions']:
        return row | {'error': roomy.error or 'no session'}
    permanent, peak = roomy.seen['permanent_bytes'], roomy.peak_bytes
    for share in SHARES:
        limit = permanent + (peak - permanent) * share // 100
        row[f'limit_{share}_bytes'] = limit
        options[share] = [*own, '--memory-limit', str(limit)]
        limited[share] = run(options[share])
    for _ in range(rounds - 1):
        plain.merge(run(own))
        for share, ran in limited.items():
            if ran.error is None:
                ran.merge(run(options[share]))
    row |= {
        'updates': len(plain.steps),
        'update_seconds': sum(plain.steps[1:]) / max(1, len(plain.steps) - 1),
        'peak_bytes': peak,
        'permanent_bytes': permanent,
        'rounds': rounds,
    }
    for share, ran in limited.items():
        row |= compare(ran, plain, share)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('folder', help='gets an environment for each package')
    parser.add_argument('names', nargs='*', metavar='name', help='of packages')
    parser.add_argument('--rounds', type=int, default=3, help='of each run of a job')
    parser.add_argument('--job', default='', help='how the jobs begin that are to run')


def main(options: argparse.Namespace) -> int:
    known = {package.name: package for package in PACKAGES}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        raise SystemExit(f'no package {unknown[0]!r}; known are {", ".join(known)}')
    rows = Rows('packages')
    with contextlib.suppress(FileNotFoundError):  # in the first run
        rows.keep_earlier()
    folder = pathlib.Path(options.folder).resolve()
    for name in options.names or known:
        package = known[name]
        try:
            python = prepare(package, folder)
            source = find_source(package, folder)
        except subprocess.CalledProcessError as error:
            told = (error.stderr or str(error)).strip().splitlines()[-1]
            row = {
                'package': name,
                'version': package.version,
                'job': '',
                'error': told,
            }
            rows.put(row, 'package', 'job')
            continue
        scripts = find_scripts(package, folder)
        for job in package.jobs:
            if job.startswith(options.job):
                row = try_job(python, scripts, package, job, source, options.rounds)
                print(row, flush=True)
                rows.put(row, 'package', 'job')
    return 0
