"""A network with everything in it, recorded at several batch sizes."""

import pytest
from support import networks, recordings

from chainer_hybridmem.forecasting.estimation import SamplePair


@pytest.fixture(scope='session')
def profiles():
    """Profiles of :class:`networks.Everything` by batch size."""
    return {b: recordings.recorded(networks.Everything, b) for b in (2, 4, 6, 8)}


@pytest.fixture(scope='session')
def pair(profiles):
    """Two of them, matched."""
    return SamplePair.match(profiles[4], profiles[6], (4, 6))
