"""Result files: where and with what they are measured, and each row at once.

Nothing here imports Chainer or CuPy: a rival's process has the GPU for itself.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

from chainer_hybridmem.training.devices.host.device import processor_name

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, 'benchmarks', 'results')
# Written by `make gpu-wheels`, for a copy without git: the commit in the first line,
# then what is changed in the package, a file a line.
COMMIT_FILE = os.path.join(ROOT, '.gpu-wheels', 'commit.txt')
_PACKAGES = {
    'numpy': ('numpy',),
    'chainer': ('chainer',),
    'numba': ('numba',),
    'cupy': ('cupy-cuda13x', 'cupy-cuda12x', 'cupy'),
    'torch': ('torch',),
}


@functools.cache
def environment() -> dict[str, Any]:
    """Machine, versions, commit and date of a run; None for what is not known."""
    commit, clean = commit_and_clean()
    return {
        'date': datetime.date.today().isoformat(),
        'commit': commit,
        'clean': clean,
        'processor': processor_name(),
        'cores': os.cpu_count(),
        'gpu': _gpu(),
        'python': platform.python_version(),
        **{name: _version(*packages) for name, packages in _PACKAGES.items()},
        'blas_threads': os.environ.get('OPENBLAS_NUM_THREADS', 'default'),
    }


def commit_and_clean() -> tuple[str, bool | None]:
    """The commit, and whether the package equals it; None if that is unknown.

    Sources are the variable ``BENCHMARK_COMMIT``, git and ``COMMIT_FILE``, in turn.
    """
    commit = os.environ.get('BENCHMARK_COMMIT')
    if commit:
        return commit, None
    commit = _git('rev-parse', '--short', 'HEAD')
    if commit:
        changes = _git('status', '--porcelain', '--', 'chainer_hybridmem')
        return commit, None if changes is None else not changes
    try:
        with open(COMMIT_FILE, encoding='utf-8') as file:
            lines = file.read().split('\n')
    except OSError:
        return 'unknown', None
    if not lines[0].strip():
        return 'unknown', None
    return lines[0].strip(), not any(line.strip() for line in lines[1:])


def _git(*arguments: str) -> str | None:
    """What git says of this folder; None without git, or if it is no clone."""
    if not os.path.exists(os.path.join(ROOT, '.git')):
        return None  # git would answer for a folder around this one
    return _ask('git', *arguments)


def _gpu() -> str | None:
    """Name, driver and memory of the first GPU."""
    if 'EMU_LIBRARY' in os.environ:
        return 'emulated'
    query = '--query-gpu=name,driver_version,memory.total'
    answer = _ask('nvidia-smi', query, '--format=csv,noheader')
    return answer.split('\n')[0] if answer else None


def _ask(*command: str) -> str | None:
    try:
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def save(name: str, body: dict[str, Any]) -> None:
    """Writes a result with its environment to ``benchmarks/results``.

    ``RESULTS_COPY`` may name a second folder. A process that is killed meanwhile leaves
    the earlier file.
    """
    parts = {**body, 'environment': environment()}  # not that of an earlier result
    text = json.dumps({'environment': None, **parts}, indent=1, default=str)
    _write(f'{name}.json', text + '\n')


def save_text(name: str, text: str) -> None:
    """Writes ``NAME.md`` beside the saved ``NAME.json``, whose source its end names."""
    source = source_line(read(name)['environment'])
    _write(f'{name}.md', f'{text.rstrip()}\n\n{source}\n')


def source_line(about: dict[str, Any]) -> str:
    """Machine, versions, commit and date of an environment, as one line of Markdown."""
    clean = ' (changed since)' if about.get('clean') is False else ''
    parts = [f'Commit {about["commit"]}{clean}', about['date']]
    parts += [f'{about["processor"]}, {about["cores"]} cores']
    parts += [about['gpu']] if about.get('gpu') else []
    parts += [f'Python {about["python"]}']
    parts += [f'{name} {about[name]}' for name in _PACKAGES if about.get(name)]
    return f'*{", ".join(parts)}.*'


def read(name: str) -> dict[str, Any]:
    """The body of a saved result, with its environment."""
    with open(path(name, 'json'), encoding='utf-8') as file:
        body: dict[str, Any] = json.load(file)
    return body


def path(name: str, kind: str) -> str:
    """Where a result lies: ``kind`` is the end of the file's name."""
    return os.path.join(RESULTS, f'{name}.{kind}')


def _write(name: str, text: str) -> None:
    for folder in filter(None, (RESULTS, os.environ.get('RESULTS_COPY'))):
        os.makedirs(folder, exist_ok=True)
        target = os.path.join(folder, name)
        with open(f'{target}.part', 'w', encoding='utf-8') as file:
            file.write(text)
        os.replace(f'{target}.part', target)
    print(f'written: benchmarks/results/{name}', file=sys.stderr)


class Rows:
    """A result file whose rows are saved as they are measured.

    Args:
        name: Of the file.
        body: What else it says.
    """

    def __init__(self, name: str, **body: Any) -> None:
        self._name = name
        self._body = body
        self.rows: list[dict[str, Any]] = []

    def keep_earlier(self) -> None:
        """The rows of an earlier run stay until others take their places."""
        self.rows = read(self._name)['rows']

    def put(self, row: dict[str, Any], *names: str) -> None:
        """A row, with its commit and date, in the place of an earlier one.

        Args:
            row: The row.
            names: Of the values in which an earlier one is alike.
        """
        about = environment()
        row = {**row, 'commit': about['commit'], 'date': about['date']}
        for i, earlier in enumerate(self.rows):
            if all(earlier[name] == row[name] for name in names):
                self.rows[i] = row
                self._save()
                return
        self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """One row more."""
        self.rows.append(row)
        self._save()

    def tell(self, **body: Any) -> None:
        """Something else to say."""
        self._body |= body
        self._save()

    def _save(self) -> None:
        save(self._name, {**self._body, 'rows': self.rows})
