"""How evenly processes share a throttled link, and how exactly it keeps its rate.

    python -m benchmarks run shared_link [--repeats 5] [--mib 64]

Processes with devices that give the same ``shared_link`` copy maps of ``MAP_BYTES`` to
the store at once, as many bytes each. For 1, 2 and 4 of them: the rate of all together,
from the first beginning to the last end, and each one's share of what the link carries
until the first of them ends. ``both ways`` copies as many bytes back meanwhile, whose
direction has a rate of its own. ``own link`` is one process without ``shared_link``.
The processor's time is that of all processes while they copy, per second, beside that
of the same copies without a throttle. Medians, and the worst of all repeats. Writes
JSON to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

from benchmarks import saving
from chainer_hybridmem.training.devices.host.device import HostDevice
from chainer_hybridmem.units import parse_bandwidth

Row = dict[str, Any]

NAME = f'benchmark-{os.getpid()}'
MAP_BYTES = 4 << 20
RATES = '200MB/s', '1GB/s'
PROCESSES = 1, 2, 4
_WAIT_SECONDS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--mib', type=int, default=64, help='MiB that each one copies')


def main(options: argparse.Namespace) -> int:
    """Measures every case and saves the table."""
    rows = saving.Rows('shared_link', mib=options.mib, repeats=options.repeats)
    maps = (options.mib << 20) // MAP_BYTES
    for rate in RATES:
        for processes, link, both in (
            (1, None, False),
            *((n, NAME, False) for n in PROCESSES),
            *((n, NAME, True) for n in PROCESSES[1:]),
        ):
            rows.add(row := measure(rate, processes, link, both, maps, options.repeats))
            print(row, flush=True)
    return 0


def measure(
    rate: str, processes: int, link: str | None, both: bool, maps: int, repeats: int
) -> Row:
    """One row of the table; the arguments are those of the case."""
    bandwidth = parse_bandwidth(rate)
    context = multiprocessing.get_context('spawn')
    barrier = context.Barrier(processes)
    results = context.Queue()
    case = bandwidth, link, both, maps, repeats
    started = [
        context.Process(target=copy_maps, args=(barrier, results, *case))
        for _ in range(processes)
    ]
    for process in started:
        process.start()
    found = [results.get(timeout=_WAIT_SECONDS) for _ in started]
    for process in started:
        process.join()
    runs = [evaluate(list(run), bandwidth) for run in zip(*found, strict=True)]
    errors = [run['rate_error'] for run in runs]
    return {
        'bandwidth': rate,
        'processes': processes,
        'link': 'own' if link is None else 'shared',
        'both_ways': both,
        'rate_error': statistics.median(errors),
        'worst_rate_error': max(errors, key=abs),
        'least_share': statistics.median(run['least_share'] for run in runs),
        'largest_share': statistics.median(run['largest_share'] for run in runs),
        'worst_share_error': max(run['share_error'] for run in runs),
        'cpu_share': statistics.median(run['cpu_share'] for run in runs),
        'unthrottled_cpu_share': statistics.median(
            run['unthrottled_cpu_share'] for run in runs
        ),
    }


def copy_maps(
    barrier: Any,
    results: Any,
    bandwidth: float,
    link: str | None,
    both: bool,
    maps: int,
    repeats: int,
) -> None:
    """What each process does; its runs go to a queue.

    A run is the ends of its copies out and, with ``both``, of those in, then the
    processor's seconds with and without a throttle. Times are of ``perf_counter``,
    which is the same in all processes; the first one is the beginning.
    """
    limit = 3 * maps * MAP_BYTES
    free = HostDevice(limit)
    slow = HostDevice(limit, bandwidth, shared_link=link)
    runs = []
    for _ in range(repeats):
        barrier.wait(_WAIT_SECONDS)
        unthrottled = copy_once(free, both, maps, barrier)[1]
        ends, throttled = copy_once(slow, both, maps, barrier)
        runs.append((ends, throttled, unthrottled))
    for device in (free, slow):
        device.close()
    results.put(runs)


def copy_once(
    device: HostDevice, both: bool, maps: int, barrier: Any
) -> tuple[list[list[float]], float]:
    """Copies all maps; returns the ends by direction and the processor's seconds."""
    device.memory.install(lambda missing: None)
    lanes = []
    for outward in (True, False)[: 1 + both]:
        roots = [device.memory.allocate(MAP_BYTES) for _ in range(maps)]
        spaces = [device.copies.host_copy(MAP_BYTES) for _ in range(maps)]
        for root, space in zip(roots, spaces, strict=True):
            root[...] = 1
            _, transfer = device.copies.swap_out(root, space)
            device.copies.wait(transfer)
        lanes.append((outward, roots, spaces))
    barrier.wait(_WAIT_SECONDS)
    begin, cpu = time.perf_counter(), time.process_time()
    transfers = [
        [
            device.copies.swap_out(root, space)[1]
            if outward
            else device.copies.swap_in(space, root)
            for root, space in zip(roots, spaces, strict=True)
        ]
        for outward, roots, spaces in lanes
    ]
    for transfer in (t for lane in transfers for t in lane):
        device.copies.wait(transfer)
    seconds = time.process_time() - cpu
    ends = [[begin, *(t.completion.after(0.0)[1] for t in lane)] for lane in transfers]
    for _, _, spaces in lanes:
        for space in spaces:
            space.close()
    device.memory.uninstall()
    return ends, seconds


def evaluate(run: list[Any], bandwidth: float) -> Row:
    """Figures of one run of all processes; of the worse direction."""
    directions = [
        evaluate_lane(list(lane), bandwidth)
        for lane in zip(*(r[0] for r in run), strict=True)
    ]
    worst = max(directions, key=lambda found: abs(found['rate_error']))
    uneven = max(directions, key=lambda found: found['share_error'])
    seconds = max(found['seconds'] for found in directions)
    return {
        'rate_error': worst['rate_error'],
        **{key: uneven[key] for key in ('least_share', 'largest_share', 'share_error')},
        'cpu_share': sum(r[1] for r in run) / seconds,
        'unthrottled_cpu_share': sum(r[2] for r in run) / seconds,
    }


def evaluate_lane(lanes: list[list[float]], bandwidth: float) -> Row:
    """One direction: ``lanes`` are the times of each process."""
    begin, first = min(lane[0] for lane in lanes), min(lane[-1] for lane in lanes)
    end = max(lane[-1] for lane in lanes)
    carried = [carried_until(first, lane) for lane in lanes]
    shares = [nbytes / sum(carried) for nbytes in carried]
    total = sum(len(lane) - 1 for lane in lanes) * MAP_BYTES
    return {
        'seconds': end - begin,
        'rate_error': total / (end - begin) / bandwidth - 1,
        'least_share': min(shares),
        'largest_share': max(shares),
        'share_error': max(abs(share * len(lanes) - 1) for share in shares),
    }


def carried_until(moment: float, times: list[float]) -> float:
    """Bytes that a process has copied; a copy is spread evenly over its time."""
    whole = sum(end <= moment for end in times) - 1
    if whole + 1 == len(times):
        return float(whole * MAP_BYTES)
    start, end = times[whole], times[whole + 1]
    return (whole + (moment - start) / (end - start)) * MAP_BYTES
