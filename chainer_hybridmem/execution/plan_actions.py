"""What a plan does to the running graph before each operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chainer_hybridmem.execution.live_map import LiveMap
from chainer_hybridmem.execution.movements import Movements
from chainer_hybridmem.execution.planned_maps import PlannedMaps
from chainer_hybridmem.execution.restorer import Restorer
from chainer_hybridmem.execution.table import ActionTable


class PlanActions:
    """Carries out the actions of a plan.

    Args:
        planned (PlannedMaps): Finds the maps of a plan.
        movements (Movements): Moves them.
        restorer (Restorer): Makes them again.
    """

    def __init__(
        self, planned: PlannedMaps, movements: Movements, restorer: Restorer
    ) -> None:
        self._planned = planned
        self._movements = movements
        self._restorer = restorer

    def act(self, k: int, table: ActionTable) -> None:
        """Does what the plan has before operation k."""
        movements = self._movements
        if k not in table.acting and movements.observer is None:
            return
        for live in self._find_all(table.swap_outs.get(k, ())):
            movements.start_swap_out(live)
        for live in self._find_all(table.releases.get(k, ())):
            movements.release(live)
            movements.vacate(live)
        self.drop(table.drops.get(k, ()))
        if movements.observer is not None:
            movements.observer.released()
        for live in self._find_all(table.swap_ins.get(k, ())):
            movements.start_swap_in(live)
        for live in self._find_all(table.needs.get(k, ())):
            movements.finish_swap_in(live)
        replays = table.replays.get(k)
        if replays:
            self._restorer.replay_all(replays, table.recipes)

    def drop(self, storages: Iterable[int]) -> None:
        """Drops maps for good, or to be recomputed."""
        for live in self._find_all(storages):
            self._movements.drop_planned(live)

    def catch_up(self, table: ActionTable, k: int) -> None:
        """Does what a plan does to maps that leave before operation k."""
        for actions, act in (
            (table.swap_outs, self._movements.start_swap_out),
            (table.releases, self._movements.release),
            (table.drops, self._movements.drop_planned),
        ):
            for position in sorted(p for p in actions if p < k):
                for live in self._find_all(actions[position]):
                    act(live)

    def _find_all(self, storages: Iterable[int]) -> Iterator[LiveMap]:
        """The maps of storages, as far as the iteration has made them."""
        for storage in storages:
            live = self._planned.find(storage)
            if live is not None:
                yield live
