"""One iteration: how far it has come, and whose guide it follows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from chainer_hybridmem import timing
from chainer_hybridmem.planning.records.profile import Category
from chainer_hybridmem.training.execution.live_map import LiveMap
from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.guides.operation_key import (
    OperationKey,
    find_fingerprint,
)

NESTED = -1  # for the number of a forward operation that a backward function has called


class Following:
    """Which guide an iteration follows, as its operations come.

    Attributes:
        guide (Guide or None): Has begun like the iteration; None: its signature is
            unknown.
        expected (tuple of OperationKey or None): The guide's operations, as long as
            those that come are compared with them.
        operations (list of OperationKey): Those that have begun; of a quiet iteration
            the first one.
        tried (bool): Whether it has begun with a draft.
        whole (bool): Whether it has followed one guide alone.
        deviated (bool): Whether it has left what it followed for nothing.
    """

    __slots__ = ('deviated', 'expected', 'guide', 'operations', 'tried', 'whole')

    def __init__(self, guide: Guide | None = None) -> None:
        self.guide = guide
        self.operations: list[OperationKey] = []
        self.tried = guide is not None and guide.stage is Stage.PROFILING
        self.whole = guide is not None
        self.expected = None if guide is None else guide.signature
        self.deviated = False

    def switch(self, guide: Guide) -> None:
        """It is another guide's iteration, which begins in the same way."""
        self.guide, self.expected, self.whole = guide, guide.signature, False

    def deviate(self) -> None:
        """It is no known guide's iteration."""
        self.guide, self.expected, self.whole = None, None, False
        self.deviated = True


class Iteration:
    """One iteration; functions of its graph know it as their origin.

    Attributes:
        following (Following): Which guide it follows.
        started (bool): Whether it is under way.
        quiet (bool): Whether functions are noted and nothing else; see
            loop, [quiet iterations].
        began (tuple of float): Seconds at its start, of the clock and without other
            programs.
        position (int): Operations that have begun.
        named (str): Name of the function of the last one.
        last (tuple or None): Number and weak reference of a forward function that
            completes at the next hook.
        newest (weak reference or None): To the forward function that has begun last;
            None while the next one begins.
        depth (int): Backward functions under way.
        backward_seen (bool): Whether one has begun.
        short (bool): Whether an allocation has not fitted at once.
        wary (bool): Whether what a function reads may be away.
        held_bytes (int): What the program held when it began, beside feature maps.
        plain_bytes (int): What plain Chainer would have held when it began.
        older_bytes (int): Of these, maps of older graphs that were away.
        dead_bytes (int): Of these, maps of older graphs that have died before backward.
        older_waits (bool): Whether an older graph had a backward still to come then.
        categories (dict): What the model's allocations held when it began, by
            allocation id.
        labels (dict): Names of the model's gradients and persistent arrays when it
            began, by allocation id; only of an iteration that is recorded.
        fingerprint (int or None): Of the forward functions of one that has begun
            quietly; None: its operations tell it.
        knows (bool): Whether its functions become known: a quiet one notes them, until
            memory is short.
        evaluates (bool): Whether the program has evaluated since it began.
    """

    __slots__ = (
        '__weakref__',
        '_end',
        '_older',
        'backward_seen',
        'began',
        'categories',
        'dead_bytes',
        'depth',
        'evaluates',
        'fingerprint',
        'following',
        'held_bytes',
        'knows',
        'labels',
        'last',
        'named',
        'newest',
        'older_bytes',
        'older_waits',
        'plain_bytes',
        'position',
        'quiet',
        'short',
        'started',
        'wary',
    )  # fmt: skip

    def __init__(self) -> None:
        self.following = Following()
        self.started = self.quiet = False
        self.position = 0
        self.named = 'no operation yet'
        self.last: tuple[int, weakref.ref[Any]] | None = None
        self.newest: weakref.ref[Any] | None = None
        self.depth = 0
        self.backward_seen = False
        self.short = self.wary = False
        self.held_bytes = 0
        self.plain_bytes = self.older_bytes = self.dead_bytes = 0
        self._older: list[tuple[int, weakref.ref[LiveMap]]] = []
        self.older_waits = False
        self.categories: Mapping[int, Category] = {}
        self.labels: Mapping[int, str] = {}
        self.fingerprint: int | None = None
        self.knows = self.evaluates = False
        self.began = 0.0, 0.0
        self._end: tuple[float, float] | None = None

    # -- beginning and end ----------------------------------------------------
    def follow(self, guide: Guide | None) -> None:
        """It begins like a guide's iterations; None: it begins like none."""
        self.following = Following(guide)

    def note_memory(self, categories: Mapping[int, Category]) -> None:
        """What the model holds now, by allocation id: functions become known."""
        self.categories, self.knows = categories, True

    def note_older(self, used_bytes: int, older: Sequence[LiveMap]) -> None:
        """What is there, and what of older graphs would be in plain Chainer."""
        self._older = [(live.nbytes, weakref.ref(live)) for live in older]
        self.older_bytes = sum(live.nbytes for live in older if live.is_away)
        self.plain_bytes = used_bytes + self.older_bytes

    def start(self, quiet: bool = False, wary: bool = False) -> None:
        """Its first operation is about to run.

        Args:
            quiet: Whether functions are noted and nothing else.
            wary: Whether maps of older graphs are away.
        """
        self.quiet, self.wary = quiet, wary
        self.fingerprint = 0 if quiet else None
        self.started = True
        self.began = timing.both()

    @property
    def seconds(self) -> float:
        """Since its start, until now or an evaluation."""
        end = timing.now() if self._end is None else self._end[0]
        return end - self.began[0]

    @property
    def own_seconds(self) -> float:
        """Of these, those in which no other program had the processor."""
        end = timing.undelayed() if self._end is None else self._end[1]
        return max(end - self.began[1], 0.0)

    def note_evaluation(self, issued: bool) -> bool:
        """The program evaluates; whether the time of the iteration ends with it.

        Args:
            issued: Whether its operations may only be issued so far: its time then goes
                on.
        """
        self.evaluates = True
        ends = self._end is None and self.is_complete and not issued
        if ends:
            self._end = timing.both()
        return ends

    @property
    def is_complete(self) -> bool:
        """Whether it has come through forward and backward."""
        return self.started and self.backward_seen and not self.depth

    @property
    def is_under_way(self) -> bool:
        """Whether it is in forward or backward."""
        return self.depth > 0 or (self.started and not self.backward_seen)

    def break_off(self) -> None:
        """It comes to nothing: the program has caught an error."""
        self.depth, self.started = 0, False
        self.following.guide = None

    # -- operations -----------------------------------------------------------
    def see_backward(self) -> None:
        """Its first backward function is about to run.

        Programs mostly give the last graph up between forward and backward.
        """
        self.backward_seen = True
        older, self._older = self._older, []
        found = [(nbytes, reference()) for nbytes, reference in older]
        self.dead_bytes = sum(
            nbytes
            for nbytes, live in found
            if live is None or not live.slots.are_alive()
        )

    def wait_for(self, k: int, function: Any) -> None:
        """Forward operation k, or NESTED, completes at the next hook."""
        self.newest = weakref.ref(function)
        self.last = k, self.newest

    def find_fingerprint(self) -> int:
        """Fingerprint of the forward functions of one that has ended."""
        if self.fingerprint is not None:
            return self.fingerprint
        guide = self.following.guide
        if guide is not None:  # of exactly these operations
            return guide.fingerprint
        return find_fingerprint(self.following.operations)

    # -- memory is short ------------------------------------------------------
    def fall_short(self) -> None:
        """An allocation does not fit."""
        self.short = self.wary = True
