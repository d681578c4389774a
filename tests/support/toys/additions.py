"""What is added to a profile: parameters and states, copies that slow others down."""

from __future__ import annotations

import dataclasses
import random

from chainer_hybridmem.records.profile import (
    Category,
    Profile,
    Storage,
)

from .graphs import MIB


def with_shares(profile: Profile, out: float, back: float, duplex: float) -> Profile:
    """The profile with copies that slow each other and compute down."""
    link = dataclasses.replace(
        profile.link,
        d2h_compute_share=out,
        h2d_compute_share=back,
        duplex_share=duplex,
    )
    return dataclasses.replace(profile, link=link)


def with_persistent(
    profile: Profile, seed: int = 0, share: float = 0.6, nbytes: int = 12 * MIB
) -> Profile:
    """The profile with parameters and their optimizer states.

    A parameter is read by one forward operation or two, by their replays and backward
    operations, and by the update; a state by the update only.
    """
    rng = random.Random(seed)
    n, b0 = len(profile.operations), profile.first_backward
    storages, inputs = (
        list(profile.storages),
        {r.operation: [] for r in profile.recipes},
    )

    def add(category: Category, size: int, readers: set[int]) -> None:
        uses = [op.index for op in profile.operations if op.forward in readers]
        for reader in readers & inputs.keys():
            inputs[reader].append(len(storages))
        storages.append(
            Storage(
                id=len(storages),
                nbytes=size,
                category=category,
                label=f'/{len(storages)}/W',
                producer=-1,
                allocated_at=-1,
                freed_at=-1,
                forward_uses=tuple(sorted(readers)),
                backward_uses=(*uses, n - 1),
                releasable_from=max([-1, *readers]) + 1,
            )
        )

    for op in range(b0):
        if rng.random() < share:
            size = rng.randint(1, nbytes)
            add(Category.PARAMETER, size, {op, rng.choice([op, rng.randrange(b0)])})
            add(Category.OPTIMIZER_STATE, size, set())
    added = sum(s.nbytes for s in storages[len(profile.storages) :])
    return dataclasses.replace(
        profile,
        storages=tuple(storages),
        initial_bytes=profile.initial_bytes + added,
        recipes=tuple(
            dataclasses.replace(
                recipe, inputs=(*recipe.inputs, *inputs[recipe.operation])
            )
            for recipe in profile.recipes
        ),
    )
