"""What cuDNN takes beside arrays is part of profile, plan and limit."""

from __future__ import annotations

import pytest
from support import networks
from support.cudnn_workspaces import workspaces_up_to
from support.marks import needs_emulated_cudnn

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
import chainer

ITERATIONS = 8
SMALL_BYTES, LARGE_BYTES = 1 << 19, 1 << 23  # for the fastest algorithms of some layers
pytestmark = [pytest.mark.gpu, needs_emulated_cudnn]


class Wide(networks.Everything):
    """Convolutions that are large enough for algorithms with a workspace."""

    def __init__(self):
        super().__init__(32)


def largest_workspace(profile):
    return max(
        operation.workspace_bytes
        for operation in profile.operations
        if 'Convolution2DFunction' in operation.label
    )


def test_a_profile_has_the_workspaces(data):
    found = []
    for nbytes in (SMALL_BYTES, LARGE_BYTES):
        with workspaces_up_to(nbytes):
            _, session = networks.train_on_gpu(
                Wide, data, memory_limit='1GB', planner='in-core'
            )
        found.append(largest_workspace(session.profile))
        predicted = session.plan.predicted_peak_bytes
        assert predicted == session.statistics()['peak_bytes']
    assert found[0] + SMALL_BYTES < found[1] < found[0] + LARGE_BYTES


@pytest.fixture(scope='module')
def plain(data):
    """What plain Chainer gives with small and large workspaces."""
    known = {}

    def of(nbytes, autotune=False):
        if (nbytes, autotune) not in known:
            with workspaces_up_to(nbytes), chainer.using_config('autotune', autotune):
                known[nbytes, autotune], _ = networks.train_on_gpu(Wide, data)
        return known[nbytes, autotune]

    return of


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize('autotune', [False, True])
@pytest.mark.parametrize('planner', ['swap-all', 'hybrid', 'checkpoint-sqrt'])
def test_the_limit_changes_no_algorithm(planner, autotune, data, plain):
    """Algorithms differ in bits here, and the fastest one has a workspace."""
    with workspaces_up_to(LARGE_BYTES), chainer.using_config('autotune', autotune):
        _, session = networks.train_on_gpu(
            Wide, data, memory_limit='1GB', planner='in-core'
        )
        limit = int(session.statistics()['in_core_peak_bytes'] * 0.9)
        result, session = networks.train_on_gpu(
            Wide, data, memory_limit=limit, planner=planner
        )
        figures = session.statistics()
        assert figures['state'] == 'guided'
        assert figures['footprint_bytes'] <= limit
    networks.assert_same(plain(LARGE_BYTES, autotune), result)
    with pytest.raises(AssertionError):
        networks.assert_same(plain(SMALL_BYTES), result)
