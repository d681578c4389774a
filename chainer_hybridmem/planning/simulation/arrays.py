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

import dataclasses

import numpy as np

from chainer_hybridmem.jit_table import Bools, Bools2, Floats, Ints, Table
from chainer_hybridmem.planning.records.profile import Profile, Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class ProblemArrays(Table):
    """A table of arrays; kernels take it whole.

    Shapes: n operations, M maps, T other items; CSR pairs end in _ptr.
    """

    first_backward: int
    backward_seconds: float  # of the operations from there on
    seconds: Floats  # (n,), the session's own work included
    host_seconds: Floats  # (n,), to issue the operation; likewise
    move_seconds: Floats  # (M,), what each copy of a map takes from compute
    issue_seconds: Floats  # (M,), to issue each copy of a map
    duplex_share: float  # of its speed a direction keeps beside the other
    out_compute_share: float  # of its speed compute keeps beside swap-outs
    in_compute_share: float  # beside swap-ins
    fixed_start: Ints  # (n,), load before the operation
    fixed_peak: Ints  # (n,), highest load while it runs
    size: Ints  # (M+T,)
    producer: Ints  # (M+T,)
    present: Bools  # (M+T,), there all the time by itself
    copy_from: Ints  # (M,), first position a swap-out may start: nobody else has it
    release_from: Ints  # (M,), first position it may be free
    first_use: Ints  # (M,), backward
    last_use: Ints  # (M,), backward
    by_producer: Ints  # (M,), maps by producer
    by_copy: Ints  # (M,), maps by copy_from
    by_release: Ints  # (M,), maps by release_from
    by_use: Ints  # (M,), maps by first_use
    read: Bools  # (M,), whether backward reads it, and not only replays do
    recipe_seconds: Floats  # (n,); -1 where there is none
    recipe_peak: Ints  # (n,)
    input_ptr: Ints  # (n+1,)
    inputs: Ints  # items
    product_ptr: Ints  # (n+1,)
    products: Ints  # items
    tiered: bool  # whether host copies in RAM are limited
    host_limit: int  # bytes
    by_host: Ints  # (M,), maps by their right to RAM
    disk_out_seconds: Floats  # (M,), copies to the disk
    disk_in_seconds: Floats  # (M,), copies from there
    beyond_seconds: float  # for the byte too much, if there is no disk; see kernel
    ruled: bool  # whether rules, or no choice at all, leave less than every one
    allowed: Bools2  # (M, 3), whether a map may be kept, swapped, recomputed
    kept_pointers: Ints  # (G+1,), first member of each limited group
    kept_members: Ints  # maps by group
    kept_most: Ints  # (G,), bytes of kept maps of each group at most


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


def find_maker(arrays: ProblemArrays, item: int) -> int:
    """The operation whose replay makes an item; -1 if none does."""
    op = int(arrays.producer[item])
    if op < 0 or arrays.recipe_seconds[op] < 0:
        return -1
    made = arrays.products[arrays.product_ptr[op] : arrays.product_ptr[op + 1]]
    return op if item in made else -1


def find_recomputable(arrays: ProblemArrays) -> np.ndarray:
    """(M,) A map is recomputable if its recipe is, and every transient on the way.

    Maps among the inputs are always at hand: kept, swapped in, or
    recomputable themselves; so is what no plan decides about and nothing frees. A
    map whose producer needs one of its own products (a dropout mask) is not
    recomputable from itself.
    """
    n_maps = len(arrays.read)
    result = np.zeros(len(arrays.size), bool)
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
