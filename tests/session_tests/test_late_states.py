"""Optimizer states that come after the first iteration, as ChainerMN's do."""

from __future__ import annotations

import pytest
from support import networks

DATA = networks.batches(10)


def late(first):
    """Updates nothing before an iteration, as if its optimizer only handed things out.

    Args:
        first: The number of the first iteration that updates.
    """

    def before(model, i):
        if i == 0:
            model.disable_update()
        elif i == first:
            model.enable_update()

    return before


@pytest.mark.parametrize('first', [1, 2])
def test_states_of_a_later_iteration_are_in_the_profile(first):
    def train(**options):
        return networks.train(networks.Everything, DATA, before=late(first), **options)

    in_core = networks.train(networks.Everything, DATA, memory_limit='1GiB')[1]
    needed = in_core.statistics()['in_core_peak_bytes']
    found, session = train(memory_limit=int(0.7 * needed))
    networks.assert_same(train()[0], found)
    assert session.profile.initial_bytes == in_core.profile.initial_bytes
    assert session.statistics()['foreign_bytes'] == 0
    assert session.statistics()['guided_iterations'] >= 5
    assert session.plan.predicted_peak_bytes == pytest.approx(
        session.statistics()['guided_peak_bytes'], rel=0.01
    )
