"""Runs a command on the emulator.

python tests/cuda_emulator/run.py FOLDER COMMAND...
"""

from __future__ import annotations

import os
import pathlib
import sys


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Of processes that use the emulator in a folder."""
    include = (folder / 'build/compile.txt').read_text().rpartition("'-I")[2]
    # CuPy keeps the names of compiled kernels, which differ where races are watched.
    cache = 'races' if os.environ.get('EMU_RACES', '0') not in ('', '0') else 'cupy'
    return {
        **os.environ,
        'EMU_LIBRARY': str(folder / 'lib/libcudaemulator.so'),
        'LD_LIBRARY_PATH': str(folder / 'lib'),
        'PYTHONPATH': os.pathsep.join(
            [str(folder / 'site'), *filter(None, [os.environ.get('PYTHONPATH')])]
        ),
        'CUDA_PATH': str(pathlib.Path(include.rstrip("'\n")).parent),
        'CUPY_CACHE_DIR': str(folder / 'cache' / cache),
        'CUPY_ACCELERATORS': '',
        'HYBRIDMEM_MAP': os.environ.get('HYBRIDMEM_MAP', '1'),
        'EMU_GRANULE': os.environ.get('EMU_GRANULE', '4096'),
        'EMU_DEVICES': os.environ.get('EMU_DEVICES', '2'),
    }


if __name__ == '__main__':
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    command = sys.argv[2:]
    os.execvpe(command[0], command, environment(pathlib.Path(sys.argv[1]).resolve()))
