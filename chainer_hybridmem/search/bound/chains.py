"""What replays lead to: which of their sources have to be back, or made again."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.simulation.problem import Problem

LONGEST = 2  # operations a chain of replays is followed at most


class Chains:
    """What the replay of a map leads to, a few operations back.

    Args:
        problem (Problem): What is planned.
        followed (bool): Whether to look; if not, nothing is known.

    Attributes:
        followed (bool): Likewise.
        made (dict): Column offset of ``(x, operation)``: the operation is replayed
            by the first use of map x.
        edges (list): ``(x, operation, item, again)``: the operation needs the item,
            which is first used after x; ``again`` makes it, -1 if nothing can.
        breaks (list): Per map the positions at which it is known to be back.
    """

    def __init__(self, problem: Problem, followed: bool = True) -> None:
        self._arrays = a = problem.arrays
        self._n_maps = len(problem.maps)
        self.made: dict[tuple[int, int], int] = {}
        self.edges: list[tuple[int, int, int, int]] = []
        self.followed = followed
        for x in np.flatnonzero(problem.recomputable & followed).tolist():
            self._follow(x)
        breaks: list[set[int]] = [set() for _ in range(self._n_maps)]
        for x, _, item, _ in self.edges:
            if item < self._n_maps:
                breaks[item].add(int(a.first_use[x]))
        self.breaks = [sorted(positions) for positions in breaks]

    def _follow(self, x: int) -> None:
        a = self._arrays
        queue = [int(a.producer[x])]
        self.made[x, queue[0]] = len(self.made)
        for op in queue:
            for item in a.inputs[a.input_ptr[op] : a.input_ptr[op + 1]].tolist():
                if a.present[item]:
                    continue
                if item < self._n_maps and a.first_use[item] <= a.first_use[x]:
                    continue
                again = self._maker(item)
                if again >= 0 and (x, again) not in self.made:
                    if len(queue) >= LONGEST:
                        continue
                    self.made[x, again] = len(self.made)
                    queue.append(again)
                self.edges.append((x, op, item, again))

    def _maker(self, item: int) -> int:
        """Operation whose replay makes an item; -1 if none does."""
        a, op = self._arrays, int(self._arrays.producer[item])
        if op < 0:
            return -1
        made = a.products[a.product_ptr[op] : a.product_ptr[op + 1]]
        return op if a.recipe_seconds[op] >= 0 and item in made else -1
