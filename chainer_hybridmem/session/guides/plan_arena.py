"""The arena of a guide's plan, and how it is found."""

from __future__ import annotations

from chainer_hybridmem.pools.arena import Arena, IterationLog

LOGGED_ITERATIONS = 2  # in a row, from which an arena is laid out


class PlanArena:
    """Whether a plan's iterations get an arena, which one, and what it waits for.

    Args:
        wanted (bool): Whether plans are made so that their arena fits.
        spare_bytes (int): What plans must leave of the limit, because an iteration
            has needed more than its plan's trace tells.

    Attributes:
        laid_out (Arena or None): Offsets for what the plan's iterations allocate.
        logs (list of IterationLog): Guided iterations in a row, as long as there is no
            arena.
        missing_bytes (int): What an arena has not found beside the pool's blocks.
        refusal (str): Why there is none for good; empty if an earlier run knows.
    """

    def __init__(self, wanted: bool = True, spare_bytes: int = 0) -> None:
        self.wanted = wanted
        self.spare_bytes = spare_bytes
        self.refusal = ''
        self.laid_out: Arena | None = None
        self.missing_bytes = 0
        self.logs: list[IterationLog] = []

    def begin_anew(self) -> None:
        """Forgets what is known about arenas of other plans; the arena stays."""
        self.spare_bytes = 0
        self.wanted, self.refusal = True, ''

    def lose_plan(self) -> None:
        """The plan changes, and its arena is no use any more."""
        self.logs.clear()
        self.laid_out = None
        self.missing_bytes = 0

    # -- iterations -----------------------------------------------------------
    def note_log(self, log: IterationLog | None) -> None:
        """An iteration has ended; without a log, the next ones count from one again."""
        if log is None:
            self.logs.clear()
        else:
            self.logs.append(log)

    @property
    def is_logged(self) -> bool:
        """Whether enough iterations are logged to lay out an arena."""
        return len(self.logs) == LOGGED_ITERATIONS

    def take_logs(self) -> tuple[IterationLog, IterationLog]:
        """Hands the logs out; they are forgotten here."""
        first, second = self.logs
        self.logs.clear()
        return first, second

    # -- what becomes of it ---------------------------------------------------
    def lay_out(self, arena: Arena) -> None:
        """The next iterations allocate in this arena."""
        self.laid_out = arena

    def find_no_place(self, missing_bytes: int) -> None:
        """The device has no memory for the arena: the pool keeps too much of it."""
        self.laid_out = None
        self.missing_bytes = missing_bytes

    def exceed(self, spare_bytes: int) -> None:
        """The arena exceeds the limit: the next plan leaves so much more.

        A second time, there is no arena for good.
        """
        self.missing_bytes = 0
        if self.spare_bytes:
            self.refuse('its allocations have exceeded the limit twice')
        self.spare_bytes += spare_bytes

    def refuse(self, why: str) -> None:
        """There is no arena from now on, for this reason."""
        self.laid_out = None
        self.reject(why)

    def reject(self, why: str) -> None:
        """No plan is made for an arena from now on, for this reason."""
        self.wanted, self.refusal = False, why

    def reconsider(self, why: str) -> tuple[bool, str]:
        """Wants an arena again if this reason alone has spoken against it.

        Returns:
            tuple: What was wanted before; see :meth:`restore`.
        """
        before = self.wanted, self.refusal
        self.wanted = self.wanted or self.refusal == why
        return before

    def restore(self, before: tuple[bool, str]) -> None:
        """Wants what was wanted before :meth:`reconsider`."""
        self.wanted, self.refusal = before

    def explain_absence(self, planned: bool) -> str | None:
        """What an arena waits for, or why there is none; None if it stands.

        Args:
            planned: Whether iterations follow a plan.
        """
        if self.laid_out is not None:
            return None
        if not self.wanted:
            return f'none: {self.refusal or "found out in an earlier run"}'
        if not planned:
            return 'waits for a plan'
        return (
            f'waits for two iterations in a row that follow the plan; '
            f'{len(self.logs)} logged'
        )
