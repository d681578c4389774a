"""Making forward's outputs again: forward, whole replay and pass.

Each form is run in turns with memory walked through before it, so that it
finds its inputs as it would in backward; medians are reported. The memory is
the highest load above the first moment, the output included.

    python -m benchmarks run recompute [--repeats 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import common

# isort: split
import chainer
import chainer.functions as F
import numpy as np

from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.recompute import fused_replays
from chainer_hybridmem.training.recording.trials import Walker

FORMS = ('forward', 'replay', 'pass')


def picture(*shape: int) -> Any:
    """A map as a convolution on the host leaves it: channels innermost."""
    n, c, h, w = shape
    x = np.random.randn(n, h, w, c).astype(np.float32)
    return chainer.Variable(x.transpose(0, 3, 1, 2))


def normalised(x: Any, kept: list[Any]) -> Any:
    channels = x.shape[1]
    gamma, beta = (chainer.Variable(np.ones(channels, 'f')) for _ in range(2))
    kept += [x, gamma, beta]
    mean, var = np.zeros(channels, 'f'), np.ones(channels, 'f')
    return F.batch_normalization(x, gamma, beta, running_mean=mean, running_var=var)


def cases() -> dict[str, Callable[[list[Any]], Any]]:
    """Functions that build a small graph and return its output variable."""

    def one(make: Callable[[Any], Any], *shape: int) -> Callable[[list[Any]], Any]:
        def build(kept: list[Any]) -> Any:
            kept.append(picture(*shape))
            return make(kept[-1])

        return build

    def chain(end: str, *shape: int) -> Callable[[list[Any]], Any]:
        def build(kept: list[Any]) -> Any:
            y = normalised(picture(*shape), kept)
            if 'add' in end:
                kept.append(picture(*shape))
                y = y + kept[-1]
            return F.relu(y) if 'relu' in end else y

        return build

    result = {}
    for shape in ((8, 64, 56, 56), (8, 256, 56, 56), (8, 512, 28, 28)):
        text = 'x'.join(map(str, shape))
        result[f'BN {text}'] = chain('', *shape)
        result[f'BN, ReLU {text}'] = chain('relu', *shape)
        result[f'BN, add, ReLU {text}'] = chain('add relu', *shape)
    result['max pooling 3/2 8x64x112x112'] = one(
        lambda x: F.max_pooling_2d(x, 3, 2), 8, 64, 112, 112
    )
    result['max pooling 3/1 8x192x28x28'] = one(
        lambda x: F.max_pooling_2d(x, 3, 1, 1), 8, 192, 28, 28
    )
    result['dropout 8x256x56x56'] = one(lambda x: F.dropout(x), 8, 256, 56, 56)
    result['ReLU 8x256x56x56'] = one(F.relu, 8, 256, 56, 56)
    result['LRN 8x64x56x56'] = one(F.local_response_normalization, 8, 64, 56, 56)
    return result


def chain_of(y: Any) -> list[Any]:
    """The functions behind an output, in the order they ran."""
    functions = [y.creator_node]
    while True:
        more = [node.creator_node for node in functions[0].inputs if node.creator_node]
        if not more:
            return functions
        functions.insert(0, more[0])


def replay_all(functions: list[Any], before: list[Any], device: Any) -> Any:
    """One whole forward after the other, as long chains were replayed before."""
    made: dict[Any, Any] = {}
    for function, copy in zip(functions, before, strict=True):
        inputs = tuple(
            made[n] if n in made else graph.node_array(n) for n in function.inputs
        )
        names = ('mask',) if hasattr(function, 'mask') else ()
        outputs, _ = graph.replay(copy, function, names, inputs, device)
        made = {function.outputs[0](): outputs[0]}
        del inputs
    return outputs


class Forms:
    """The three ways to make one output, and what they cost."""

    def __init__(self, build: Callable[[list[Any]], Any], device: Any) -> None:
        self.device, self.build = device, build
        self.kept: list[Any] = []
        self.before: dict[int, Any] = {}
        with _Copies(self.before):
            self.y = build(self.kept)
        self.functions = chain_of(self.y)
        self.copies = [self.before[id(f)] for f in self.functions]
        covers = fused_replays.find_candidates(self.functions[-1])
        self.covers = covers[0] if covers else None

    def run(self, form: str) -> Any:
        if form == 'pass':
            return fused_replays.run(self.covers or (), graph.node_array)
        if form == 'replay':
            return replay_all(self.functions, self.copies, self.device)
        made: dict[Any, Any] = {}
        for function, copy in zip(self.functions, self.copies, strict=True):
            inputs = tuple(
                made[n] if n in made else graph.node_array(n) for n in function.inputs
            )
            outputs = copy.copied().forward(inputs)
            made = {function.outputs[0](): outputs[0]}
        return outputs

    def exact(self) -> bool:
        again = self.run('pass')[0] if self.covers else self.run('replay')
        same = again[0].strides == self.y.array.strides
        return same and bool(self.device.arrays.same_bits(again[0], self.y.array))


class _Copies(chainer.FunctionHook):
    """Copies functions as they are before their forward."""

    name = 'copies'

    def __init__(self, copies: dict[int, Any]) -> None:
        self.copies = copies

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        self.copies[id(function)] = graph.pristine(function)


def measure(name: str, build: Any, device: Any, repeats: int) -> dict[str, Any]:
    forms = Forms(build, device)
    walker = Walker(device, timed=True)
    names = [f for f in FORMS if f != 'pass' or forms.covers]
    row: dict[str, Any] = {'case': name, 'exact': forms.exact()}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form in names:
            walker.walk(2**25)
            device.memory.reset_window()
            load = device.memory.used_bytes
            start = time.perf_counter()
            result = forms.run(form)
            seconds[form].append(time.perf_counter() - start)
            row[f'{form}_peak_bytes'] = device.memory.window_peak_bytes - load
            del result
    for form in FORMS:
        values = seconds[form] or seconds['replay']
        row[f'{form}_seconds'] = statistics.median(values)
        row.setdefault(f'{form}_peak_bytes', row['replay_peak_bytes'])
    row['has_pass'] = forms.covers is not None
    row['ratio'] = row['replay_seconds'] / row['pass_seconds']
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--repeats', type=int, default=7)


def main(options: argparse.Namespace) -> int:
    device = open_device('cpu', 2**40)
    device.memory.install(lambda missing: None)
    rows = []
    try:
        for name, build in cases().items():
            rows.append(measure(name, build, device, options.repeats))
    finally:
        device.memory.uninstall()
    milliseconds: Callable[[float], str] = lambda s: f'{s * 1e3:.2f} ms'  # noqa: E731
    mebibytes: Callable[[float], str] = lambda b: f'{b / 2**20:.1f} MiB'  # noqa: E731
    print(
        common.table(
            rows,
            {
                'case': str,
                'exact': str,
                'forward_seconds': milliseconds,
                'replay_seconds': milliseconds,
                'pass_seconds': milliseconds,
                'ratio': '{:.1f}'.format,
                'replay_peak_bytes': mebibytes,
                'pass_peak_bytes': mebibytes,
            },
        )
    )
    common.save('recompute', {'rows': rows})
    return 0
