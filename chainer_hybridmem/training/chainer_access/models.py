"""The model of a session: one link, or several that are trained together.

A GAN has a generator and a discriminator, each with an optimizer of its own. A
``ChainList`` would give them new names; :class:`Models` leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import chainer

from chainer_hybridmem.errors import OptionError

Model = chainer.Link | Sequence[chainer.Link]


class Models(chainer.Link):
    """Several links as one; what they share counts once, under its first path.

    Args:
        links: By the name that their paths begin with; none is inside another one.
    """

    def __init__(self, links: Mapping[str, chainer.Link]) -> None:
        super().__init__()
        self._links = dict(links)
        self._device = device_of(next(iter(links.values())))

    def params(self, include_uninit: bool = True) -> Iterator[chainer.Parameter]:
        """Every parameter once."""
        return (parameter for _, parameter in self.namedparams(include_uninit))

    def namedparams(
        self, include_uninit: bool = True
    ) -> Iterator[tuple[str, chainer.Parameter]]:
        """Every parameter once, by path."""
        seen: set[int] = set()
        for name, link in self._links.items():
            for path, parameter in link.namedparams(include_uninit):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f'/{name}{path}', parameter

    def links(self, skipself: bool = False) -> Iterator[chainer.Link]:
        """Every link once."""
        return (link for _, link in self.namedlinks(skipself))

    def namedlinks(self, skipself: bool = False) -> Iterator[tuple[str, chainer.Link]]:
        """Every link once, by path."""
        if not skipself:
            yield '/', self
        seen: set[int] = set()
        for name, root in self._links.items():
            for path, link in root.namedlinks():
                if id(link) not in seen:
                    seen.add(id(link))
                    yield f'/{name}{path}'.rstrip('/'), link

    def children(self) -> Iterator[chainer.Link]:
        """The links themselves."""
        return iter(self._links.values())


def one_model(model: Any) -> chainer.Link:
    """A model, or a list or tuple of them, as one link.

    Raises:
        OptionError: If it is something else, or if devices differ.
    """
    if isinstance(model, chainer.Link):
        return model
    parts = list(model) if isinstance(model, list | tuple) else []
    if not parts:
        raise OptionError(
            f'model is {_described(model)}; a chainer.Link or a list of them is needed.'
        )
    return joined({str(i): link for i, link in enumerate(parts)})


def device_of(model: chainer.Link) -> chainer.backend.Device:
    """The device that a model's arrays are on.

    A chain is where it has been moved to; each of its children may have been moved
    elsewhere, as Chainer's model parallel examples do.

    Raises:
        OptionError: If arrays are on several devices, and none on the chain's own.
    """
    places: dict[str, tuple[str, chainer.backend.Device]] = {}
    for path, link in model.namedlinks():
        if link._params or link._persistent:
            places.setdefault(str(link.device), (path, link.device))
    if not places or str(model.device) in places:
        return model.device
    if len(places) > 1:
        found = ', '.join(f'{path!r} on {device}' for path, device in places.values())
        raise OptionError(
            f'The layers of the model are on several devices ({found}), and the model '
            f'itself is on {model.device}; name the layers of one device as model, or '
            f'move all to it with to_device.'
        )
    return next(iter(places.values()))[1]


def name_device(model: chainer.Link) -> str:
    """What opens :func:`device_of` a model: ``'cpu'`` or ``'cuda:N'``."""
    place = device_of(model)
    if isinstance(place, chainer.backend.GpuDevice):
        return f'cuda:{place.device.id}'
    return 'cpu'


def joined(links: Mapping[str, Any]) -> chainer.Link:
    """Several links as one; the link itself if it holds all the others.

    Raises:
        OptionError: If one is no link, or is on another device.
    """
    for name, link in links.items():
        if not isinstance(link, chainer.Link):
            raise OptionError(
                f'model {name!r} is a {type(link).__name__}; a chainer.Link is needed.'
            )
    roots = _roots(links)
    if len(roots) == 1:
        return next(iter(roots.values()))
    devices = {str(device_of(link)): name for name, link in roots.items()}
    if len(devices) > 1:
        places = ', '.join(f'{name!r} on {device}' for device, name in devices.items())
        raise OptionError(
            f'The models are on several devices ({places}); move them to one '
            f'with to_device, or name those of one device as model.'
        )
    return Models(roots)


def trained_by(updater: Any) -> chainer.Link:
    """What the optimizers of an updater train.

    Raises:
        OptionError: If that cannot be found out.
    """
    targets = {
        name: target
        for name, optimizer in updater.get_all_optimizers().items()
        if (target := getattr(optimizer, 'target', None)) is not None
    }
    if not targets:
        raise OptionError(
            f'{type(updater).__name__} has no optimizer with a target, so the model is '
            f'not known; call optimizer.setup(model) before, or name it: '
            f'HybridMemory(..., model=model), with a list if there are several.'
        )
    return joined(targets)


def _roots(links: Mapping[str, chainer.Link]) -> dict[str, chainer.Link]:
    """Without those that are inside another one, or come twice."""
    inside = {
        id(inner) for link in links.values() for inner in link.links(skipself=True)
    }
    roots: dict[int, tuple[str, chainer.Link]] = {}
    for name, link in links.items():
        if id(link) not in inside:
            roots.setdefault(id(link), (name, link))
    return dict(roots.values())


def _described(model: Any) -> str:
    return 'empty' if model in ([], ()) else f'a {type(model).__name__}'
