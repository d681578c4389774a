"""Runs the import of one module inside a context manager."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any


class ImportWrapper(importlib.abc.MetaPathFinder):
    """Executes one module, when it gets imported, inside a context manager.

    The same finder and loader as without this class find and load the module.
    """

    def __init__(
        self, fullname: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._fullname = fullname
        self._context = context

    @classmethod
    def install(
        cls, fullname: str, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Waits for the import of a module; once is enough."""
        wrappers = [f for f in sys.meta_path if isinstance(f, cls)]
        if not any(wrapper._fullname == fullname for wrapper in wrappers):
            sys.meta_path.insert(0, cls(fullname, context))

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the awaited module through the other finders."""
        if fullname != self._fullname:
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            with self._context():
                execute(module)

        # On the instance: the loader keeps its class and everything else.
        loader.exec_module = exec_module
