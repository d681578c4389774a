"""CPU seconds of a first plan and a first session, and whether plans are the same.

    python -m benchmarks run first_plan [--beside FOLDER]

Each command runs in a process and with a cache of compiled functions of its own: first
with an empty cache, then again. The difference is compiling. Then default plans of the
shipped profiles under three limits each, with a full cache. FOLDER has a checkout of
another commit, which takes its turn beside this one: machines are shared. Writes JSON
to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import saving

Row = dict[str, Any]

PLAN = """
from chainer_hybridmem.commands import main
assert main(['plan', 'shipped:resnet50-b8-host', '--memory-limit', '60%']) == 0
"""
SESSION = """
import chainer_hybridmem as hybridmem
import chainer, chainer.functions as F, chainer.links as L, numpy as np

layers = [
    part
    for depth in range(6)
    for part in (L.Convolution2D(12 if depth else 3, 12, 3, pad=1), F.sigmoid)
]
pooled = lambda h: F.average(h, axis=(2, 3))
model = L.Classifier(chainer.Sequential(*layers, pooled, L.Linear(12, 10)))
optimizer = chainer.optimizers.Adam(1e-3).setup(model)
x, t = np.zeros((6, 3, 20, 20), 'f'), np.zeros(6, 'i')
with hybridmem.optimize(model, 3_000_000) as session:
    for _ in range(16):
        optimizer.update(model, x, t)
assert session.statistics()['guided_iterations']
"""
PLANS = """
import hashlib, json, time
from chainer_hybridmem.planning import planners, simulation
from chainer_hybridmem.profiles import shipped_profiles
from chainer_hybridmem.planning.records.library import load_profile
from chainer_hybridmem.planning.search.candidates import least_memory

made = {}
for name in shipped_profiles():
    problem = simulation.make_problem(load_profile(name))
    least, most = least_memory(problem)[0], problem.in_core_peak_bytes
    for share in (0.15, 0.4, 0.7):
        began = time.process_time()
        limit = int(least + share * (most - least))
        plan = planners.make_plan(problem, limit, 'hybrid')
        seconds = time.process_time() - began
        digest = hashlib.sha256(repr((plan.maps, plan.simulations)).encode())
        made[f'{name}, {share:.0%}'] = seconds, digest.hexdigest()
print('made', json.dumps(made))
"""
DOCTOR = "from chainer_hybridmem.commands import main; main(['doctor'])"
COMMANDS = {'plan': PLAN, 'session': SESSION, 'doctor': DOCTOR}


def run(code: str, folder: str, cache: str) -> tuple[float, str]:
    """CPU seconds of a process that imports the package from a folder, and its output.

    Raises:
        CalledProcessError: If it fails.
    """
    environment = {
        **os.environ,
        'NUMBA_CACHE_DIR': cache,
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': folder,
    }
    command = [sys.executable, '-c', code]
    with tempfile.TemporaryFile('w+') as output:
        process = subprocess.Popen(
            command, cwd=cache, env=environment, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    return usage.ru_utime + usage.ru_stime, text


def first_and_again(folders: dict[str, str], turns: int) -> list[Row]:
    """Each command with an empty cache and with what that has left."""
    rows: list[Row] = []
    for command, code in COMMANDS.items():
        seconds: dict[str, list[list[float]]] = {name: [] for name in folders}
        for _ in range(turns):
            for name, folder in folders.items():
                with tempfile.TemporaryDirectory() as cache:
                    pair = [run(code, folder, cache)[0] for _ in range(2)]
                seconds[name].append(pair)
        for name, pairs in seconds.items():
            first, again = (
                statistics.median(column) for column in zip(*pairs, strict=True)
            )
            rows.append(
                {
                    'command': command,
                    'package': name,
                    'first_cpu_seconds': first,
                    'again_cpu_seconds': again,
                    'all_cpu_seconds': pairs,
                }
            )
            print(f'{command:8} {name:8} first {first:6.1f} s, again {again:6.1f} s')
    return rows


def plan_in_turns(folders: dict[str, str], turns: int) -> Row:
    """CPU seconds of default plans, and how many differ from the first package's."""
    seconds: dict[str, dict[str, list[float]]] = {}
    digests: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as root:
        for turn in range(turns + 1):
            for name, folder in folders.items():
                cache = os.path.join(root, name)
                os.makedirs(cache, exist_ok=True)
                text = run(PLANS, folder, cache)[1]
                made = json.loads(text.split('made ', 1)[1])
                for case, (spent, digest) in made.items():
                    digests.setdefault(case, set()).add(digest)
                    if turn:  # the one before it compiles
                        of = seconds.setdefault(case, {}).setdefault(name, [])
                        of.append(spent)
    medians = {
        case: {name: statistics.median(all_) for name, all_ in of.items()}
        for case, of in seconds.items()
    }
    result: Row = {
        'plans': len(digests),
        'different_plans': sum(len(found) > 1 for found in digests.values()),
        'cpu_seconds': medians,
    }
    if 'before' in folders:
        ratios = [of['now'] / of['before'] for of in medians.values()]
        result['median_ratio'] = statistics.median(ratios)
    print({key: value for key, value in result.items() if key != 'cpu_seconds'})
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--beside', metavar='FOLDER', help='another checkout')
    parser.add_argument('--turns', type=int, default=3)


def main(options: argparse.Namespace) -> None:
    """Runs the benchmark."""
    folders = {'now': saving.ROOT}
    if options.beside:
        folders['before'] = os.path.abspath(options.beside)
    saving.save(
        'first_plan',
        {
            'commands': first_and_again(folders, options.turns),
            'planning': plan_in_turns(folders, options.turns),
        },
    )
