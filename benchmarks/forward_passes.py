"""Forward passes without backward in their arena: peak of the process, bits, seconds.

    python -m benchmarks run forward_passes [--batchsize N] [--arch NAME ...]

Each network runs in two processes of its own, by plain Chainer and with
``optimize_inference``. From the sixth pass on, the peak of the resident set is
compared with what the process has held before the network was made, and with the
layout. With CuPy (``--device cuda``, also on the emulator with ``EMU_IDLE=1``, where
kernels do nothing) the peak is what the driver has given. Appends to
``forward_passes.json`` by device.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

import chainer_hybridmem as hybridmem
from benchmarks import catalogue, common, saving
from benchmarks.arena import resident

# isort: split
import chainer

from chainer_hybridmem import architectures

NETWORKS = ('alexnet', 'googlenet', 'resnet50', 'vgg16')
WAYS = ('plain', 'arena')
LIMIT = '16GiB'
BEFORE, COUNTED = 5, 3  # passes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--arch', nargs='+', choices=NETWORKS, default=NETWORKS)
    parser.add_argument('--batchsize', type=int, default=50)
    parser.add_argument('--device', choices=('host', 'cuda'), default='host')
    parser.add_argument('--child', choices=WAYS, help=argparse.SUPPRESS)


class HostPeak:
    """The peak of the resident set above what there was at the beginning."""

    def __init__(self) -> None:
        np.dot(np.ones((3000, 3000), np.float32), np.ones((3000, 3000), np.float32))
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = resident('VmRSS')

    def begin(self) -> None:
        """A new peak."""
        with open('/proc/self/clear_refs', 'w', encoding='ascii') as file:
            file.write('5')

    def peak_bytes(self) -> int:
        """Since :meth:`begin`."""
        return resident('VmHWM') - self._before


class CudaPeak:
    """What the emulated driver has given at most."""

    def begin(self) -> None:
        """A new peak; what no array uses goes back first."""
        from tests.cuda_emulator import control

        control.take_device_peak()

    def peak_bytes(self) -> int:
        """Since :meth:`begin`."""
        from tests.cuda_emulator import control

        return int(control.take_device_peak())


def warm_up(options: argparse.Namespace) -> None:
    """Loads what is loaded once: libraries, compiled code."""
    model = architectures.make('alexnet')
    pictures, labels = np.zeros((1, 3, 67, 67), np.float32), np.zeros(1, np.int32)
    with contextlib.ExitStack() as stack:
        if options.child == 'arena':
            stack.enter_context(hybridmem.optimize_inference(model, LIMIT))
        stack.enter_context(chainer.using_config('train', False))
        stack.enter_context(chainer.no_backprop_mode())
        for _ in range(BEFORE + 1):
            model(pictures, labels)


def child(options: argparse.Namespace) -> int:
    """One network in this process; prints a line of JSON."""
    (arch,) = options.arch
    warm_up(options)
    peak = HostPeak() if options.device == 'host' else CudaPeak()
    np.random.seed(0)
    model = architectures.make(arch)
    size = architectures.insize(arch)
    shape = options.batchsize, 3, size, size
    pictures = np.random.RandomState(1).rand(*shape).astype(np.float32)
    labels = np.zeros(options.batchsize, np.int32)
    if options.device == 'cuda':
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            model(pictures[:1], labels[:1])
        model.to_device('@cupy:0')
        pictures, labels = chainer.get_device('@cupy:0').send((pictures, labels))
    ours = options.child == 'arena'
    session = hybridmem.optimize_inference(model, LIMIT) if ours else None
    seconds, result = [], None
    with session or contextlib.nullcontext():
        for i in range(BEFORE + COUNTED):
            if i == BEFORE:
                peak.begin()
            start = time.perf_counter()
            with chainer.using_config('train', False), chainer.no_backprop_mode():
                result = model(pictures, labels)
            if options.device == 'cuda':
                chainer.backends.cuda.cupy.cuda.Device().synchronize()
            seconds.append(time.perf_counter() - start)
        row = {'process_bytes': peak.peak_bytes()}
        figures = session.statistics() if session else {}
    bits = chainer.get_device('@numpy').send(result.array).tobytes()
    row |= {
        'layout_bytes': figures.get('arena_bytes', 0) + figures.get('side_bytes', 0),
        **{name: figures.get(name, 0) for name in ('arena_bytes', 'placed', 'missed')},
        'digest': hashlib.sha256(bits).hexdigest(),
        'seconds': statistics.median(seconds[BEFORE:]),
    }
    print(json.dumps(row))
    return 0


def run(arch: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One child."""
    command = [*catalogue.command('forward_passes'), '--child', way, '--arch', arch]
    command += ['--batchsize', str(options.batchsize), '--device', options.device]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return row


def main(options: argparse.Namespace) -> int:
    """Runs every network both ways and saves the figures."""
    if options.child:
        return child(options)
    if options.device == 'cuda' and os.environ.get('EMU_IDLE') != '1':
        raise SystemExit('what the driver gives is counted on the emulator: EMU_IDLE=1')
    try:
        rows = saving.read('forward_passes')['rows']
    except FileNotFoundError:
        rows = []
    for arch in options.arch:
        found = {way: run(arch, way, options) for way in WAYS}
        key = {'device': options.device, 'network': f'{arch} b{options.batchsize}'}
        row = {**key, **found}
        row['equal'] = len({found[way]['digest'] for way in WAYS}) == 1
        rows = [other for other in rows if not key.items() <= other.items()]
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        common.save('forward_passes', {'rows': rows})
    return 0
