"""Finds out which functions are worth running again in iterations without a plan.

Note: [trials on the way]
    An iteration that has never been recorded can still be recomputed: it is made of
    functions of a few classes. The first time that one of them runs in a passive
    iteration, after memory has been short, its forward runs twice: is the result the
    same, and how long does it take per byte of what it reads? Functions of one class
    with parameters of the same shapes, on arrays of a quarter to four times the size,
    are taken to behave alike. Small functions are not looked at, and where all are
    small, none is after a few iterations.

Note: [probation]
    A program that writes into what a function has made would get a replay's version of
    it. So nothing is dropped in the first iterations that look at functions: what each
    function makes is compared with what it is when the next one begins, and when
    backward does. If the program has written, nothing is ever recomputed without a
    plan.

Note: [hidden copies]
    A part of the copies runs beside compute and costs nothing, and a replay takes
    longer than its trial did, whose inputs lay in the cache. Iterations show which part
    of the copies the program has waited for, and how long replays really took; the next
    ones expect the same. One slow iteration can make all replays too dear, and then no
    replay would show that they are not: so iterations without replays forget it slowly.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from chainer_hybridmem.planning.planners import DEFAULT
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import Recipe
from chainer_hybridmem.training.chainer_access import graph
from chainer_hybridmem.training.devices.protocol import Array, Device
from chainer_hybridmem.training.execution.graph_slots import (
    compute_uncounted_fingerprint,
)
from chainer_hybridmem.training.execution.mover import Counters
from chainer_hybridmem.training.recompute import trust
from chainer_hybridmem.training.recording.trials import run_trial
from chainer_hybridmem.training.session.setting.link_measurement import LinkMeasurement
from chainer_hybridmem.training.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.training.session.setting.runtime import Runtime
from chainer_hybridmem.training.splitting import Splitter

LEAST_SECONDS = 2e-4  # that it takes to copy out and in what a function reads
WORTH_MEASURING = 1.0  # seconds lost, from which on the link is measured for this
KEPT_SHARE = 0.9  # that an iteration has of the weight of the next one
_MUCH_BYTES = 1 << 24


class RunningRatio:
    """How far what happens differs from what is expected; newer iterations count more.

    Attributes:
        ratio (float): What has happened over what was expected.
    """

    def __init__(self) -> None:
        self.ratio = 1.0
        self._happened = self._expected = 0.0

    def add(self, happened: float, expected: float) -> None:
        """Takes one iteration in; nothing expected brings the ratio closer to 1."""
        if expected > 0:
            self._happened = KEPT_SHARE * self._happened + happened
            self._expected = KEPT_SHARE * self._expected + expected
        else:
            difference = self._happened - self._expected
            self._happened = self._expected + KEPT_SHARE * difference
        if self._expected > 0:
            self.ratio = self._happened / self._expected


class CopyCosts:
    """Compares copies with replays, from what iterations have shown.

    Args:
        device (Device): Copies.
        links (LinkMeasurement): Tell what a copy costs, once they are measured.
    """

    def __init__(self, device: Device, links: LinkMeasurement) -> None:
        self._device = device
        self._links = links
        self._lost_seconds = 0.0  # by iterations without a plan
        self._waited = RunningRatio()  # of the seconds that copies take
        self._slowness = RunningRatio()  # of replays, over what trials say

    def are_known(self) -> bool:
        """Whether the links are measured, which is done once that is worth it."""
        if self._links.measured is None and self._lost_seconds >= WORTH_MEASURING:
            self._links.measure_once()
        return self._links.measured is not None

    def learn(self, counters: Counters, active: bool) -> None:
        """Takes an iteration in; see [hidden copies].

        Args:
            counters: What it has moved.
            active: Whether it knew the links.
        """
        self._lost_seconds += counters.lost_seconds
        if not active or not counters.evictions:
            return
        copied = self._copy_seconds(
            counters.swapped_out_bytes, counters.swapped_in_bytes
        )
        if copied > 0:
            waited = max(counters.lost_seconds - counters.replay_seconds, 0.0)
            self._waited.add(min(waited, copied), copied)
        if not self._device.clock.asynchronous:
            self._slowness.add(counters.replay_seconds, counters.expected_seconds)

    def most_seconds(self, nbytes: int) -> float:
        """That replays may take by their trials, instead of copying so many bytes."""
        waited = self._waited.ratio * self._copy_seconds(nbytes, nbytes)
        return waited / max(self._slowness.ratio, 1.0)

    def find_smallest_worthwhile(self) -> int:
        """Smallest size worth running again instead of copying."""
        nothing = self._copy_seconds(0, 0)
        much = self._copy_seconds(_MUCH_BYTES, _MUCH_BYTES)
        left = max(LEAST_SECONDS - nothing, 0.0)
        return int(left / (much - nothing) * _MUCH_BYTES) if much > nothing else 0

    def _copy_seconds(self, out_bytes: int, in_bytes: int) -> float:
        links = self._links.measured
        assert links is not None
        link, room = links.link, self._device.copies.host_room(Tier.RAM)
        if links.disk is not None and room < out_bytes:
            link = links.disk
        return link.d2h_seconds(out_bytes) + link.h2d_seconds(in_bytes)


ALIKE = 4  # sizes up to so many times larger or smaller cost as much per byte
MOST_TRIALS = 8  # without a result
NEWEST = 16  # iterations: functions are looked at as long as one of them was short
BARREN = 8  # iterations without a function that is large enough
PROBATION = 2  # iterations in which nothing is recomputed
RUNS = 2  # of one trial; the faster one counts


@dataclasses.dataclass
class ReplayCost:
    """What trials of functions that are alike have shown.

    Attributes:
        least_bytes (int): Read by the smallest one tried.
        most_bytes (int): Read by the largest one.
        exact (bool): Whether each gave the same bits.
        seconds_per_byte (float): Of what it reads; of the slowest one.
        peak_per_byte (float): That a replay takes at most.
        trials (int): Without a result so far.
    """

    least_bytes: int = 0
    most_bytes: int = 0
    exact: bool = True
    seconds_per_byte: float = 0.0
    peak_per_byte: float = 0.0
    trials: int = 0

    def covers(self, nbytes: int) -> bool:
        """Whether nothing is to be tried for a function that reads so much."""
        if not self.exact or self.trials >= MOST_TRIALS:
            return True
        return self.least_bytes <= nbytes * ALIKE and nbytes <= self.most_bytes * ALIKE

    def fail(self) -> None:
        """There was no memory for a trial."""
        self.trials += 1

    def add(self, nbytes: int, exact: bool, seconds: float, peak_bytes: int) -> None:
        """Takes a result in.

        Args:
            nbytes: The function has read, parameters excluded.
            exact: Whether its replay has given the same bits.
            seconds: The replay took.
            peak_bytes: The replay took at most.
        """
        self.exact = self.exact and exact
        self.least_bytes = min(self.least_bytes or nbytes, nbytes)
        self.most_bytes = max(self.most_bytes, nbytes)
        self.seconds_per_byte = max(self.seconds_per_byte, seconds / nbytes)
        self.peak_per_byte = max(self.peak_per_byte, peak_bytes / nbytes)


class ReplayTrials:
    """Prepares functions of passive iterations for being run again.

    Args:
        runtime (Runtime): Runs the iterations.
        arrays (ModelArrays): Are not counted as what a function reads.
        links (LinkMeasurement): Tell what a copy costs, once they are measured.

    Attributes:
        active (bool): Whether the iteration under way looks at functions.
        watching (bool): Whether it looks for writes of the program.
    """

    def __init__(
        self,
        runtime: Runtime,
        arrays: ModelArrays,
        links: LinkMeasurement,
    ) -> None:
        self._device = runtime.device
        self._executor = runtime.executor
        self._arrays = arrays
        self._costs = CopyCosts(runtime.device, links)
        options = runtime.options
        self._wanted = options.planner == DEFAULT and not options.plans_anyway
        self._since_short = NEWEST  # iterations
        self._known: dict[Hashable, ReplayCost] = {}
        self._watched: list[tuple[weakref.ref[Any], int]] = []  # and a fingerprint
        self._probation = PROBATION  # iterations to come
        self._barren = 0  # iterations
        self._least_bytes = 0  # that a function reads, parameters excluded
        self.active = self.watching = False

    # -- iterations -----------------------------------------------------------
    def begin(self, passive: bool) -> None:
        """Starts an iteration.

        Args:
            passive: Whether it has no plan and is not recorded.
        """
        wanted = passive and self._wanted and self._since_short < NEWEST
        self.active = wanted and self._costs.are_known()
        self._since_short += 1
        self._watched.clear()
        self.watching = self.active and self._probation > 0
        drops = self.active and not self.watching
        self._executor.cheap.choose(self._costs.most_seconds if drops else None)
        if self.active:
            self._arrays.protect_from(self._executor)
            self._least_bytes = self._costs.find_smallest_worthwhile()
            self._probation -= self.watching
            self._barren += 1
            self._wanted = self._barren < BARREN

    def end(self, counters: Counters) -> None:
        """An iteration has ended, which has moved so much."""
        self._costs.learn(counters, self.active)

    def fall_short(self) -> None:
        """An allocation does not fit: the next iterations look at functions."""
        self._since_short = 0

    # -- functions ------------------------------------------------------------
    def prepare(
        self, function: Any, in_data: tuple[Any, ...], splitter: Splitter
    ) -> None:
        """Before a forward function.

        Args:
            function: It is about to run.
            in_data: Its inputs.
            splitter: Prepares it, too.
        """
        attach = self._prepare(function, in_data)
        if type(function) in splitter.kinds:
            splitter.prepare(function)
        if attach is not None:
            attach()

    def _prepare(
        self, function: Any, in_data: tuple[Any, ...]
    ) -> Callable[[], None] | None:
        """Prepares it; returns what remains to be done if it is to be tried."""
        self._compare(self._watched[-1:])
        if not trust.is_trusted(function):
            self._executor.cheap.note_untrusted(function)
            return None
        if sum(x.nbytes for x in in_data) < self._least_bytes:
            return None
        self._barren = 0
        key, nbytes = self._describe(graph.target(function), in_data)
        worth = self._known.get(key)
        if nbytes < max(self._least_bytes, 1) or not trust.may_replay(function):
            return None
        if worth is None:
            worth = self._known[key] = ReplayCost()
        if not worth.covers(nbytes):
            return self._make_trial(function, worth, nbytes)
        if self.watching:
            return self._make_trial(function, None, nbytes)
        if not worth.exact or not worth.seconds_per_byte:
            return None
        seconds = worth.seconds_per_byte * nbytes
        peak_bytes = int(worth.peak_per_byte * nbytes)
        recipe = Recipe(-1, (), (), (), (), seconds, peak_bytes, exact=True)
        self._executor.prepare_replay(function, recipe)
        return None

    def _describe(self, own: Any, in_data: tuple[Any, ...]) -> tuple[Hashable, int]:
        """What functions that behave alike have in common, and the bytes it reads."""
        permanent, nbytes = self._executor.maps.permanent, 0
        find_allocation = self._device.arrays.allocation_id
        key: list[Any] = [type(own), *graph.name_and_arrays(own)]
        for x in in_data:
            if find_allocation(x) in permanent:
                key.append((x.dtype.char, x.shape))
            else:
                nbytes += x.nbytes
                key.append((x.dtype.char, x.ndim))
        return tuple(key), nbytes

    # -- writes of the program ------------------------------------------------
    def start_backward(self) -> None:
        """Backward begins; see [probation]."""
        self._compare(self._watched)
        self._watched.clear()
        self.watching = False

    def _compare(self, watched: list[tuple[weakref.ref[Any], int]]) -> None:
        for reference, before in watched:
            array = reference()
            if array is not None and compute_uncounted_fingerprint(array) != before:
                self._wanted = self.active = False
                return

    def _watch(self, outputs: tuple[Array, ...]) -> None:
        self._watched += [
            (weakref.ref(array), compute_uncounted_fingerprint(array))
            for array in outputs
            if array is not None
        ]

    # -- trials ---------------------------------------------------------------
    def _make_trial(
        self, function: Any, worth: ReplayCost | None, nbytes: int
    ) -> Callable[[], None]:
        """Attaches what looks at a function right after it has run.

        Args:
            function: It is about to run.
            worth: Takes the result of a trial; None if there is to be none.
            nbytes: It reads, parameters excluded.
        """
        before, reference = graph.pristine(function), weakref.ref(function)

        def attach() -> None:
            forward = vars(function).get('forward')  # of a splitter

            def run(inputs: tuple[Array, ...]) -> tuple[Array, ...]:
                called: Any = reference()
                graph.restore_forward(called)
                if forward is not None:
                    graph.replace_forward(called, forward)
                outputs: tuple[Array, ...] = called.forward(inputs)
                if worth is not None:
                    self._try(called, before, inputs, outputs, worth, nbytes)
                if self.watching:
                    self._watch(outputs)
                return outputs

            graph.replace_forward(function, run)

        return attach

    def _try(
        self,
        function: Any,
        before: graph.Pristine,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        worth: ReplayCost,
        nbytes: int,
    ) -> None:
        """Runs a forward again right after it has run."""
        device = self._device
        made = self._find_made(function, before)
        seconds, peak_bytes, exact = math.inf, 0, True
        try:
            with device.memory.without_reclaim(), trust.effects_refused(function):
                for _ in range(RUNS):
                    result = run_trial(
                        before, function, inputs, list(outputs), made, (), device
                    )
                    device.clock.synchronize()
                    seconds = min(seconds, result.seconds(device))
                    peak_bytes, exact = result.peak_bytes, exact and result.exact
        except MemoryError:
            worth.fail()
            return
        worth.add(nbytes, exact, seconds, peak_bytes)

    def _find_made(self, function: Any, before: graph.Pristine) -> dict[str, Array]:
        """Arrays that forward has set as attributes."""
        owns = self._device.arrays.owns
        given = dict(graph.attribute_arrays(before.function, owns))
        now = graph.attribute_arrays(function, owns)
        return {key: array for key, array in now if given.get(key) is not array}
