"""Networks that commands ask about: each trains on random pictures, in this process.

They are asked as programs are (``programs.py``), by the same watchers. A process of
their own would import everything once more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator
from typing import Any

from chainer_hybridmem import architectures
from chainer_hybridmem.commands.base import import_chainer
from chainer_hybridmem.errors import HybridMemoryError
from chainer_hybridmem.units import format_count


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, and what it is trained on.

    Attributes:
        arch (str): Name of the architecture, or ``module:Class``.
        batchsize (int): Pictures in one iteration.
        insize (int or None): Their height and width; None for the architecture's.
        n_class (int): Number of classes.
        device (str): ``'cpu'``, ``'cuda'`` or ``'auto'``.
    """

    arch: str
    batchsize: int
    insize: int | None = None
    n_class: int = 1000
    device: str = 'auto'
    batch_arg = '--batchsize'

    @property
    def title(self) -> str:
        """The network for people."""
        pictures = format_count(self.batchsize, 'picture')
        size = f' of {self.insize}x{self.insize}' if self.insize else ''
        return f'{self.arch}, {pictures}{size}'

    @property
    def named(self) -> dict[str, Any]:
        """The network as plain values."""
        names = ('arch', 'batchsize', 'insize', 'n_class')
        return {name: getattr(self, name) for name in names}

    @property
    def options(self) -> dict[str, Any]:
        """Of sessions: nothing lies beside an iteration, so none runs without one."""
        from chainer_hybridmem.forecasting.recording_session import AMPLE_BYTES

        return {'memory_limit': AMPLE_BYTES}

    def with_batchsize(self, batchsize: int) -> Network:
        """The network with another batch size."""
        return dataclasses.replace(self, batchsize=batchsize)

    def completed(self) -> Network:
        """The network with its size of pictures.

        Raises:
            UnknownNameError: If there is no such architecture.
            OptionError: If CUDA is asked for and there is none.
            HybridMemoryError: If its module or Chainer cannot be imported.
        """
        import_chainer()
        from chainer_hybridmem.commands.training import choose_device

        choose_device(self.device)
        insize = self.insize or find_insize(self.arch)
        return dataclasses.replace(self, insize=insize)

    def ask(self, watcher: str, **arguments: Any) -> Any:
        """Runs the network until a watcher has its answer.

        Args:
            watcher: Name of a class of ``running/watchers.py``.
            arguments: Of that class.

        Raises:
            HybridMemoryError: If the network cannot be run, or in place of an answer.
        """
        from chainer_hybridmem.commands import training
        from chainer_hybridmem.running import watchers

        answers: list[Any] = []
        watched = getattr(watchers, watcher)(answers.append, **arguments)
        with self._explained(), contextlib.suppress(watchers.Stopped), watched:
            insize = self.insize or find_insize(self.arch)
            shape = (self.batchsize, 3, insize, insize)
            made = training.Training(self.arch, shape, self.n_class, self.device)
            if not watched.infers:
                watched.begin()
            made.run(watched.infers)
        (answer,) = answers
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Tells in one line what Chainer, NumPy or the user's own class raises."""
        try:
            yield
        except (HybridMemoryError, MemoryError):
            raise
        except Exception as error:
            contract = ''
            if ':' in self.arch:
                contract = (
                    f' {self.arch} is called with pictures and labels from 0 to '
                    f'{self.n_class - 1} and returns the loss; another number of '
                    f'classes is named with --n-class, another size of pictures with '
                    f'--insize.'
                )
            raise HybridMemoryError(
                f'{self.arch} cannot be run on {self.title.partition(", ")[2]}: '
                f'{_describe(error)}.{contract}'
            ) from error


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
        raise HybridMemoryError(
            f'{arch} cannot be imported: {_describe(error)}; mend the module, or name '
            f'another one.'
        ) from error


def _describe(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f'({frame.filename}, line {frame.lineno})'
    return f'{type(error).__name__}: {error} {where}'
