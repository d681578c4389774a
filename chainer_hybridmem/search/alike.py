"""Which maps are alike: made by the same kind of function, of the same size."""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.simulation.problem import Problem


def is_convolution(function: str) -> bool:
    """Whether a function name is that of a convolution."""
    return 'convolution' in function.lower()


def number_kinds(problem: Problem) -> np.ndarray:
    """(M,) number of the function that makes each map; states are one kind, too."""
    operations = problem.profile.operations
    names = [
        s.category.value if s.persistent else operations[s.producer].function
        for s in problem.maps
    ]
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def group_alike(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Maps by group of those of one kind, size and choice: pointers, and the maps."""
    n_maps = len(problem.maps)
    a = problem.arrays
    rows = [number_kinds(problem), a.size[:n_maps], *a.allowed.T]
    group = np.unique(np.stack(rows), axis=1, return_inverse=True)[1].ravel()
    pointers = np.concatenate([[0], np.cumsum(np.bincount(group))]).astype(np.int64)
    return pointers, np.lexsort((np.arange(n_maps), group)).astype(np.int64)
