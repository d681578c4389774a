"""Recipes of forward operations, from what trials have shown."""

from __future__ import annotations

from collections.abc import Sequence

from chainer_hybridmem.recording.steps import IN_GRAPH, OF_ATTRIBUTE, Recording, Step
from chainer_hybridmem.recording.trials import TrialResult
from chainer_hybridmem.records.profile import Recipe, Slot, SlotKind, Storage


class RecipeBuilder:
    """Makes the recipes of a profile.

    Args:
        recording (Recording): One iteration.
        index (dict): Storage id by allocation id.
        storages (sequence of Storage): By id.
    """

    def __init__(
        self, recording: Recording, index: dict[int, int], storages: Sequence[Storage]
    ) -> None:
        self._recording = recording
        self._steps = recording.steps
        self._index = index
        self._storages = storages
        self._exact: set[int] = set()  # operations so far whose recipes are
        self._written = {
            index[allocation]
            for step in self._steps
            for allocation in step.written
            if allocation in index
        }

    def build(self) -> tuple[Recipe, ...]:
        """For each operation the longest fused replay, else the whole forward."""
        recipes = []
        for k, step in enumerate(self._steps):
            chosen = self._choose(step)
            if chosen is not None:
                recipe = self._make(k, *chosen)
                recipes.append(recipe)
                if recipe.exact:
                    self._exact.add(k)
        return tuple(recipes)

    def _choose(self, step: Step) -> tuple[tuple[int, ...], TrialResult] | None:
        """What the recipe covers, nothing for a whole forward, and its trial."""
        for covers, result in step.fused:
            if not any(self._has_map(c) for c in covers[:-1]):
                return covers, result
        return None if step.whole is None else ((), step.whole)

    def _has_map(self, k: int) -> bool:
        """Whether backward reads an output of an operation."""
        return any(
            slot.kind is SlotKind.OUTPUT
            and self._recording.allocations.slots.get(allocation)
            for allocation, slot in self._steps[k].products
        )

    def _make(self, k: int, covers: tuple[int, ...], result: TrialResult) -> Recipe:
        """The recipe of operation k.

        Args:
            k: The operation.
            covers: Operations of a fused replay; empty for the whole forward.
            result: Of its trial.
        """
        covered = [self._steps[c] for c in covers or (k,)]
        made = self._find_made(k, bool(covers), result)
        inputs = self._find_inputs(covered)
        inputs.update(
            storage
            for storage, slot in made.items()
            if slot.kind is SlotKind.ATTRIBUTE and slot.key in result.attributes
        )
        return Recipe(
            operation=k,
            inputs=tuple(sorted(inputs)),
            products=tuple(sorted(made)),
            sources=tuple(made[storage] for storage in sorted(made)),
            attributes=result.attributes,
            seconds=result.seconds(self._recording.device),
            peak_bytes=result.peak_bytes,
            exact=(
                result.exact
                and self._written.isdisjoint({*inputs, *made})
                and not any(OF_ATTRIBUTE in step.written for step in covered)
                and self._can_reach_inputs(covers, covered)
            ),
            covers=covers,
            formula=result.formula,
        )

    def _find_inputs(self, covered: Sequence[Step]) -> set[int]:
        """Storages that the operations read, but for outputs between them."""
        inside = {
            allocation
            for step in covered[:-1]
            for allocation, slot in step.products
            if slot.kind is SlotKind.OUTPUT
        }
        return {
            self._index[allocation]
            for step in covered
            for allocation, _ in step.input_nodes
            if allocation in self._index and allocation not in inside
        }

    def _find_made(self, k: int, fused: bool, result: TrialResult) -> dict[int, Slot]:
        """Storages that the recipe makes, each with the first slot that shows it."""
        return {
            self._index[allocation]: slot
            for allocation, slot in reversed(self._steps[k].products)
            if allocation in self._index
            and self._storages[self._index[allocation]].producer == k
            and (slot.kind is SlotKind.OUTPUT or not fused or slot.key in result.made)
        }

    def _can_reach_inputs(
        self, covers: tuple[int, ...], covered: Sequence[Step]
    ) -> bool:
        """Whether a replay finds all inputs with the same bits.

        They are in the graph, or earlier exact recipes make them: views, for
        instance, that no function has retained.
        """
        sources = {IN_GRAPH, *covers, *self._exact}
        return all(
            step.input_nodes
            and all(source in sources for _, source in step.input_nodes)
            for step in covered
        )
