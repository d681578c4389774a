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

from chainer_hybridmem.records.profile import Profile, Recipe


class Arrays(NamedTuple):
    """A table of arrays; kernels take it whole.

    Shapes: n operations, M maps, T other items; CSR pairs end in _ptr.
    """

    first_backward: int
    backward_seconds: float  # of the operations from there on
    seconds: np.ndarray  # (n,) float64, the session's own work included
    host_seconds: np.ndarray  # (n,) float64, to issue the operation; likewise
    move_seconds: np.ndarray  # (M,) float64, what each copy of a map takes from compute
    issue_seconds: np.ndarray  # (M,) float64, to issue each copy of a map
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
    read: np.ndarray  # (M,) bool, whether backward reads it, and not only replays do
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


def list_recipes(
    profile: Profile, item_of: dict[int, int], returning: set[int]
) -> dict[str, np.ndarray]:
    n = len(profile.operations)
    seconds = np.full(n, -1.0)
    peak = np.zeros(n, np.int64)
    inputs: list[list[int]] = [[] for _ in range(n)]
    products: list[list[int]] = [[] for _ in range(n)]
    for recipe in profile.recipes:
        if not recipe.exact or not _promised(profile, recipe, returning):
            continue
        op = recipe.operation
        seconds[op], peak[op] = recipe.seconds, recipe.peak_bytes
        if not profile.issues:
            seconds[op] += profile.move_cost.seconds_per_map
        inputs[op] = [item_of[s] for s in recipe.inputs if s in item_of]
        # What a replay starts with, such as a dropout mask, it does not make.
        products[op] = [item_of[s] for s in recipe.products if s not in recipe.inputs]
    return {
        'recipe_seconds': seconds,
        'recipe_peak': peak,
        'input_ptr': _pointers(inputs),
        'inputs': np.array([i for row in inputs for i in row], np.int64),
        'product_ptr': _pointers(products),
        'products': np.array([i for row in products for i in row], np.int64),
    }


def _promised(profile: Profile, recipe: Recipe, returning: set[int]) -> bool:
    """Whether a replay in backward finds what it needs and makes what it says.

    ``returning`` are the storages that a plan or a replay can bring back.
    """
    if recipe.operation >= profile.first_backward:
        return False
    end = profile.operations[-1].first_event
    for source in recipe.inputs:
        dies = 0 <= profile.storages[source].freed_at < end
        if dies and source not in returning:
            return False  # perhaps in the middle of backward
    return all(
        profile.storages[s].producer == recipe.operation for s in recipe.products
    )


def _pointers(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0] + [len(row) for row in rows]).astype(np.int64)


def find_maker(arrays: Arrays, item: int) -> int:
    """The operation whose replay makes an item; -1 if none does."""
    op = int(arrays.producer[item])
    if op < 0 or arrays.recipe_seconds[op] < 0:
        return -1
    made = arrays.products[arrays.product_ptr[op] : arrays.product_ptr[op + 1]]
    return op if item in made else -1


def find_recomputable(arrays: Arrays, n_maps: int) -> np.ndarray:
    """A map is recomputable if its recipe is, and every transient on the way.

    Maps among the inputs are always at hand: kept, swapped in, or
    recomputable themselves; so is what no plan decides about and nothing frees. A
    map whose producer needs one of its own products (a dropout mask) is not
    recomputable from itself.
    """
    n_items = len(arrays.size)
    result = np.zeros(n_items, bool)
    order = np.argsort(arrays.producer, kind='stable')
    for item in order:
        op = find_maker(arrays, item)
        if op < 0:
            continue
        needs = arrays.inputs[arrays.input_ptr[op] : arrays.input_ptr[op + 1]]
        result[item] = item not in needs and all(
            need < n_maps or arrays.present[need] or result[need] for need in needs
        )
    return result[:n_maps]
