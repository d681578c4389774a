"""What a change of the structure must not change, frozen and compared.

Each part gives figures for named cases. ``--freeze`` takes every part twice and keeps
the figures that both times agree on, with how many did not: those depend on how busy
the machine is. Without it, every kept figure is compared; one that differs fails.

    python -m benchmarks run referee                    # about 15 minutes on one core
    python -m benchmarks run referee --only plans fuzz
    python -m benchmarks run referee --freeze [--only cuda]

``cuda`` needs the emulator (``make cuda-emulator``). Speed is not judged here: see
``programs.costs`` and ``cuda_counts``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import saving
from benchmarks.saving import ROOT
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.planning.planners import make_plan, names, needs_options
from chainer_hybridmem.planning.records.plan_file import serialise_plan
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.profiles import shipped_profiles

sys.path.insert(0, os.path.join(ROOT, 'tests'))
from fuzz.cases import Case, draw
from fuzz.checking import check
from support.scenarios import SCENARIOS, Run
from support.virtual import Conditions, Machine

NAME = 'referee'
FILE = saving.path(NAME, 'json')
Figures = dict[str, Any]
Part = Callable[[], Iterator[tuple[str, Figures]]]
SHARES = (0.8, 0.55)  # of the in-core peak
UNTIMED = {'exact'}  # its solver stops by the clock
DRAWN = range(1000, 1060)  # seeds of the fuzzer
EMULATOR = pathlib.Path(ROOT, '.cuda-emulator', '14')
MARK = 'referee: '  # before what the emulated process finds
SESSIONS: dict[str, Figures] = {
    'no planner named': {'steps': 1000},
    'hybrid': {'planner': 'hybrid', 'steps': 1000},
    'superneurons': {'planner': 'superneurons', 'cross_iteration': 'all'},
}
KEPT = (
    *('iterations', 'guided_iterations', 'deviations', 'split', 'restores'),
    *('iteration_seconds', 'predicted_seconds', 'lower_bound_seconds'),
    *('predicted_peak_bytes', 'in_core_peak_bytes', 'arena_bytes', 'keep', 'swap'),
    *('recompute', 'swapped_bytes', 'recomputed_bytes', 'evictions', 'peak_bytes'),
)


def plans() -> Iterator[tuple[str, Figures]]:
    """Every planner that needs no option, on every shipped profile."""
    for profile in shipped_profiles():
        problem = make_problem(hybridmem.load_profile(profile))
        for share in SHARES:
            limit_bytes = int(share * problem.in_core_peak_bytes)
            for planner in names():
                if planner in UNTIMED or needs_options(planner):
                    continue
                case = f'{profile} at {share} with {planner}'
                try:
                    plan = make_plan(problem, limit_bytes, planner)
                except HybridMemoryError as error:
                    yield case, {'error': type(error).__name__}
                    continue
                file = json.loads(serialise_plan(plan))
                yield (
                    case,
                    {
                        'moves': digest([file['maps'], file['replays'], file['parts']]),
                        'seconds': plan.predicted_seconds,
                        'peak_bytes': plan.predicted_peak_bytes,
                        'lower_bound_seconds': plan.lower_bound_seconds,
                        'simulations': plan.simulations,
                    },
                )


def scenarios() -> Iterator[tuple[str, Figures]]:
    """Programs that use the graph in unusual ways, on a machine of their own time."""
    for name, scenario in SCENARIOS.items():
        plain = Run(counted=True)
        scenario.program(plain)
        limit_bytes = int(plain.peak_bytes * scenario.share)
        for session, options in SESSIONS.items():
            machine = Machine(Conditions())
            run = Run({'memory_limit': limit_bytes, **options})
            with machine.running():
                scenario.program(run)
            figures = run.session.statistics()
            yield (
                f'{name} with {session}',
                {
                    'same_bits': run.records == plain.records,
                    'within_limit': figures['footprint_bytes'] <= limit_bytes,
                    'faults': machine.faults,
                    **{key: figures[key] for key in KEPT},
                },
            )


def fuzz() -> Iterator[tuple[str, Figures]]:
    """The fuzzer's kept cases, and some that it draws."""
    kept = pathlib.Path(ROOT, 'tests', 'fuzz', 'regressions.jsonl').read_text()
    cases = {f'kept {i}': Case.from_json(s) for i, s in enumerate(kept.splitlines())}
    cases |= {f'drawn {seed}': draw(seed) for seed in DRAWN}
    for name, case in cases.items():
        found = check(case)
        figures = {'outcome': found.outcome, 'guided': found.guided}
        yield name, {**figures, 'moved': found.moved, 'left': found.deviations}


def cuda() -> Iterator[tuple[str, Figures]]:
    """Calls of CUDA in each iteration of ResNet-50, in a process on the emulator."""
    runner = os.path.join(ROOT, 'tests', 'cuda_emulator', 'run.py')
    code = 'from benchmarks import referee; referee.print_counts()'
    command = [sys.executable, runner, str(EMULATOR), sys.executable, '-c', code]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, 'EMU_IDLE': '1', 'EMU_TOTAL': '80'},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            yield from json.loads(line.removeprefix(MARK)).items()


def print_counts() -> None:
    """Prints what ``cuda`` reads."""
    from benchmarks import cuda_counts

    network, limit_bytes = ('resnet50', 64), 4 << 30
    rows = {'plain': cuda_counts.Plain(*network).step()}
    for planner in ('swap-all', 'superneurons'):
        found = cuda_counts.session(*network, limit_bytes, planner)
        rows[f'guided by {planner}'] = found['rows'][-1]
    for row in rows.values():
        del row['issuing_seconds']
    print(MARK + json.dumps(rows))


PARTS: dict[str, Part] = {
    'plans': plans,
    'scenarios': scenarios,
    'fuzz': fuzz,
    'cuda': cuda,
}


def digest(value: object) -> str:
    """Of what it prints as."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def take(part: str) -> dict[str, Figures]:
    """The figures of a part by case, as a file has them."""
    found: dict[str, Figures] = json.loads(json.dumps(dict(PARTS[part]())))
    print(f'{part}: {len(found)} cases', flush=True)
    return found


def agreed(one: dict[str, Figures], two: dict[str, Figures]) -> dict[str, Figures]:
    """The figures that two runs have in common."""
    return {
        case: {
            name: value
            for name, value in figures.items()
            if two[case].get(name) == value
        }
        for case, figures in one.items()
    }


def differences(frozen: dict[str, Figures], found: dict[str, Figures]) -> list[str]:
    """One line for each frozen figure that is another one now."""
    lines = [f'{case}: is new' for case in found.keys() - frozen.keys()]
    for case, figures in frozen.items():
        if case not in found:
            lines.append(f'{case}: is gone')
            continue
        for name, value in figures.items():
            now = found[case].get(name)
            if now != value:
                lines.append(f'{case}: {name} was {value}, is {now}')
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--freeze', action='store_true', help='from now on it is so')
    parser.add_argument('--only', nargs='+', choices=PARTS, default=list(PARTS))


def main(options: argparse.Namespace) -> int:
    parts = [part for part in options.only if part != 'cuda' or EMULATOR.exists()]
    for part in set(options.only) - set(parts):
        print(
            f'{part}: NOT COMPARED, there is no {EMULATOR.name} of make cuda-emulator'
        )
    if options.freeze:
        frozen = saving.read(NAME)['parts'] if os.path.exists(FILE) else {}
        for part in parts:
            one, two = take(part), take(part)
            frozen[part] = kept = agreed(one, two)
            dropped = sum(len(one[case]) - len(kept[case]) for case in one)
            print(f'{part}: {dropped} figures depend on the machine')
        saving.save(NAME, {'parts': frozen})
        return 0
    frozen = saving.read(NAME)['parts']
    lines = [
        f'{part}: {line}'
        for part in parts
        for line in differences(frozen[part], take(part))
    ]
    print('\n'.join(lines) or 'Nothing has changed.')
    return int(bool(lines))
