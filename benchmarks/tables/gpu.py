"""What has been measured on a real GPU."""

from __future__ import annotations

import os

from benchmarks import saving
from benchmarks.gpu import summarize
from benchmarks.tables.form import (
    Body,
    Section,
    gigabytes,
    overhead,
    percent,
    ratio,
    seconds,
    table,
    yes,
)

PLANNERS = ('swap-all', 'pooch', 'hybrid')


def methods(body: Body) -> str:
    """Returns time over in-core training of each network and planner."""
    head = ['network', 'in-core', 'takes', 'limit']
    head += [f'`{planner}`' for planner in PLANNERS]
    head += ["`hybrid`'s footprint", 'same losses']
    lines = []
    for arch, rows in _networks(body).items():
        plain = rows['in-core']
        limited = [rows[planner] for planner in PLANNERS]
        hybrid = rows['hybrid']
        lines.append(
            [
                f'{arch} b{plain["batchsize"]}',
                f'{seconds(plain["iteration_seconds"])} s',
                gigabytes(plain['footprint_bytes']),
                gigabytes(hybrid['limit_bytes']),
                *(
                    overhead(row['iteration_seconds'] / plain['iteration_seconds'] - 1)
                    for row in limited
                ),
                gigabytes(hybrid['footprint_bytes']),
                yes(all(row['same_losses'] for row in limited)),
            ]
        )
    return table(head, lines)


def _networks(body: Body) -> dict[str, dict[str, Body]]:
    found: dict[str, dict[str, Body]] = {}
    for row in _in_float32(body['rows']):
        found.setdefault(row['arch'], {})[row['planner']] = row
    return found


def _in_float32(rows: list[Body]) -> list[Body]:
    return [row for row in rows if row.get('arithmetic', 'float32') == 'float32']


def methods_says(methods: Body, smoke: Body, torch: Body, tests: Body) -> str:
    """Returns what the measurements on a GPU come to."""
    limited = [row for row in methods['rows'] if row['planner'] != 'in-core']
    errors = [
        abs(row['predicted_seconds'] / row['iteration_seconds'] - 1) for row in limited
    ]
    exact = sum(row['peak_bytes'] == row['predicted_peak_bytes'] for row in limited)
    pairs = _in_float32(torch['ratios'])
    ways = {row['theirs']: row for row in pairs if row['ours'] == 'hybrid'}
    in_core = next(row for row in pairs if row['ours'] == 'in-core')
    bits = [row['same_bits'] for row in smoke['rows'] if 'same_bits' in row]
    gpu = methods['environment']['gpu'].split(',')[0]
    return (
        f'On an {gpu}, in one row per planner and network, forecasts are off by '
        f'{percent(max(errors))} at worst, and {exact} of {len(limited)} peaks are '
        'those predicted, to the byte. A residual network, trained again, in-core and '
        f'in half its memory, has the bits of plain Chainer in {sum(bits)} of '
        f'{len(bits)} trainings. Of the GPU tests {tests["passed"]} pass, failures: '
        f'{len(tests["bad"])}. For the same ResNet-50 in the same memory PyTorch '
        f'pays {overhead(ways["checkpoint"]["their_overhead"])} with `checkpoint` and '
        f'{overhead(ways["save_on_cpu"]["their_overhead"])} with `save_on_cpu`. '
        + _beside_torch(1 / in_core['speed_ratio'], methods)
    )


def _beside_torch(times: float, methods: Body) -> str:
    """What the ratio of the times in-core, ours over theirs, comes from."""
    if any(row.get('cudnn') for row in methods['rows']):
        return (
            f'In-core and with cuDNN our training takes {ratio(times)} the time of '
            "PyTorch's."
        )
    return (
        'But that run had no cuDNN: our in-core training took '
        f"{ratio(times, 1)} the time of PyTorch's, which makes copies easy to hide."
    )


# Of results that a later run on a GPU brings.
_LATER = (
    Section(
        ('gpu_cudnn',),
        'cuDNN on a GPU',
        """In-core training by plain Chainer: *tuned* convolutions measure their
        algorithms within 256 MiB of workspace, those of *autotune* and *default* have
        the 8 MiB that Chainer allows, and *refused* is how many would have taken a
        faster one with more. Then float32 and TF32 beside float64, and each function
        beside the same one without cuDNN in float64: the largest difference of
        outputs, gradients and statistics, relative to the largest value.""",
        summarize.cudnn,
    ),
    Section(
        ('gpu_torch_compile',),
        'PyTorch, compiled, on the same GPU',
        """*Budget* lets the compiler keep half of the bytes of feature maps.""",
        summarize.rivals,
    ),
)
SECTIONS = (
    Section(
        ('gpu_methods',),
        'Planners on a GPU, measured beside predicted',
        """Pictures of 224x224; *in-core* is plain Chainer on the whole GPU, in CuPy's
        pool. *Forecast* is the prediction before the measured iterations, *simulator
        error* compares a simulation with the operation times of the very iterations
        that were measured. The columns of AlexNet's second convolution do not fit the
        limit: it runs in parts, whose columns one kernel makes, and that is faster
        than plain Chainer's way.""",
        summarize.methods,
    ),
    Section(
        ('gpu_smoke',),
        'A loop in half its memory on a GPU',
        """An updater's loop, which waits for nothing; losses, parameters, gradients,
        optimizer states and statistics after all iterations beside plain Chainer's.""",
        summarize.smoke,
    ),
    Section(
        ('gpu_exactness',),
        'Small networks on a GPU, bit by bit',
        """Backward of an embedding adds atomically: plain Chainer itself gives other
        bits each time.""",
        summarize.exactness,
    ),
    Section(
        ('gpu_small',),
        'A program of small functions on a GPU',
        """A language model: two layers of LSTM, 1,500 units, 128 sequences of 35 words.
        Python sets the pace, and what a session does in Python shows. *Issuing* is the
        time until the program would wait for the GPU.""",
        summarize.small,
    ),
    Section(
        ('gpu_arena',),
        'The arena, as the driver sees it',
        """ResNet-50 without a limit, and in half its peak with the arena and without.
        Without it single operations take longer, presumably because the pool gives
        blocks back to the driver in the middle of an iteration.""",
        summarize.arena,
    ),
    Section(
        ('gpu_torch',),
        'PyTorch in the same memory on the same GPU',
        """*Over in-core* is what each side pays for less memory, in its own time.""",
        summarize.rivals,
    ),
    Section(
        ('gpu_tests',),
        'Tests on a real GPU',
        """`pytest -m gpu` in eight processes. What is skipped is about the emulator
        itself, cuDNN or NCCL.""",
        summarize.tests,
    ),
    *(
        section
        for section in _LATER
        if all(os.path.exists(saving.path(name, 'json')) for name in section.names)
    ),
)
