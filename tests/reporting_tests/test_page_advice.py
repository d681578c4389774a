"""What a page says to do next."""

from __future__ import annotations

import numpy as np
import pytest

from chainer_hybridmem.reporting.page.advice import advise
from chainer_hybridmem.reporting.page.prices import Prices
from chainer_hybridmem.units import parse_bytes

MIB = 2**20
LIMIT = 100 * MIB


def prices(falls=0.0):
    return Prices(np.zeros(1), 1.2, 10 * MIB, 1.2 - falls)


def plan(limit, overhead, planner='hybrid'):
    return {
        'planner': planner,
        'memory_limit_bytes': limit * MIB,
        'fits': overhead is not None,
        'overhead': overhead,
    }


def test_the_plan_that_saves_most_for_its_memory_is_named():
    planned = [plan(103, 0.16), plan(150, 0.1), plan(160, None), plan(90, 0.3)]
    found = advise(prices(), LIMIT, 1.2, 1.0, planned)
    assert found['more'] and found['bytes'] == 3 * MIB
    assert found['seconds'] == pytest.approx(0.04)
    assert found['planner'] == 'hybrid'
    assert parse_bytes(found['limit']) >= 103 * MIB


def test_the_proven_bound_tells_it_where_no_plan_does():
    found = advise(prices(falls=0.05), LIMIT, 1.2, 1.0, [plan(90, 0.3)])
    assert found['more'] and found['bytes'] == 10 * MIB and found['planner'] is None
    assert found['seconds'] == pytest.approx(0.05)


def test_less_that_would_do_as_well_is_told():
    planned = [plan(90, 0.2), plan(80, 0.204), plan(70, 0.25), plan(120, 0.199)]
    found = advise(prices(), LIMIT, 1.2, 1.0, planned)
    assert not found['more'] and found['bytes'] == 20 * MIB


def test_nothing_is_said_where_nothing_is_worth_a_change():
    assert advise(prices(falls=0.001), LIMIT, 1.2, 1.0, [plan(90, 0.3)]) is None
