"""The examples of the gallery, plain against limited, each in a process of its own.

Writes the figures to the results and the pictures to ``docs/pictures/gallery``.

    python -m benchmarks run gallery [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import saving

ROOT = pathlib.Path(saving.ROOT)
PICTURES = ROOT / 'docs' / 'pictures' / 'gallery'
EXAMPLES = (
    *('image_classification', 'language_model', 'seq2seq', 'gan', 'vae', 'unet'),
    *('transformer', 'double_backprop', 'data_parallel'),
)
PROCESSES = {'data_parallel': 2}
ONE_THREAD = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


def command(name: str, folder: str) -> list[str]:
    """Returns the command line of an example that writes into a folder."""
    script = str(ROOT / 'examples' / 'gallery' / f'{name}.py')
    one = [sys.executable, script, '--out', folder]
    if name not in PROCESSES:
        return one
    mpiexec = pathlib.Path(sys.executable).with_name('mpiexec')
    found = str(mpiexec) if mpiexec.exists() else 'mpiexec'
    return [found, '-n', str(PROCESSES[name]), *one]


def run(name: str) -> dict[str, Any]:
    """Runs one example; returns its figures.

    Raises:
        CalledProcessError: If bits differ, or the limit is exceeded.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **ONE_THREAD, 'PYTHONPATH': str(ROOT)}
        subprocess.run(command(name, folder), check=True, env=environment)
        PICTURES.mkdir(parents=True, exist_ok=True)
        shutil.copy(pathlib.Path(folder) / f'{name}.png', PICTURES)
        text = (pathlib.Path(folder) / f'{name}.json').read_text()
    return {'name': name, **json.loads(text)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument(
        '--only', nargs='+', choices=EXAMPLES, help='these; others keep their figures'
    )


def main(options: argparse.Namespace) -> int:
    chosen = options.only or EXAMPLES
    found: dict[str, Any] = {}
    if options.only:
        found = {row['name']: row for row in saving.read('gallery')['rows']}
    for name in chosen:
        print(name, flush=True)
        found[name] = run(name)
    rows = [found[name] for name in EXAMPLES if name in found]
    saving.save('gallery', {'rows': rows})
    return 0
