"""How recipes are meant on the device: whole forwards, or passes.

A recording on the host makes much again in one pass over several functions
(:attr:`Recipe.covers`): a ReLU behind a batch normalisation straight from the output
of the convolution, say. So does a GPU, if a trial has found a kernel that rounds as
its forward does (``recompute/cuda_sums.py``). Local response normalization is one
pass on a GPU only (``recompute/local_responses.py``). Where there are no passes, each
function replays its own forward, and what lies in between is made on the way.
"""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.estimation.costs import LRN
from chainer_hybridmem.records.profile import Profile, Recipe

WHOLE, PASS = 'whole', 'pass'
RECOMPUTES = (WHOLE, PASS)
"""Whole forwards; or each pass as one elementwise kernel."""


def with_cuda_passes(profile: Profile) -> Profile:
    """The profile with the passes that functions have on a GPU and not on the host."""
    return dataclasses.replace(
        profile,
        recipes=tuple(
            dataclasses.replace(recipe, covers=(recipe.operation,))
            if profile.operations[recipe.operation].function == LRN
            else recipe
            for recipe in profile.recipes
        ),
    )


def with_whole_forwards(profile: Profile) -> Profile:
    """The profile with every pass given up for the forward of its last function."""
    return dataclasses.replace(
        profile,
        recipes=tuple(whole_forward(profile, recipe) for recipe in profile.recipes),
    )


def whole_forward(profile: Profile, recipe: Recipe) -> Recipe:
    """One recipe without its pass.

    Its inputs are what the function has read, its time and memory those of the
    function's forward. It counts as exact if the pass is: both give what forward
    has given. Statistics of a normalisation stay with the graph and are not among
    the products.

    Args:
        profile: Whose recipe it is.
        recipe: Returned as it is if it is no pass.
    """
    if not recipe.covers:
        return recipe
    op = profile.operations[recipe.operation]
    nbytes = sum(profile.storages[s].nbytes for s in recipe.products)
    return dataclasses.replace(
        recipe,
        inputs=tuple(sorted(set(op.reads))),
        seconds=op.device_seconds,
        peak_bytes=nbytes + op.workspace_bytes,
        covers=(),
        formula=0,
    )
