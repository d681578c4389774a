"""Trains one program plain and under sessions; started by run.py.

    python -m benchmarks.programs.worker SOURCE NAME ITERATIONS ROUNDS LIMITS OUTPUT

LIMITS is JSON: bytes by name, or null to find them. OUTPUT gets the rows as JSON.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import sys
import time
import warnings
from typing import Any

import chainer_hybridmem as hybridmem

# isort: split
from benchmarks.programs import models, programs
from chainer_hybridmem.training.chainer_access.owners import permanent_arrays
from chainer_hybridmem.training.devices.host.device import HostDevice

SHARES = {'75 %': 0.75, '60 %': 0.6}  # of what can move, above the smallest limit
ROOMY = '200 %'  # of the plain peak
PARTS = 16  # the smallest limit is found to a 16th of what is not permanent
COMPARED = 8  # iterations at the start, and at the end, at most
MOST_MESSAGE = 300  # characters of an error


class Trained:
    """What one run has given."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.digest = ''
        self.figures: dict[str, Any] = {}

    def train(self, program: models.Program, count: int) -> None:
        """Iterations, each with its seconds."""
        for i in range(count):
            cpu, wall = time.process_time(), time.perf_counter()
            self.losses.append(program.step(i))
            self.cpu.append(time.process_time() - cpu)
            self.wall.append(time.perf_counter() - wall)

    def finish(self, program: models.Program) -> None:
        """Takes the bits of all parameters."""
        digest = hashlib.sha256()
        for link in program.links:
            for name, parameter in sorted(link.namedparams()):
                digest.update(name.encode())
                digest.update(parameter.array.tobytes())
        self.digest = digest.hexdigest()


def run(source: str, name: str, count: int, limit: int | None) -> Trained:
    """One run, plain without a limit."""
    gc.collect()
    program, trained = programs.make(name, source, count), Trained()
    if limit is None:
        trained.train(program, count)
    else:
        with hybridmem.optimize(program.model, limit) as session:
            trained.train(program, count)
        trained.figures = session.statistics()
    trained.finish(program)
    return trained


def peaks(source: str, name: str, count: int) -> tuple[list[int], int]:
    """Plain Chainer's peak of each iteration, and what is permanent; in bytes."""
    program = programs.make(name, source, count)
    device = HostDevice(1 << 50)
    found = []
    permanent = 0
    device.memory.install(lambda missing: None)
    try:
        for link in program.links:
            device.memory.adopt(array for _, array in permanent_arrays(link))
        for i in range(count):
            device.memory.reset_peak()
            program.step(i)
            found.append(device.memory.peak_bytes)
        for link in program.links:
            arrays = [array for _, array in permanent_arrays(link)]
            permanent += device.arrays.distinct_bytes(arrays)
    finally:
        device.memory.uninstall()
        device.close()
    return found, permanent


def fits(source: str, name: str, count: int, limit: int, largest: int) -> bool:
    """Whether the largest iteration trains under a limit, three times."""
    program = programs.make(name, source, count)
    numbers = [0, largest, largest, largest]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with hybridmem.optimize(program.model, limit):
                for i in numbers:
                    program.step(i)
    except (MemoryError, hybridmem.HybridMemoryError):
        return False
    return True


def find_limits(source: str, name: str, count: int) -> dict[str, int]:
    """Limits by name, and what they are made of; in bytes."""
    found, permanent = peaks(source, name, count)
    peak = max(found)
    largest = found.index(peak)
    low, high = 0, PARTS  # does not fit, fits
    while high - low > 1:
        part = (low + high) // 2
        limit = permanent + (peak - permanent) * part // PARTS
        if fits(source, name, count, limit, largest):
            high = part
        else:
            low = part
    smallest = permanent + (peak - permanent) * high // PARTS
    return {
        'permanent': permanent,
        'smallest': smallest,
        'peak': peak,
        ROOMY: 2 * peak,
        **{n: smallest + int((peak - smallest) * s) for n, s in SHARES.items()},
    }


def ratio(ours: list[float], plain: list[list[float]], part: slice) -> float:
    """Median over iterations: seconds of each over what it takes plain Chainer."""
    columns = [statistics.median(column) for column in zip(*plain, strict=True)]
    pairs = zip(ours[part], columns[part], strict=True)
    return statistics.median(a / b for a, b in pairs)


def compare(
    ours: Trained, plain: list[Trained], count: int, at_limit: int
) -> dict[str, Any]:
    """One row: a session beside plain Chainer."""
    cpu, wall = [p.cpu for p in plain], [p.wall for p in plain]
    compared = min(COMPARED, count // 2)
    first, last = slice(0, compared), slice(count - compared, count)
    figures = ours.figures
    medians = [statistics.median(column) for column in zip(*cpu, strict=True)]
    return {
        'limit_bytes': at_limit,
        'equal': ours.losses == plain[0].losses and ours.digest == plain[0].digest,
        'guided': figures['guided_iterations'] / count,
        'cpu_first': ratio(ours.cpu, cpu, first),
        'cpu_last': ratio(ours.cpu, cpu, last),
        'cpu_all': sum(ours.cpu) / sum(medians),
        'wall_last': ratio(ours.wall, wall, last),
        'peak_bytes': figures['peak_bytes'],
        'plain_cpu_seconds': statistics.median(map(statistics.median, cpu)),
        'error': None,
    }


def main() -> int:
    source, name, count, rounds, given, output = sys.argv[1:]
    iterations = int(count)
    limits = json.loads(given) or find_limits(source, name, iterations)
    names = [ROOMY, *SHARES]
    run(source, name, iterations, None)  # warms up
    plain: list[Trained] = []
    sessions: dict[str, list[Trained]] = {n: [] for n in names}
    errors: dict[str, str] = {}
    for _ in range(int(rounds)):
        for at in names:
            plain.append(run(source, name, iterations, None))
            if at in errors:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter('ignore')
                    trained = run(source, name, iterations, limits[at])
                sessions[at].append(trained)
            except Exception as error:  # a row, whatever it is
                errors[at] = f'{type(error).__name__}: {error}'[:MOST_MESSAGE]
    plain.append(run(source, name, iterations, None))
    rows = []
    for at in names:
        row: dict[str, Any] = {'program': name, 'limit': at, **empty()}
        if at in errors:
            row |= {'limit_bytes': limits[at], 'error': errors[at]}
        else:
            found = [compare(s, plain, iterations, limits[at]) for s in sessions[at]]
            row |= middle(found)
        rows.append(row)
    if os.environ.get('PMI_RANK', '0') == '0':  # of several processes, one tells
        with open(output, 'w', encoding='utf-8') as file:
            json.dump({'limits': limits, 'rows': rows}, file)
    return 0


def empty() -> dict[str, Any]:
    """The columns of a row, not measured."""
    names = ('limit_bytes', 'equal', 'guided', 'cpu_first', 'cpu_last', 'cpu_all',
             'wall_last', 'peak_bytes', 'plain_cpu_seconds', 'error')  # fmt: skip
    return dict.fromkeys(names)


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds; equal only if all are, and the largest peak."""
    result = dict(found[0])
    for name in result:
        values = [row[name] for row in found]
        if name == 'equal':
            result[name] = all(values)
        elif name == 'peak_bytes':
            result[name] = max(values)
        elif name != 'error':
            result[name] = statistics.median(values)
    return result


if __name__ == '__main__':
    raise SystemExit(main())
