"""Trains an architecture on random pictures until an iteration is recorded."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

import chainer
import numpy as np

from chainer_hybridmem import architectures
from chainer_hybridmem.commands import arguments
from chainer_hybridmem.errors import (
    HybridMemoryError,
    OptionError,
    OutOfMemoryError,
    SessionError,
)
from chainer_hybridmem.extras import inference_recorder
from chainer_hybridmem.forecasting.recording_session import (
    AMPLE_BYTES,
    ITERATIONS,
    RecordedError,
    RecordingSession,
    recording_options,
)
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.planning.simulation.problem import with_plain_peak
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.units import format_count

DEVICES = {'cpu': '@numpy', 'cuda': '@cupy:0'}


@dataclasses.dataclass(frozen=True)
class Network:
    """What is trained.

    Attributes:
        arch (str): Name of the architecture, or ``module:Class``.
        batchsize (int): Pictures in one iteration.
        insize (int or None): Their height and width; None for the architecture's.
        n_class (int): Number of classes.
    """

    arch: str
    batchsize: int
    insize: int | None = None
    n_class: int = 1000


@dataclasses.dataclass(frozen=True)
class Memory:
    """What it is trained in.

    Attributes:
        limit_bytes (int): Most bytes on the compute device.
        device (str): ``'cpu'``, ``'cuda'`` or ``'auto'``.
        options (dict): Others of :func:`chainer_hybridmem.optimize`, by name.
        plain_peak_bytes (int or None): What the network needs in-core, if it is known.
    """

    limit_bytes: int
    device: str = 'auto'
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    plain_peak_bytes: int | None = None


def find_memory(
    args: argparse.Namespace, network: Network, progress: TextIO | bool = False
) -> Memory:
    """What a command line says, with the options of ``arguments.add_memory``.

    Args:
        args: The command line.
        network: What is trained. Where the limit is a share, its in-core peak is
            recorded first, in as much memory as it takes.
        progress: Where to tell that.

    Raises:
        HybridMemoryError: If it cannot be recorded.
    """

    def record_peak() -> int:
        ample = Memory(AMPLE_BYTES, args.device)
        recorded = record(
            network, ample, ITERATIONS, progress, parts=False, timed=False
        )
        return recorded.problem.whole_bytes

    limit_bytes, plain_bytes = args.memory_limit.find_bytes(record_peak)
    options = arguments.session_options(args)
    return Memory(limit_bytes, args.device, options, plain_bytes)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded iteration.

    Attributes:
        network (Network): What was trained; its picture size is filled in.
        problem (Problem): Made of the profile.
        reason (str or None): Why no plan fits the limit although the recording did.
    """

    network: Network
    problem: Problem
    reason: str | None = None


class Training(NamedTuple):
    """A model with everything that one iteration needs.

    Attributes:
        model (Chain): Called with a batch, returns the loss.
        optimizer (Optimizer): Has the model as its target.
        examples (tuple of ndarray): Pictures and labels, on the CPU.
    """

    model: Any
    optimizer: Any
    examples: tuple[np.ndarray, ...]

    @property
    def insize(self) -> int:
        """Height and width of the pictures."""
        return int(self.examples[0].shape[-1])

    def step(self) -> Any:
        """Trains one iteration; returns the array of the loss.

        The batch is made anew, as Chainer's updaters do, so that it counts.
        """
        batch = [self.model.xp.array(array) for array in self.examples]
        loss = self.model(*batch)
        _check_loss(loss)
        self.model.cleargrads()
        loss.backward()
        self.optimizer.update()
        return loss.array


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, chainer.Variable):
        raise TypeError(f'a loss is needed, and a {type(loss).__name__} was returned')
    if loss.size != 1:
        raise ValueError(f'a scalar loss is needed, and its shape is {loss.shape}')


def open_session(
    model: chainer.Link,
    memory: Memory,
    progress: TextIO | bool = False,
    parts: bool = True,
    timed: bool = True,
) -> RecordingSession:
    """Makes the session to record with; ``parts`` and ``timed`` as there."""
    options = recording_options(memory.limit_bytes, progress=progress, **memory.options)
    return RecordingSession(model, options, parts, timed)


def record(
    network: Network,
    memory: Memory,
    iterations: int,
    progress: TextIO | bool,
    parts: bool = True,
    timed: bool = True,
    began: Callable[[int], None] | None = None,
) -> Recorded:
    """Trains until an iteration has been recorded.

    Args:
        network: What to train.
        memory: What to train it in.
        iterations: Give up after these many.
        progress: Where to tell what happens.
        parts: As for :class:`RecordingSession`.
        timed: Likewise.
        began: Takes the number of each iteration before it, from 1 on.

    Raises:
        UnknownNameError: If there is no such architecture.
        OutOfMemoryError: If even recording does not fit the limit.
        SessionError: If nothing has been recorded after all iterations.
        HybridMemoryError: If the network cannot be trained on such pictures.
    """
    device = choose_device(memory.device)
    with explaining(network):
        training = prepare(network, device)
    network = dataclasses.replace(network, insize=training.insize)
    with explaining(network):
        session = open_session(training.model, memory, progress, parts, timed)
        session.stops = not timed
        recorded = _run(network, training, session, iterations, began)
    if memory.plain_peak_bytes is None:
        return recorded
    problem = with_plain_peak(recorded.problem, memory.plain_peak_bytes)
    return dataclasses.replace(recorded, problem=problem)


def record_inference(network: Network, device: chainer.backend.Device) -> Profile:
    """Records one forward pass without backward on a batch of random pictures.

    Raises:
        UnknownNameError: If there is no such architecture.
        HybridMemoryError: If the network cannot be run on such pictures.
    """
    with explaining(network, 'run'):
        training = prepare(network, device)
    network, model = (
        dataclasses.replace(network, insize=training.insize),
        training.model,
    )
    with explaining(network, 'run'):
        batch = map(model.xp.array, training.examples)
        return inference_recorder.record_inference(model, *batch)


def find_insize(arch: str) -> int:
    """Returns the picture size that an architecture was designed for, in pixels.

    Raises:
        UnknownNameError: If there is no such architecture.
        HybridMemoryError: If its module cannot be imported.
    """
    try:
        return architectures.insize(arch)
    except HybridMemoryError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise HybridMemoryError(
            f'{arch} cannot be imported: {type(error).__name__}: {error} '
            f'({frame.filename}, line {frame.lineno}); mend the module, or name '
            f'another one.'
        ) from error


def choose_device(name: str, option: str = '--device') -> chainer.backend.Device:
    """Returns Chainer's device for an option of the command line.

    Args:
        name: ``'auto'``, ``'cpu'`` or ``'cuda'``.
        option: What names it, for the error message.

    Raises:
        OptionError: If CUDA is asked for and there is none.
    """
    available = compat.cuda_available()
    if name == 'auto':
        name = 'cuda' if available else 'cpu'
    if name == 'cuda' and not available:
        raise OptionError(
            f'CuPy with a GPU is not available here; use {option} cpu, or see what '
            'is missing with: hybridmem doctor'
        )
    return chainer.get_device(DEVICES[name])


def prepare(network: Network, device: chainer.backend.Device) -> Training:
    """Makes the model, its optimizer and one batch of random pictures."""
    np.random.seed(0)
    insize = network.insize or find_insize(network.arch)
    model = architectures.make(network.arch, network.n_class)
    model.to_device(device)
    device.use()
    rate = architectures.learning_rate(network.arch)
    optimizer = chainer.optimizers.MomentumSGD(lr=rate)
    optimizer.setup(model)
    shape = (network.batchsize, 3, insize, insize)
    return Training(model, optimizer, random_examples(shape, network.n_class))


def random_examples(shape: tuple[int, ...], n_class: int) -> tuple[np.ndarray, ...]:
    """Returns random pictures of a shape, and labels; the same ones every time."""
    random = np.random.default_rng(0)
    pictures = random.standard_normal(shape, dtype=np.float32)
    return pictures, random.integers(n_class, size=shape[0], dtype=np.int32)


def _run(
    network: Network,
    training: Training,
    session: RecordingSession,
    iterations: int,
    began: Callable[[int], None] | None,
) -> Recorded:
    try:
        with session, contextlib.suppress(RecordedError):
            for number in range(1, iterations + 1):
                if began is not None:
                    began(number)
                training.step()
                if session.problem is not None:
                    break
        if session.problem is not None:
            return Recorded(network, session.problem)
    except OutOfMemoryError as error:
        if session.problem is None:
            raise
        return Recorded(network, session.problem, str(error))
    raise SessionError(
        f'Nothing has been recorded after {format_count(iterations, "iteration")}. '
        f'Allow more of them, unless the network computes something else in every '
        f'iteration.'
    )


@contextlib.contextmanager
def explaining(network: Network, done: str = 'trained') -> Iterator[None]:
    """Tells in one line what Chainer, NumPy or the user's own class raises.

    Raises:
        HybridMemoryError: In place of any other error but MemoryError.
    """
    try:
        yield
    except (HybridMemoryError, MemoryError):
        raise
    except Exception as error:
        raise HybridMemoryError(_explain(network, error, done)) from error


def _explain(network: Network, error: Exception, done: str) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    size = f' of {network.insize}x{network.insize}' if network.insize else ''
    contract = ''
    if ':' in network.arch:
        contract = (
            f' {network.arch} is called with pictures and labels from 0 to '
            f'{network.n_class - 1} and returns the loss; another number of classes is '
            f'named with --n-class, another size of pictures with --insize.'
        )
    return (
        f'{network.arch} cannot be {done} on '
        f'{format_count(network.batchsize, "picture")}{size}: '
        f'{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}).'
        f'{contract}'
    )
