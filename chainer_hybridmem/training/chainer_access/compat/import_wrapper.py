"""Runs the imports of some modules inside of context managers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import importlib.machinery
    import types

    Context = Callable[[], AbstractContextManager[None]]


class ImportWrapper:
    """A finder: executes modules, when they get imported, inside of context managers.

    The same finder and loader as without this class find and load a module. There is
    one for all modules. Where others wrap the import of the same one, each finds the
    loader through the other, and none looks for the other for ever.
    """

    def __init__(self) -> None:
        self._contexts: dict[str, list[Context]] = {}
        self._searching = threading.local()

    @classmethod
    def install(cls, fullname: str, context: Context) -> None:
        """Waits for the import of a module.

        Args:
            fullname: Of the module.
            context: What is around it; the same one counts once.
        """
        finders: list[Any] = sys.meta_path
        wrapper = next((f for f in finders if isinstance(f, cls)), None)
        if wrapper is None:
            wrapper = cls()
            finders.insert(0, wrapper)
        contexts = wrapper._contexts.setdefault(fullname, [])
        if context not in contexts:
            contexts.append(context)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds an awaited module through the other finders."""
        contexts = self._contexts.get(fullname)
        names = vars(self._searching).setdefault('names', set())
        if not contexts or fullname in names:
            return None
        names.add(fullname)
        try:
            for finder in [f for f in sys.meta_path if f is not self]:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        self._wrap(spec.loader, contexts)
                    return spec
        finally:
            names.discard(fullname)
        return None

    def _wrap(self, loader: Any, contexts: list[Context]) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop('exec_module', None)
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                execute(module)

        # On the instance: the loader keeps its class and everything else.
        loader.exec_module = exec_module
