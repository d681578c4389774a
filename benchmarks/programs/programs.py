"""All programs by name."""

from __future__ import annotations

import numpy as np

from benchmarks.programs import models, vision

PROGRAMS = {**models.PROGRAMS, **vision.PROGRAMS}
SLOW = vision.SLOW  # seconds per iteration
PROCESSES = {'chainermn_mnist': 2}  # of programs that need several


def make(name: str, source: str, count: int) -> models.Program:
    """A program from a fixed seed."""
    np.random.seed(0)
    program = PROGRAMS[name](source, count)
    np.random.seed(1)
    return program
