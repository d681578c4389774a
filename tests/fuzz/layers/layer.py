"""What a layer of a drawn network is, and how a kind of layer is declared."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import chainer

from .forms import bring

Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of layer.

    Attributes:
        apply: From the layer, its inputs and its options to the output.
        draw: Draws the options.
        links: Makes the links from the options.
        form: ``'picture'`` (four axes), ``'vector'`` (two) or ``'any'``.
        inputs: How many variables it takes.
        twice: Whether its gradient can be differentiated again.
    """

    apply: Callable[..., Any]
    draw: Callable[[random.Random], Options]
    links: Callable[..., dict[str, chainer.Link]]
    form: str
    inputs: int
    twice: bool


KINDS: dict[str, Kind] = {}


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def kind(
    form: str = 'any',
    inputs: int = 1,
    twice: bool = True,
    draw: Callable[[random.Random], Options] = _nothing,
    links: Callable[..., dict[str, chainer.Link]] = _nothing,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a kind of layer under the name of its function."""

    def register(apply: Callable[..., Any]) -> Callable[..., Any]:
        name = apply.__name__.strip('_')
        KINDS[name] = Kind(apply, draw, links, form, inputs, twice)
        return apply

    return register


class Layer(chainer.Chain):
    """One layer of a drawn network.

    Attributes:
        chance (random.Random): The same in every run of an iteration.
        state (dict): What outlives iterations.
    """

    def __init__(self, name: str, options: Options) -> None:
        super().__init__()
        self.kind = KINDS[name]
        self.options = options
        self.chance = random.Random(0)
        self.state: dict[str, Any] = {}
        with self.init_scope():
            for key, link in self.kind.links(**options).items():
                setattr(self, key, link)

    def make_once(self, make: Callable[[], chainer.Link]) -> chainer.Link:
        """The link that ``make`` returns; it needs the shape of the input."""
        if not hasattr(self, 'made'):
            with self.init_scope():
                self.made = make()
            self.made.to_device(self.device)
        return self.made

    def forward(self, *inputs: Any) -> Any:
        brought = [bring(x, self.kind.form) for x in inputs]
        return self.kind.apply(self, *brought, **self.options)
