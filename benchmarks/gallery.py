"""The examples of the gallery, plain against limited, each in a process of its own.

Writes the figures to the results and the pictures to ``docs/pictures/gallery``.

    python -m benchmarks run gallery [--only NAME ...]
    python -m benchmarks run gallery --device cuda [--planners NAME ...]

The second one asks for bits instead of figures: on a GPU, at small sizes, under several
planners. Its results are ``gallery_gpu.json``.
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
# Batch size and width with which seconds do, and a share of the peak that does, on a
# CPU and on a GPU, where less of the peak is temporary.
SMALL = {
    'image_classification': (4, 4, 0.8, 0.9),
    'language_model': (16, 16, 0.9, 0.9),
    'seq2seq': (8, 16, 0.9, 0.95),
    'gan': (8, 4, 0.9, 0.95),
    'vae': (8, 4, 0.8, 0.9),
    'unet': (2, 2, 0.9, 0.9),
    'transformer': (4, 4, 0.8, 0.9),
    'double_backprop': (8, 2, 0.8, 0.9),
}
PLANNERS = ('swap-all', 'superneurons', 'pooch', 'hybrid')
ITERATIONS = 12
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


def small_options(name: str, on_gpu: bool) -> list[str]:
    """Returns the options with which an example takes seconds."""
    batchsize, width, host_share, gpu_share = SMALL[name]
    return [
        *('--batchsize', str(batchsize), '--width', str(width)),
        *('--share', str(gpu_share if on_gpu else host_share)),
    ]


def prove(name: str, device: str, planner: str) -> dict[str, Any]:
    """Trains one example at a small size on a GPU; returns whether bits are the same.

    What has not trained to the end tells why.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *command(name, folder), *small_options(name, on_gpu=True),
                *('--iterations', str(ITERATIONS)),
                *('--device', device, '--planner', planner),
            ],
            env={**os.environ, **ONE_THREAD, 'PYTHONPATH': _python_path()},
            capture_output=True,
            text=True,
        )  # fmt: skip
        written = pathlib.Path(folder) / f'{name}.json'
        found = json.loads(written.read_text()) if written.exists() else {}
    keys = 'equal', 'plain_peak_bytes', 'limit_bytes', 'limited_peak_bytes'
    row = {key: found.get(key) for key in (*keys, 'guided_iterations', 'decisions')}
    told = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return {'name': name, 'planner': planner, **row, 'told': '' if found else told[0]}


def _python_path() -> str:
    """Of the emulator, if this runs on it, behind this repository."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument(
        '--only', nargs='+', choices=EXAMPLES, help='these; others keep their figures'
    )
    parser.add_argument(
        '--device', help='a GPU, such as cuda, on which bits are compared'
    )
    parser.add_argument(
        '--planners',
        nargs='+',
        default=list(PLANNERS),
        help=f'who plans there: {" ".join(PLANNERS)}',
    )


def main(options: argparse.Namespace) -> int:
    if options.device is not None:
        return _prove_all(options)
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


def _prove_all(options: argparse.Namespace) -> int:
    """Returns 0 if no example has other bits on the GPU."""
    rows = []
    for name in options.only or SMALL:
        for planner in options.planners:
            rows.append(prove(name, options.device, planner))
            equal, told = rows[-1]['equal'], rows[-1]['told']
            verdict = 'the same bits' if equal else told or 'OTHER BITS'
            print(f'{name:22}{planner:14}{verdict}', flush=True)
    saving.save('gallery_gpu', {'device': options.device, 'rows': rows})
    return int(any(row['equal'] is False for row in rows))
