"""What happens when an iteration begins."""

from __future__ import annotations

from chainer_hybridmem.session.guides.guide import Guide
from chainer_hybridmem.session.guides.known_signatures import KnownSignatures
from chainer_hybridmem.session.guides.operation_key import OperationKey
from chainer_hybridmem.session.iterations import late_differences
from chainer_hybridmem.session.iterations.iteration import Iteration
from chainer_hybridmem.session.iterations.observation import Observation
from chainer_hybridmem.session.iterations.overrun import Overrun
from chainer_hybridmem.session.iterations.quiet_iterations import QuietIterations
from chainer_hybridmem.session.planning.host_share import HostShare
from chainer_hybridmem.session.setting.model_arrays import ModelArrays
from chainer_hybridmem.session.setting.options import Options
from chainer_hybridmem.session.setting.runtime import Runtime


class IterationStart:
    """Begins iterations: quietly, in passive mode, or with a guide.

    Args:
        runtime (Runtime): Runs iterations.
        options (Options): What the session is told.
        arrays (ModelArrays): Never leave, or as a plan says.
        quiet (QuietIterations): Runs iterations of which nothing is to be found out.
        signatures (KnownSignatures): Have the guides.
        host_share (HostShare): Gives host memory to a guide.
        observation (Observation): Finds out about iterations.
        overrun (Overrun): Ends training that went beyond the limit.
    """

    def __init__(
        self,
        runtime: Runtime,
        options: Options,
        arrays: ModelArrays,
        quiet: QuietIterations,
        signatures: KnownSignatures,
        host_share: HostShare,
        observation: Observation,
        overrun: Overrun,
    ) -> None:
        self._device = runtime.device
        self._executor = runtime.executor
        self._instruments = runtime.instruments
        self._splitter = runtime.splitter
        self._options = options
        self._arrays = arrays
        self._quiet = quiet
        self._replays = quiet.replays
        self._signatures = signatures
        self._host_share = host_share
        self._observation = observation
        self._overrun = overrun

    def begin(self, iteration: Iteration, key: OperationKey) -> None:
        """Begins an iteration.

        Args:
            iteration: A new one.
            key: Of its first operation.

        Raises:
            OutOfMemoryError: If it surely cannot end, or the last one went beyond the
                limit, with a limit that does.
            SessionError: If replays of earlier iterations have made something else.
        """
        self._quiet.begin_iteration(iteration)
        self._overrun.conclude()
        late_differences.refuse(self._device, wait=False)
        guide = self._signatures.begin(key)
        iteration.follow(guide)
        if not self._begin_quietly(iteration, guide, key):
            self._begin_known(iteration, guide, key)

    def _begin_quietly(
        self, iteration: Iteration, guide: Guide | None, key: OperationKey
    ) -> bool:
        """Begins an iteration of which nothing is to be found out, if it is one."""
        if guide is not None or self._observation.wants_recording(guide, key):
            return False
        executor = self._executor
        if executor.maps.knows_any or executor.idle.noted_any:
            self._arrays.protect_from(executor)
        executor.begin(None, {})
        wary = not executor.maps.all_present
        if wary:
            away_bytes = executor.maps.away_bytes
            iteration.note_older(self._device.memory.used_bytes, away_bytes)
        self._splitter.begin(None)
        self._replays.begin(passive=True)
        self._device.memory.forget_failure()
        self._device.memory.reset_peak()
        iteration.start(quiet=True, fingerprint=self._first_fingerprint(), wary=wary)
        return True

    def _begin_known(
        self, iteration: Iteration, guide: Guide | None, key: OperationKey
    ) -> None:
        """Begins an iteration whose feature maps are known one by one."""
        self._refuse(guide)
        iteration.note_memory(self._arrays.protect_from(self._executor))
        self._quiet.know_older()
        away_bytes = self._executor.maps.away_bytes
        iteration.note_older(self._device.memory.used_bytes, away_bytes)
        self._host_share.give_to(guide)
        may_switch = not self._signatures.begins_alone(key)
        if guide is None:
            self._executor.begin(None, {}, (), may_switch, (), None)
            self._splitter.begin(None)
        else:
            self._follow(guide, may_switch)
            iteration.note_foreign(self._count_foreign(guide))
        iteration.note_waiting(self._executor.maps.wait_for_backward)
        self._device.memory.forget_failure()
        self._observation.begin(iteration.following, key)
        planned = guide is not None and guide.table is not None
        recorded = self._instruments.recorder is not None
        if recorded:
            iteration.note_labels(self._arrays.find_labels())
        self._replays.begin(passive=not (planned or recorded))
        self._device.memory.reset_peak()
        iteration.start(fingerprint=self._first_fingerprint())

    def _first_fingerprint(self) -> int | None:
        return 0 if self._signatures.cautious else None

    def _follow(self, guide: Guide, may_switch: bool) -> None:
        table = guide.table
        crosses = table is not None and table.crossing
        holders = self._arrays.find_owners().values() if crosses else ()
        self._executor.begin(
            table,
            guide.copies,
            holders,
            may_switch,
            guide.habits.outliving,
            guide.watched,
        )
        self._splitter.begin(guide.ways)

    def _count_foreign(self, guide: Guide) -> int:
        """What the program holds beyond what it held in the guide's profile."""
        if guide.problem is None:
            return 0
        held_bytes = self._device.memory.used_bytes - self._executor.maps.older_bytes
        return max(0, held_bytes - guide.problem.profile.initial_bytes)

    def _refuse(self, guide: Guide | None) -> None:
        """An iteration that surely cannot end does not begin.

        Raises:
            OutOfMemoryError: With a limit that does.
        """
        if guide is None or guide.forecast is None or not guide.trial:
            return
        if self._overrun.is_under_way:  # this one tells more
            return
        used = self._device.memory.used_bytes - self._executor.maps.older_bytes
        options = self._options
        host_limited = options.host_limit_bytes is not None
        held = self._executor.maps.held_bytes
        error = guide.forecast.refusal(options.limit_bytes, used, host_limited, held)
        if error is not None:
            raise error
