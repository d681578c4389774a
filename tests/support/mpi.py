"""Programs in several processes of MPI."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

# A process that waits sleeps between two looks: tests have as many processors as MPI
# takes for itself alone.
PATIENT = {
    'MPIR_CVAR_CH4_PROGRESS_THROTTLE': '1',
    'MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT': '16',
}


def find_mpiexec() -> str | None:
    """Beside this Python if an MPI was installed as a package, else on the path."""
    own = os.path.join(os.path.dirname(sys.executable), 'mpiexec')
    return own if os.access(own, os.X_OK) else shutil.which('mpiexec')


needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec('mpi4py') is None or find_mpiexec() is None,
    reason='needs mpi4py and an MPI with mpiexec (pip install mpi4py mpich)',
)


def run_ranks(
    program: pathlib.Path,
    *words: object,
    count: int = 2,
    timeout: float = 900,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in several processes, until all have ended."""
    mpiexec = find_mpiexec()
    assert mpiexec is not None
    command = [mpiexec, '-n', str(count), sys.executable, str(program)]
    path = os.pathsep.join(p for p in sys.path if p)
    given = {**PATIENT, 'PYTHONPATH': path, **environment}
    return subprocess.run(
        [*command, *map(str, words)],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
