"""Builds the release and tries it where a user would: outside of the source tree.

``python tests/release/check.py`` builds sdist and wheel, has twine check them, looks
into them, and installs the wheel in an empty environment of each Python that is
there. In it the command, the import, a training of two iterations and the plugin of
pytest are tried. A Python that is not there is skipped, with a line that says so.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = ('3.10', '3.13')
CONSTRAINTS = ROOT / 'constraints.txt'
NEEDED = {
    'wheel': (
        'chainer_hybridmem.pth',
        'chainer_hybridmem/py.typed',
        'chainer_hybridmem/commit.txt',
        'chainer_hybridmem/forecasting/estimation/device_models.json',
        'chainer_hybridmem/profiles/resnet50-b8-host.json.gz',
    ),
    'sdist': (
        'CHANGELOG.md',
        'chainer_hybridmem.pth',
        'constraints.txt',
        'LICENSE',
        'setup.py',
    ),
}
TRAINING = """
import chainer_hybridmem as hybridmem
import chainer, chainer.functions as F, chainer.links as L, numpy as np
assert 'site-packages' in hybridmem.__file__, hybridmem.__file__
model = L.Classifier(chainer.Sequential(L.Linear(64, 64), F.relu, L.Linear(64, 4)))
optimizer = chainer.optimizers.SGD().setup(model)
x, t = np.ones((32, 64), 'f'), np.zeros(32, 'i')
with hybridmem.optimize(model, '64MiB') as session:
    losses = []
    for _ in range(2):
        loss = model(x, t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
assert losses[1] < losses[0], losses
assert session.statistics()['peak_bytes'] > 0
print('two iterations:', losses)
"""
MEMORY_TEST = """
import chainer.links as L, numpy as np

def test_it(hybridmem_peak):
    L.Linear(1000, 1000)(np.ones((8, 1000), 'f'))
    assert '4MB' < hybridmem_peak < '13MB'
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('versions', nargs='*', default=VERSIONS, help='of Python')
    parser.add_argument('--keep', metavar='FOLDER', help='where to put what is built')
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='hybridmem-release-') as name:
        folder = pathlib.Path(name)
        commit = git('describe', '--always', '--dirty', '--exclude=*', '--abbrev=7')
        sdist, wheel = build(folder / 'dist')
        pythons = {v: find_python(v) for v in args.versions}
        for version in [v for v, python in pythons.items() if python is None]:
            print(f'SKIPPED: Python {version} is not on this machine')
        found = {v: python for v, python in pythons.items() if python is not None}
        if not found:
            found = {'of-this-environment': sys.executable}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            tries = {
                v: pool.submit(
                    try_wheel, python, wheel, commit, folder / f'try{number}'
                )
                for number, (v, python) in enumerate(found.items())
            }
            for version, future in tries.items():
                print(f'Python {version}: {future.result()}')
        if args.keep:
            for file in (sdist, wheel):
                shutil.copy(file, args.keep)
    print(f'The release works ({time.monotonic() - started:.0f} s).')
    return 0


def build(dist: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Builds both, and looks into them."""
    run(sys.executable, '-m', 'build', '--outdir', dist, ROOT)
    (sdist,), (wheel,) = dist.glob('*.tar.gz'), dist.glob('*.whl')
    run(sys.executable, '-m', 'twine', 'check', '--strict', sdist, wheel)
    with tarfile.open(sdist) as archive:
        names = {member.partition('/')[2] for member in archive.getnames()}
        check_names('sdist', names)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        check_names('wheel', names)
    tops = {name.partition('/')[0] for name in names}
    version = wheel.name.split('-')[1]
    package = 'chainer_hybridmem'
    expected = {package, f'{package}.pth', f'{package}-{version}.dist-info'}
    if tops != expected:
        raise SystemExit(f'The wheel has {sorted(tops)} instead of {sorted(expected)}.')
    entries = re.findall(r'^## (\S+)', (ROOT / 'CHANGELOG.md').read_text(), re.M)
    if entries[0].strip('[]') != version:
        raise SystemExit(f'CHANGELOG.md begins with {entries[0]}, not with {version}.')
    return sdist, wheel


def check_names(what: str, names: set[str]) -> None:
    missing = sorted(set(NEEDED[what]) - names)
    if missing:
        raise SystemExit(f'The {what} lacks {missing}.')


def find_python(version: str) -> str | None:
    """An interpreter on the path, or one that pyenv has installed."""
    pyenv = pathlib.Path(os.environ.get('PYENV_ROOT', pathlib.Path.home() / '.pyenv'))
    candidates = [shutil.which(f'python{version}')]
    candidates += sorted(map(str, pyenv.glob(f'versions/{version}.*/bin/python')))
    code = f'import sys, venv, ensurepip; sys.exit({version!r} not in sys.version[:5])'
    for python in filter(None, candidates):
        # pyenv's own commands are there for versions that are not in use, too.
        if subprocess.run([python, '-c', code], capture_output=True).returncode == 0:
            return python
    return None


def try_wheel(
    python: str, wheel: pathlib.Path, commit: str, folder: pathlib.Path
) -> str:
    """Installs a wheel in an empty environment and uses it from an empty folder.

    Args:
        python: The interpreter.
        wheel: What is tried.
        commit: That it has been built from; empty if that is not known.
        folder: For the environment.

    Returns:
        str: What the installed command says about its version.
    """
    work = folder / 'work'
    work.mkdir(parents=True)
    run(python, '-m', 'venv', folder / 'venv')
    bin_ = folder / 'venv' / 'bin'
    environment = {'PIP_CONSTRAINT': CONSTRAINTS, 'PIP_BUILD_CONSTRAINT': CONSTRAINTS}
    pip = bin_ / 'python', '-m', 'pip', '--disable-pip-version-check', 'install'
    run(*pip, '--quiet', '--no-compile', wheel, 'pytest', environment=environment)
    run(*pip, '--quiet', '--dry-run', f'{wheel}[plot,progress,autoswap,examples]')
    said = run(bin_ / 'hybridmem', '--version', folder=work)
    if commit and f'({commit})' not in said:
        raise SystemExit(f'{said!r} does not name commit {commit}.')
    (work / 'train.py').write_text(TRAINING)
    (work / 'test_memory.py').write_text(MEMORY_TEST)
    trained = run(bin_ / 'python', 'train.py', folder=work)
    run(bin_ / 'python', '-m', 'pytest', '-q', 'test_memory.py', folder=work)
    plan = 'plan', 'shipped:lstm-b128-host', '--memory-limit', '80%'
    run(bin_ / 'hybridmem', *plan, '--planner', 'swap-all', folder=work)
    return f'{said.strip()}; {trained.strip()}'


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ['git', *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ''
    return done.stdout.strip()


def run(
    *command: str | pathlib.Path,
    folder: pathlib.Path | None = None,
    environment: dict[str, pathlib.Path] | None = None,
) -> str:
    """Runs a command; what it has printed is shown if it fails."""
    inherited = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=inherited | {k: str(v) for k, v in (environment or {}).items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f'{" ".join(map(str, command))}: exit {done.returncode}')
    return done.stdout


if __name__ == '__main__':
    sys.exit(main())
