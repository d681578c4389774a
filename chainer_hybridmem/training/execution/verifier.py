"""Proves, in some iterations, that backward reads what forward has made.

Note: [when a map is final]
    The program may write into a feature map as long as forward runs: a function that
    works in place, or code that holds the array. Plain Chainer's backward sees that. So
    the fingerprint that counts is taken when a map leaves, or when backward begins,
    whichever comes first.

Note: [whose change it is]
    What a Variable of the program holds, or has been found held when it was to leave,
    the program may change at any time: its fingerprint is taken anew, as is that of
    what has been changed since it came back (live_map, [held arrays]). A backward
    function may write over its own attributes; over inputs and outputs it may not,
    for other functions read them, too.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError, VerificationError
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.profile import Profile, SlotKind
from chainer_hybridmem.training.chainer_access import graph, owners
from chainer_hybridmem.training.execution.graph_slots import Prints
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.execution.mover import Observer
from chainer_hybridmem.training.recompute import effects

DEFAULT_ITERATIONS = 3
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What has been compared so far, every bit of it being right.

    Attributes:
        iterations (int): Guided ones.
        maps (int): Feature maps that backward has read, over all iterations.
        compared_bytes (int): Their sizes.
        replays (int): Functions run again without any other effect.
        seconds (float): What it took.
    """

    iterations: int
    maps: int
    compared_bytes: int
    replays: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Followed:
    """What the iteration under way follows, for messages."""

    profile: Profile | None
    plan: Plan | None


def differ(prints: Prints, others: Prints) -> bool:
    """Whether there is a view whose fingerprints are not the same."""
    return any(others.get(view, value) != value for view, value in prints.items())


def iterations_of(verify: bool | int) -> int:
    """How many iterations are to be verified.

    Raises:
        OptionError: If it is neither a bool nor a number from 0 on.
    """
    if isinstance(verify, bool):
        return DEFAULT_ITERATIONS if verify else 0
    if not isinstance(verify, int) or verify < 0:
        raise OptionError(
            f'verify is {verify!r}; True, False or a number of iterations is needed.'
        )
    return verify


class Verifier(Observer):
    """Follows the feature maps of one iteration; the executor tells it what happens.

    Args:
        model (Link): Its statistics must not change in a replay.
        followed (callable): Tells what is followed.
    """

    judges = True

    def __init__(self, model: Any, followed: Callable[[], Followed]) -> None:
        self._model = model
        self._followed = followed
        self._backward = False
        self._final: dict[LiveMap, Prints] = {}
        self._compared: dict[LiveMap, int] = {}
        self._replays = 0
        self._seconds = 0.0

    @property
    def verdict(self) -> Verdict:
        """Of this iteration."""
        compared = self._compared.values()
        return Verdict(1, len(compared), sum(compared), self._replays, self._seconds)

    # -- what the executor calls ----------------------------------------------
    def made(self, maps: Iterable[LiveMap]) -> None:
        """A function has left maps in the graph."""
        if self._backward:  # called by a backward function
            self._take(live for live in maps if live not in self._final)

    def leaves(self, live: LiveMap) -> None:
        """A map is about to be copied out or dropped."""
        if live.state is State.RESIDENT:
            known = live in self._final
            if not (known and (self._backward or live.host.valid)):
                self._take([live])

    def backward_runs(self, maps: Iterable[LiveMap]) -> None:
        """Before a backward function; what still stays is final with the first one."""
        if not self._backward:
            self._backward = True
            self._take(live for live in maps if live not in self._final)

    def reads(self, k: int, function: Any, maps: Iterable[LiveMap]) -> None:
        """Backward operation k is about to read maps.

        Raises:
            VerificationError: If one is not what it was.
        """
        for live in maps:
            now, final = self._prints(live), self._final.setdefault(live, {})
            if differ(now, final):
                held = live.may_be_written or live.slots.are_held()
                if held or live.prints.rewritten:
                    self._final[live] = now  # Note: [whose change it is]
                    continue
                raise self._differs(
                    live,
                    f'in {_reading(k, function)} it is about to be read, not as '
                    f'forward has made it',
                )
            if final:
                self._compared[live] = live.nbytes
            final.update(now)

    def has_read(self, k: int, function: Any, maps: Iterable[LiveMap]) -> None:
        """Backward operation k has read maps.

        Raises:
            VerificationError: If one has changed meanwhile.
        """
        for live in maps:
            now, final = self._prints(live), self._final.get(live, {})
            if differ(now, final):
                if any(s.slot.kind is not SlotKind.ATTRIBUTE for s in live.slots):
                    raise self._differs(
                        live,
                        f'in {_reading(k, function)} it has changed while it was '
                        f'read, unless the function itself writes over what it has '
                        f'retained',
                    )
                self._final[live] = now

    def run_again(self, functions: Sequence[Any], action: Callable[[], T]) -> T:
        """Runs forwards again.

        Raises:
            VerificationError: If that changes anything but what it returns.
        """
        before = self._surroundings(functions)
        result = action()
        after = self._surroundings(functions)
        changed = effects.changed(before, after)
        if changed:
            name = graph.function_name(functions[-1])
            raise VerificationError(
                f'Running {name} again has changed {", ".join(changed)}. '
                f'{self._next_step()}'
            )
        self._replays += 1
        return result

    # -- fingerprints ---------------------------------------------------------
    def _take(self, maps: Iterable[LiveMap]) -> None:
        for live in maps:
            prints = self._prints(live)
            if prints:
                self._final[live] = prints

    def _prints(self, live: LiveMap) -> Prints:
        """Of a map as the graph sees it now; empty where it is away."""
        start = timing.now()
        result = live.slots.compute_prints()
        self._seconds += timing.now() - start
        return result

    def _surroundings(self, functions: Sequence[Any]) -> dict[str, Any]:
        """What a replay must leave alone, by name."""
        roots: list[tuple[str, Any]] = [('', self._model)]
        for function in functions:
            if function is None:
                continue
            name = graph.function_name(function)
            roots.append((name, graph.target(function)))
            for number, node in enumerate(function.inputs):
                if owners.is_parameter(node):
                    variable = node.get_variable_or_none()
                    roots.append((f'parameter {number} of {name}', variable))
        start = timing.now()
        result = contextvars.Context().run(effects.surroundings, roots)
        self._seconds += timing.now() - start
        return result

    # -- messages -------------------------------------------------------------
    def _differs(self, live: LiveMap, story: str) -> VerificationError:
        profile, plan = self._followed().profile, self._followed().plan
        action, label = 'no part of the plan', 'no known operation'
        if plan is not None and profile is not None and live.storage >= 0:
            producer = profile.storages[live.storage].producer
            label = f'operation {producer} ({profile.operations[producer].label})'
            actions = {m.storage: m.action.value for m in plan.maps}
            action = f'planned: {actions.get(live.storage, "nothing")}'
        return VerificationError(
            f'Feature map {live.storage} of {label}, {live.nbytes} bytes, {action}: '
            f'{story}. {self._next_step()}'
        )

    def _next_step(self) -> str:
        plan = self._followed().plan
        planner = 'none' if plan is None else plan.planner
        return (
            'Gradients of this iteration are wrong: go on from the last update with '
            f"planner='in-core', or with another one than {planner!r}, and report "
            'this with session.profile and session.plan.'
        )


def _reading(k: int, function: Any) -> str:
    return f'operation {k} (backward of {graph.function_name(function)})'


class Verification:
    """Verifies the first guided iterations of a session.

    Args:
        model (Link): What is trained.
        wanted_iterations: So many.
        followed (callable): Tells what is followed.
    """

    def __init__(
        self, model: Any, wanted_iterations: int, followed: Callable[[], Followed]
    ) -> None:
        self._make = lambda: Verifier(model, followed)
        self._wanted_iterations = wanted_iterations
        self._verdict = Verdict(0, 0, 0, 0, 0.0)

    @property
    def verdict(self) -> Verdict | None:
        """Of all iterations so far; None before the first."""
        return self._verdict if self._verdict.iterations else None

    def begin(self) -> Verifier | None:
        """For the guided iteration that begins; None if enough have been verified."""
        if self._verdict.iterations < self._wanted_iterations:
            return self._make()
        return None

    def count(self, verifier: Verifier) -> None:
        """A guided iteration has ended, and everything was right."""
        pairs = zip(
            dataclasses.astuple(self._verdict),
            dataclasses.astuple(verifier.verdict),
            strict=True,
        )
        self._verdict = Verdict(*(a + b for a, b in pairs))
