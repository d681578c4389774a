"""Processes that share a link: lockstep is a link with a part of the rate."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ranks, toys
from support.drawn_plans import drawn_case

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.records.sharing import share_link, share_links
from chainer_hybridmem.planning.simulation import make_problem, simulate

shares = st.sampled_from([0.3, 0.5, 0.9, 1.0])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), shares, shares, shares)
def test_lockstep_is_a_link_with_a_part_of_the_rate(
    seed: int, n: int, out: float, back: float, duplex: float
) -> None:
    problem, plan = drawn_case(seed, out, back, duplex)
    shared = make_problem(share_links(problem.profile, n))
    expected = ranks.seconds_of(problem, plan, n)
    found = simulate(shared, plan)
    assert found.total_seconds == pytest.approx(expected, rel=1e-9)
    assert found.peak_bytes == simulate(problem, plan).peak_bytes


def test_what_all_carry_is_divided_evenly() -> None:
    link = Link(0.5, 12e9, 10e9, 0.9, 0.8, 0.7, 1e-6)
    shared = share_link(link, 4)
    assert shared == Link(0.5, 3e9, 2.5e9, 0.9, 0.8, 0.7, 1e-6, ranks=4)
    assert share_link(share_link(link, 2), 4) == shared
    assert share_link(shared, 1) == link


def test_the_disk_is_shared_as_well() -> None:
    profile = toys.chain()
    both = dataclasses.replace(profile, disk_link=Link(0.0, 4.0, 2.0))
    disk = share_links(both, 2).disk_link
    assert disk == Link(0.0, 2.0, 1.0, ranks=2)
    assert share_links(profile, 2).disk_link is None


@pytest.mark.parametrize('wrong', [0, -1, 1025, 2.0, True, '2'])
def test_what_is_no_number_of_processes(wrong: object) -> None:
    with pytest.raises(OptionError, match='a whole number from 1 to 1024'):
        share_link(Link(0.0, 1.0, 1.0), wrong)


def test_a_plan_for_a_link_alone_fits_the_shared_one() -> None:
    problem = make_problem(toys.chain())
    plan = make_plan(problem, 45 * toys.MIB)
    shared = make_problem(share_links(problem.profile, 4))
    assert simulate(shared, plan).total_seconds > plan.predicted_seconds
    assert simulate(shared, plan).peak_bytes == plan.predicted_peak_bytes
