"""Installs from a folder of wheels what is not installed, without a network.

    python -m benchmarks run gpu.install_wheels WHEELS TARGET

``make gpu-wheels`` fills the folder. What a machine has stays its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import subprocess
import sys


def lacking(wheels: pathlib.Path) -> list[pathlib.Path]:
    """Wheels of packages that are not installed."""
    return [wheel for wheel in sorted(wheels.glob('*.whl')) if not _installed(wheel)]


def _installed(wheel: pathlib.Path) -> bool:
    try:
        importlib.metadata.version(wheel.name.partition('-')[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('wheels', type=pathlib.Path, help='folder with wheels')
    parser.add_argument('target', type=pathlib.Path, help='folder to install into')


def main(options: argparse.Namespace) -> int:
    wheels = lacking(options.wheels)
    print('to install:', ', '.join(wheel.name for wheel in wheels) or 'nothing')
    if not wheels:
        return 0
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--no-index', '--no-deps']
    pip += ['--no-compile', '--no-cache-dir', '--disable-pip-version-check']
    pip += ['--upgrade', '--target', str(options.target)]
    failed = [wheel for wheel in wheels if subprocess.call([*pip, str(wheel)])]
    for wheel in failed:  # one of another Python, say: the others are there
        print(f'not installed: {wheel.name}')
    return 1 if failed else 0
