"""What replays can make again, as flat arrays."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.records.profile import Profile, Recipe
from chainer_hybridmem.simulation.arrays import Arrays


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
        op = arrays.producer[item]
        if op < 0:
            continue
        needs = arrays.inputs[arrays.input_ptr[op] : arrays.input_ptr[op + 1]]
        made = arrays.products[arrays.product_ptr[op] : arrays.product_ptr[op + 1]]
        result[item] = (
            arrays.recipe_seconds[op] >= 0
            and item in made
            and item not in needs
            and all(
                need < n_maps or arrays.present[need] or result[need] for need in needs
            )
        )
    return result[:n_maps]
