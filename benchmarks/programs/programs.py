"""All programs by name."""

from __future__ import annotations

import numpy as np

from benchmarks.programs import models, vision

PROGRAMS = {**models.PROGRAMS, **vision.PROGRAMS}
SLOW = vision.SLOW  # seconds per iteration


def make(name: str, source: str, count: int) -> models.Program:
    """A program from a fixed seed."""
    np.random.seed(0)
    program = PROGRAMS[name](source, count)
    np.random.seed(1)
    return program
