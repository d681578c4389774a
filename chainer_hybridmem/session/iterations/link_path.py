"""The path of the link that runs now."""

from __future__ import annotations

from typing import Any

import chainer


class LinkPath(chainer.LinkHook):
    """Follows which link of a model runs.

    Args:
        model (Link): Its links have names.
    """

    name = 'hybridmem-path'

    def __init__(self, model: chainer.Link) -> None:
        self._paths = {id(link): name for name, link in model.namedlinks()}
        self._stack: list[str] = []

    def label(self, name: str) -> str:
        """A function's name behind the path of the link that calls it."""
        path = self._stack[-1] if self._stack else ''
        return f'{path}/{name}'

    def forward_preprocess(self, args: Any) -> None:
        """Before a link is called."""
        name = self._paths.get(id(args.link), args.link.name or '')
        self._stack.append('' if name == '/' else name)

    def forward_postprocess(self, args: Any) -> None:
        """After a link has been called."""
        if self._stack:
            self._stack.pop()
