"""What a scenario is, and how a program becomes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .running import Run


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A program and what its session is expected to do.

    Attributes:
        name: Of the program.
        program: What runs.
        share: Limit in parts of the in-core peak.
        steady: Whether every iteration follows a plan in the end.
        signatures: How many kinds of iterations are learnt; None if chance decides.
        deviations: Most iterations that leave their plan; None if chance decides.
        evictions: Whether iterations may need them in the end: what lies in memory
            beside the plan's maps changes, or is of graphs that live on.
    """

    name: str
    program: Callable[[Run], None]
    share: float = 0.6
    steady: bool = True
    signatures: int | None = 1
    deviations: int | None = 0
    evictions: bool = False


SCENARIOS: dict[str, Scenario] = {}


def scenario(**expected: Any) -> Callable[[Callable[[Run], None]], Any]:
    """Registers a program with what is expected of its session."""

    def register(program: Callable[[Run], None]) -> Callable[[Run], None]:
        name = program.__name__
        SCENARIOS[name] = Scenario(name, program, **expected)
        return program

    return register
