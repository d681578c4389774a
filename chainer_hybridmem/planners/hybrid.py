"""The default planner: keep, swap and recompute decided together.

1. The relaxation of :mod:`.bound` gives the proven bound and, per feature map,
   the fractions at which it is attained.
2. Starts: everything swapped, the relaxation rounded, the other planners' plans.
3. Simulated annealing on simulated time (:mod:`.local_search`), in rounds that
   start from the best so far and from the other starts, until the steps or the
   time are used up or the best plan is as close to the bound as ``tolerance``.

So the result is never slower than what any other planner here finds, and it says how
far from the best possible it can be at most. With the same options and without a
time budget, it is the same in every process.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.plan import Action, Plan
from chainer_hybridmem.planners import local_search
from chainer_hybridmem.planners.base import (
    KEEP,
    RECOMPUTE,
    SWAP,
    Candidate,
    Search,
)
from chainer_hybridmem.planners.bound import Bound, lower_bound
from chainer_hybridmem.planners.pooch import pooch, swap_opt
from chainer_hybridmem.planners.superneurons import superneurons
from chainer_hybridmem.planners.swap_all import swap_all
from chainer_hybridmem.simulation.problem import Problem

STEPS = 40_000
TOLERANCE = 1e-3  # of the bound
