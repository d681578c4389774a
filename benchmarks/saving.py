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

from chainer_hybridmem.devices.host.device import processor_name

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
    """The commit, and whether the package is as it says; None if nobody knows.

    Asked are git, the variable ``BENCHMARK_COMMIT`` and ``COMMIT_FILE``, in this order.
    """
    commit = _git('rev-parse', '--short', 'HEAD')
    if commit:
        changes = _git('status', '--porcelain', '--', 'chainer_hybridmem')
        return commit, None if changes is None else not changes
    commit = os.environ.get('BENCHMARK_COMMIT')
    if commit:
        return commit, None
    try:
        with open(COMMIT_FILE, encoding='utf-8') as file:
            lines = file.read().split('\n')
    except OSError:
        return 'unknown', None
    if not lines[0].strip():
        return 'unknown', None
    return lines[0].strip(), not any(line.strip() for line in lines[1:])


def _git(*arguments: str) -> str | None:
    """What git answers about this folder; None without git, or if it is no clone."""
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

    A second folder may be named by ``RESULTS_COPY``. Whoever is killed meanwhile leaves
    the file of before.
    """
    text = json.dumps({'environment': environment(), **body}, indent=1, default=str)
    for folder in filter(None, (RESULTS, os.environ.get('RESULTS_COPY'))):
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f'{name}.json')
        with open(f'{path}.part', 'w', encoding='utf-8') as file:
            file.write(text + '\n')
        os.replace(f'{path}.part', path)
    print(f'written: benchmarks/results/{name}.json', file=sys.stderr)


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
