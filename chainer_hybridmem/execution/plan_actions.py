"""What a plan does to the running graph before each operation."""

from __future__ import annotations

from collections.abc import Iterable

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
        find, movements = self._planned.find, self._movements
        if k not in table.acting and movements.observer is None:
            return
        for storage in table.swap_outs.get(k, ()):
            live = find(storage)
            if live is not None:
                movements.start_swap_out(live)
        for storage in table.releases.get(k, ()):
            live = find(storage)
            if live is not None:
                movements.release(live)
                movements.vacate(live)
        self.drop(table.drops.get(k, ()))
        if movements.observer is not None:
            movements.observer.released()
        for storage in table.swap_ins.get(k, ()):
            live = find(storage)
            if live is not None:
                movements.start_swap_in(live)
        for storage in table.needs.get(k, ()):
            live = find(storage)
            if live is not None:
                movements.finish_swap_in(live)
        replays = table.replays.get(k)
        if replays:
            self._restorer.replay_all(replays, table.recipes)

    def drop(self, storages: Iterable[int]) -> None:
        """Drops maps for good, or to be recomputed."""
        for storage in storages:
            live = self._planned.find(storage)
            if live is not None:
                self._movements.drop_planned(live)

    def catch_up(self, table: ActionTable, k: int) -> None:
        """Does what a plan does to maps that leave before operation k."""
        for actions, act in (
            (table.swap_outs, self._movements.start_swap_out),
            (table.releases, self._movements.release),
            (table.drops, self._movements.drop),
        ):
            for position in sorted(p for p in actions if p < k):
                for storage in actions[position]:
                    live = self._planned.find(storage)
                    if live is not None:
                        act(live)
