"""A problem as flat arrays: what the compiled simulator reads.

Notation used by this package:

=========  ==========================================================
symbol     meaning
=========  ==========================================================
n          number of operations; b0 the first backward one
M          number of maps a plan decides about: feature maps, and
           what crosses iterations if that is asked for
item       a feature map (0 .. M-1) or another storage a recompute
           passes through (M .. M+T-1): a transient, which forward
           drops, or one that is always there and only made twice
fixed      load of everything a plan does not decide about
=========  ==========================================================

What crosses iterations is a map whose producer is -1: there before operation 0, its
first use the first backward operation that reads it, its last use the update. It
cannot be made again, and it is never dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Arrays(NamedTuple):
    """A table of arrays; kernels take it whole.

    Shapes: n operations, M maps, T other items; CSR pairs end in _ptr.
    """

    first_backward: int
    backward_seconds: float  # of the operations from there on
    seconds: np.ndarray  # (n,) float64
    host_seconds: np.ndarray  # (n,) float64, to issue the operation
    issue_seconds: float  # to issue one copy
    duplex_share: float  # of its speed a direction keeps beside the other
    out_compute_share: float  # of its speed compute keeps beside swap-outs
    in_compute_share: float  # beside swap-ins
    fixed_start: np.ndarray  # (n,) int64, load before the operation
    fixed_peak: np.ndarray  # (n,) int64, highest load while it runs
    size: np.ndarray  # (M+T,) int64
    producer: np.ndarray  # (M+T,) int64
    present: np.ndarray  # (M+T,) bool, there all the time by itself
    copy_from: np.ndarray  # (M,) int64, first position a swap-out may start
    release_from: np.ndarray  # (M,) int64, first position it may be free
    first_use: np.ndarray  # (M,) int64, backward
    last_use: np.ndarray  # (M,) int64, backward
    by_producer: np.ndarray  # (M,) int64, maps by producer
    by_copy: np.ndarray  # (M,) int64, maps by copy_from
    by_release: np.ndarray  # (M,) int64, maps by release_from
    by_use: np.ndarray  # (M,) int64, maps by first_use
    recipe_seconds: np.ndarray  # (n,) float64; -1 where there is none
    recipe_peak: np.ndarray  # (n,) int64
    input_ptr: np.ndarray  # (n+1,) int64
    inputs: np.ndarray  # items
    product_ptr: np.ndarray  # (n+1,) int64
    products: np.ndarray  # items
    tiered: bool  # whether host copies in RAM are limited
    host_limit: int  # bytes
    by_host: np.ndarray  # (M,) int64, maps by their right to RAM
    disk_out_seconds: np.ndarray  # (M,) float64, copies to the disk
    disk_in_seconds: np.ndarray  # (M,) float64, copies from there
    beyond_seconds: float  # for the byte too much, if there is no disk; see kernel
    ruled: bool  # whether rules, or no choice at all, leave less than every one
    allowed: np.ndarray  # (M, 3) bool, whether a map may be kept, swapped, recomputed
    kept_pointers: np.ndarray  # (G+1,) int64, first member of each limited group
    kept_members: np.ndarray  # maps by group, int64
    kept_most: np.ndarray  # (G,) int64, bytes of kept maps of each group at most
