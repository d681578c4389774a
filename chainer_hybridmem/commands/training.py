"""Trains a network on random pictures."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainer_hybridmem import architectures
from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.training.chainer_access import compat
from chainer_hybridmem.training.recompute import drawing

DEVICES = {'cpu': '@numpy', 'cuda': '@cupy:0'}


class Training:
    """A model with everything that one iteration needs; alike every time.

    Args:
        arch (str): Name of the architecture, or ``module:Class``.
        shape (tuple of int): Of the pictures in one iteration.
        n_class (int): Number of classes.
        device (str): ``'cpu'``, ``'cuda'`` or ``'auto'``.

    Attributes:
        model (Chain): Called with a batch, returns the loss.
    """

    def __init__(
        self, arch: str, shape: tuple[int, ...], n_class: int, device: str
    ) -> None:
        chosen = choose_device(device)
        np.random.seed(0)
        self.model = architectures.make(arch, n_class)
        self.model.to_device(chosen)
        chosen.use()
        if chosen.xp is not np:
            drawing.seed_gpu(0)
        rate = architectures.learning_rate(arch)
        self._optimizer = chainer.optimizers.MomentumSGD(lr=rate).setup(self.model)
        self._examples = random_examples(shape, n_class)

    def step(self) -> None:
        """Trains one iteration.

        The batch is made anew, as Chainer's updaters do, so that it counts.
        """
        batch = self._copy_examples()
        loss = self.model(*batch)
        _check_loss(loss)
        self.model.cleargrads()
        loss.backward()
        self._optimizer.update()

    def infer(self) -> None:
        """Runs forward alone."""
        with chainer.no_backprop_mode(), chainer.using_config('train', False):
            self.model(*self._copy_examples())

    def run(self, infers: bool) -> None:
        """Trains, which may well diverge, or infers, until a watcher ends it."""
        with np.errstate(all='ignore'):
            while True:
                self.infer() if infers else self.step()

    def _copy_examples(self) -> list[Any]:
        return [self.model.xp.array(array) for array in self._examples]


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, chainer.Variable):
        raise TypeError(f'a loss is needed, and a {type(loss).__name__} was returned')
    if loss.size != 1:
        raise ValueError(f'a scalar loss is needed, and its shape is {loss.shape}')


def random_examples(shape: tuple[int, ...], n_class: int) -> tuple[np.ndarray, ...]:
    """Returns random pictures of a shape, and labels; the same ones every time."""
    random = np.random.default_rng(0)
    pictures = random.standard_normal(shape, dtype=np.float32)
    return pictures, random.integers(n_class, size=shape[0], dtype=np.int32)


def choose_device(name: str) -> chainer.backend.Device:
    """Returns Chainer's device for ``'auto'``, ``'cpu'`` or ``'cuda'``.

    Raises:
        OptionError: If CUDA is asked for and there is none.
    """
    available = compat.cuda_available()
    if name == 'auto':
        name = 'cuda' if available else 'cpu'
    if name == 'cuda' and not available:
        raise OptionError(
            'CuPy with a GPU is not available here; use the CPU, or see what is '
            'missing with: hybridmem doctor'
        )
    return chainer.get_device(DEVICES[name])
