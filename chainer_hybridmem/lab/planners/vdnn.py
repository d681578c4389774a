"""vDNN (Rhu et al. 2016): every layer's input leaves, or only that of convolutions.

Offload: an input leaves once its last reader in forward has run; compute and copy
meet again at the end of the layer beside which the copy runs. Prefetch: each layer of
backward starts bringing back what one earlier layer needs, the next one that lacks
something, and looks no further than past one convolution; they meet again at its end.

Where ours is other than the paper: there the copy starts together with the last reader,
here after it, because only then the graph's reference can be taken away; so it runs
beside the operation that follows. Layers are functions of Chainer's graph, so that a
function with several inputs fetches all of them at once. There is no choice of
convolution algorithms: Chainer makes that.
"""

from __future__ import annotations

import numpy as np

from chainer_hybridmem.planning.planners.planner import Planner
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    SWAP,
    Search,
    is_convolution,
)
from chainer_hybridmem.planning.simulation.problem import Problem
from chainer_hybridmem.planning.simulation.work import Work


def vdnn_all(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps every feature map."""
    return _offload('vdnn-all', problem, limit_bytes, _made_in_forward(problem))


def vdnn_conv(problem: Problem, limit_bytes: int) -> Plan:
    """Swaps what convolutions read in backward."""
    reads = _convolutions(problem.profile)
    read = [any(reads[k] for k in s.backward_uses) for s in problem.maps]
    leaves = _made_in_forward(problem) & np.array(read, bool)
    return _offload('vdnn-conv', problem, limit_bytes, leaves)


def _made_in_forward(problem: Problem) -> np.ndarray:
    """(M,) whether it is a feature map: parameters never leave."""
    return problem.arrays.producer[: len(problem.maps)] >= 0


def _offload(
    planner: str, problem: Problem, limit_bytes: int, leaves: np.ndarray
) -> Plan:
    search = Search(problem, limit_bytes)
    action = search.obeyed(np.where(leaves, SWAP, KEEP))
    leaves = action == SWAP
    work = search.positions(search.evaluate(action))
    _meet_after_offload(problem, leaves, work)
    _prefetch(problem, leaves, work)
    return search.finish_at(planner, action, work)


def _meet_after_offload(problem: Problem, leaves: np.ndarray, positions: Work) -> None:
    """Memory is free when the operation beside the copy has ended."""
    a = problem.arrays
    meet = np.minimum(a.copy_from + 1, a.first_backward)
    release = np.maximum(meet, a.release_from)
    positions.release[leaves] = np.minimum(release, a.first_use)[leaves]


def _prefetch(problem: Problem, leaves: np.ndarray, positions: Work) -> None:
    """Each operation fetches what the next one that lacks something needs."""
    a, convolution = problem.arrays, _convolutions(problem.profile)
    needs: dict[int, list[int]] = {}
    for m in np.flatnonzero(leaves).tolist():
        needs.setdefault(int(a.first_use[m]), []).append(m)
    for k in range(a.first_backward, len(a.seconds)):
        _bring(needs.pop(k, []), k, k, positions)  # not fetched earlier
        for other in range(k + 1, len(a.seconds)):
            if other in needs:
                _bring(needs.pop(other), k, k + 1, positions)
                break
            if convolution[other]:
                break


def _bring(maps: list[int], start: int, meet: int, positions: Work) -> None:
    for m in maps:
        positions.swap_in[m] = max(start, positions.release[m])
        positions.needed[m] = max(meet, positions.swap_in[m])


def _convolutions(profile: Profile) -> list[bool]:
    """Tells of each operation whether it is the backward of a convolution."""
    return [
        op.forward >= 0 and is_convolution(op.function) for op in profile.operations
    ]


_SOURCE = 'Rhu et al. 2016'
PLANNERS = tuple(
    Planner(
        name,
        function,
        _SOURCE,
        acts_always=True,
        quick=True,
        actions=frozenset({Action.KEEP, Action.SWAP}),
    )
    for name, function in (('vdnn-all', vdnn_all), ('vdnn-conv', vdnn_conv))
)
