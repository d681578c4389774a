"""What a session costs in calls of CUDA, counted where kernels are skipped.

Runs on the emulator (docs/internals/cuda_emulator.md) with ``EMU_IDLE=1``: kernels and
copies do nothing, so that a large network takes seconds, and what Python issues is
what remains.
Plain Chainer and a session take the same steps, as ``StandardUpdater`` does, in two
processes and in turns: what slows the machine slows both, so that their ratio stays.

    make cuda-emulator
    EMU_IDLE=1 EMU_TOTAL=80 EMU_GRANULE=2097152 \
        .venv/bin/python tests/cuda_emulator/run.py .cuda-emulator/14 \
        .venv/bin/python -m benchmarks run cuda_counts
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import time
import types
from typing import Any

import chainer_hybridmem as hybridmem
from benchmarks import common
from chainer_hybridmem.units import parse_bytes

GUIDED = 40
KEPT = (
    *('launch', 'malloc', 'free', 'host_malloc', 'host_free', 'synchronize', 'copy'),
    *('event_create', 'generator_create'),
)


class Counted:
    """Steps with what each of them has called."""

    def __init__(self, arch: str, batchsize: int) -> None:
        self.training = common.Training(arch, batchsize, gpu=True)
        self.rows: list[dict[str, Any]] = []

    def step(self, state: str) -> dict[str, Any]:
        """One iteration that waits for nothing."""
        from tests.cuda_emulator import control

        training = self.training
        before, synchronous = control.counters(), control.synchronous_bytes()
        began = time.process_time()
        loss = training.model(*training.batch)
        training.model.cleargrads()
        loss.backward()
        del loss
        training.optimizer.update()
        seconds = time.process_time() - began
        after = control.counters()
        row = {'state': state, 'issuing_seconds': seconds}
        row |= {name: after[name] - before[name] for name in KEPT}
        row['synchronous_bytes'] = control.synchronous_bytes() - synchronous
        self.rows.append(row)
        return row

    def count_bytecodes(self) -> int:
        """Bytecodes of Python in one more step: the same on however busy a machine."""
        count = 0

        def see(frame: types.FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            count += event == 'opcode'
            return see

        former = sys.gettrace()
        sys.settrace(see)
        try:
            self.step('traced')
        finally:
            sys.settrace(former)
        del self.rows[-1]  # its time is that of the tracer
        return count


class Plain:
    """Plain Chainer in a process of its own, which takes a step when it is asked to.

    Made before this process has a context of CUDA, which no fork can use.
    """

    def __init__(self, arch: str, batchsize: int) -> None:
        context = multiprocessing.get_context('fork')
        self._answers, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, arch, batchsize), daemon=True
        )
        self._process.start()
        other.close()

    def step(self) -> dict[str, Any]:
        """A step; the first ones have made kernels and optimizer states."""
        self._answers.send('step')
        row: dict[str, Any] = self._answers.recv()
        return row

    def count_bytecodes(self) -> int:
        """Those of one more step."""
        self._answers.send('bytecodes')
        count: int = self._answers.recv()
        return count


def _serve(
    questions: multiprocessing.connection.Connection, arch: str, batchsize: int
) -> None:
    counted = Counted(arch, batchsize)
    for _ in range(2):
        counted.step('plain')
    while True:
        try:
            question = questions.recv()
        except EOFError:
            return
        if question == 'step':
            questions.send(counted.step('plain'))
        else:
            questions.send(counted.count_bytecodes())


def session(
    arch: str, batchsize: int, limit: int, planner: str, plain: Plain | None = None
) -> dict[str, Any]:
    """Steps from the first to some guided ones, in turns with plain Chainer's."""
    counted = Counted(arch, batchsize)
    beside = []
    with hybridmem.optimize(counted.training.model, limit, planner=planner) as run:
        while not run.settled and len(counted.rows) < 30:
            counted.step(run.statistics()['state'])
        for _ in range(GUIDED):
            counted.step('guided')
            if plain is not None:
                beside.append(plain.step()['issuing_seconds'])
        bytecodes = counted.count_bytecodes()
        figures = run.statistics()
    names = ('keep', 'swap', 'recompute', 'footprint_bytes', 'warm_up_iterations')
    return {
        'planner': planner,
        'rows': counted.rows,
        'plain_seconds': beside,
        'bytecodes': bytecodes,
        'figures': {name: figures.get(name) for name in names},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', default='resnet50')
    parser.add_argument('--batchsize', type=int, default=256)
    parser.add_argument('--memory-limit', default='16GiB')
    parser.add_argument('--planner', nargs='+', default=['swap-all', 'hybrid'])


def main(options: argparse.Namespace) -> int:
    if 'EMU_LIBRARY' not in os.environ or os.environ.get('EMU_IDLE') != '1':
        raise SystemExit('counts need the emulator and EMU_IDLE=1; see the first lines')
    limit = parse_bytes(options.memory_limit)
    plain = Plain(options.arch, options.batchsize)
    bytecodes = plain.count_bytecodes()
    body: dict[str, Any] = {'network': f'{options.arch} b{options.batchsize}'}
    body |= {'limit_bytes': limit, 'plain': plain.step(), 'sessions': []}
    for planner in options.planner:
        gc.collect()
        found = session(options.arch, options.batchsize, limit, planner, plain)
        body['sessions'].append(found)
        add_ratios(found, found.pop('plain_seconds'), found.pop('bytecodes'), bytecodes)
        print(
            f'{planner} {found["figures"]}: {found["guided_over_plain"]:.2f} times the '
            f'time of a plain step, {found["bytecodes_over_plain"]:.3f} its bytecodes'
        )
    print(show(body))
    common.save('cuda_counts', body)
    return 0


def add_ratios(
    found: dict[str, Any], beside: list[float], bytecodes: int, plain_bytecodes: int
) -> None:
    """What guided steps of a session take over the plain ones beside them."""
    guided = [row['issuing_seconds'] for row in found['rows'][-GUIDED:]]
    ratios = [one / plain for one, plain in zip(guided, beside, strict=True)]
    found['plain_seconds'] = statistics.median(beside)
    found['guided_seconds'] = statistics.median(guided)
    found['guided_over_plain'] = statistics.median(ratios)
    found['quartiles_over_plain'] = statistics.quantiles(ratios)[::2]
    before = found['rows'][:-GUIDED]
    found['until_guided_over_plain'] = (
        sum(row['issuing_seconds'] for row in before) / found['plain_seconds']
    )
    found['bytecodes_over_plain'] = bytecodes / plain_bytecodes
    found['rows'] = [*before, found['rows'][-1]]  # guided ones call the same


def show(body: dict[str, Any]) -> str:
    """Every step of the sessions below one of plain Chainer."""
    rows = [{'planner': 'none', **body['plain']}]
    for found in body['sessions']:
        rows += [{'planner': found['planner'], **row} for row in found['rows']]
    columns: dict[str, Any] = {'planner': str, 'state': str}
    columns |= {'issuing_seconds': '{:.2f}'.format}
    columns |= dict.fromkeys((*KEPT, 'synchronous_bytes'), '{:,}'.format)
    return common.table(rows, columns)
