"""Plans whose arena fits, and what is followed where none does."""

from __future__ import annotations

import dataclasses
import io
import types

import pytest
from support import networks, toys

from chainer_hybridmem import jit
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planning.layouts import (
    check_layout,
    lay_out,
    offline,
    planned_trace,
)
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search import deadline
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.search.deadline import Deadline
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.session.planning import plan_maker
from chainer_hybridmem.training.session.planning.plan_maker import plan_with_arena
from chainer_hybridmem.training.session.setting.options import Options


def place(logs):
    return lay_out(logs, lambda nbytes: nbytes, 1)


class Wasteful:
    """Lays out like :func:`place` and needs so many bytes more."""

    def __init__(self, waste):
        self.waste = waste

    def __call__(self, logs):
        nbytes = place(logs).footprint_bytes + self.waste
        return types.SimpleNamespace(footprint_bytes=nbytes)


def setting(seed):
    problem = make_problem(toys.random_network(seed))
    least = least_memory(problem)[0]
    limit = (least + problem.in_core_peak_bytes) // 2
    limits = []

    def make_plan_for(limit_bytes):
        limits.append(limit_bytes)
        return make_plan(problem, limit_bytes, 'swap-opt')

    return problem, make_plan_for, limit, limits


@pytest.mark.parametrize('seed', range(8))
def test_whatever_fits_fits(seed):
    problem, make_plan_for, limit, limits = setting(seed)
    plan, arena, fits = plan_with_arena(problem, make_plan_for, place, limit, 0)
    assert limits[0] == limit
    assert plan.predicted_peak_bytes <= limit
    assert fits == (arena.footprint_bytes <= limit)
    if len(limits) > 1:
        assert max(limits[1:]) < limit


def test_a_plan_that_is_made_for_less():
    problem, make_plan_for, limit, limits = setting(1)
    wasteful = Wasteful((limit - least_memory(problem)[0]) // 4)
    plan, _, fits = plan_with_arena(problem, make_plan_for, wasteful, limit, 0)
    assert fits and len(limits) > 1
    assert plan.predicted_peak_bytes + wasteful.waste <= limit


def test_where_none_fits():
    problem, make_plan_for, limit, _ = setting(1)
    wasteful = Wasteful(limit)
    plan, _, fits = plan_with_arena(problem, make_plan_for, wasteful, limit, 0)
    assert not fits and plan.memory_limit_bytes <= limit


def test_a_spare_for_which_there_is_no_plan():
    problem, make_plan_for, limit, _ = setting(1)
    arguments = problem, make_plan_for, place
    for spare in (limit - least_memory(problem)[0] + 1, limit, 2 * limit):
        plan, _, fits = plan_with_arena(*arguments, limit, spare)
        assert not fits and plan.memory_limit_bytes == limit
    with pytest.raises(InfeasibleError):
        plan_with_arena(*arguments, least_memory(problem)[0] - 1, 0)


@pytest.fixture
def clock(monkeypatch):
    """What deadlines go by: its only number, in seconds."""
    seconds = [0.0]
    monkeypatch.setattr(deadline, 'clock', lambda: seconds[0])
    return seconds


@pytest.mark.parametrize('seed', range(8))
def test_an_arena_that_the_limit_needs_is_found_by_quick_layouts_too(seed):
    """Without one, memory would be unmapped in every iteration."""
    problem, make_plan_for, limit, _ = setting(seed)
    over = Deadline(0.0)

    def place_quickly(logs):
        arena = lay_out(logs, lambda nbytes: nbytes, 1, deadline=over)
        return types.SimpleNamespace(footprint_bytes=arena.footprint_bytes + waste)

    waste = (limit - least_memory(problem)[0]) // 16
    _, arena, fits = plan_with_arena(problem, make_plan_for, place_quickly, limit, 0)
    assert fits and arena.footprint_bytes <= limit


def test_a_layout_ends_with_its_deadline(clock):
    """It is a layout all the same."""
    problem, make_plan_for, limit, _ = setting(3)
    trace = planned_trace(problem.profile, make_plan_for(limit))
    search = offline.exact(trace)
    hurried = offline.exact(trace, deadline=Deadline(0.0))
    check_layout(trace, hurried)
    assert search.footprint_bytes <= hurried.footprint_bytes
    assert hurried.found_by == offline.smartpool(trace).found_by.replace(
        'smartpool', 'size, best fit'
    )


def test_compiling_does_not_count(monkeypatch):
    compiled = [0.0]
    monkeypatch.setattr(jit, 'compiling_seconds', lambda: compiled[0])
    end = Deadline(1000.0)
    compiled[0] += 60.0
    assert end.left_seconds > 1050.0
    assert not Deadline().is_over and Deadline(0.0).is_over


@pytest.mark.parametrize('needed, least', [(False, 1.0), (True, 5.0)])
def test_what_the_program_waits_for_at_most(needed, least, clock, monkeypatch):
    monkeypatch.setattr(plan_maker, 'LEAST_SECONDS', 1.0)
    monkeypatch.setattr(plan_maker, 'LEAST_SECONDS_NEEDED', 5.0)
    offsets = types.SimpleNamespace(needed=needed)
    options = Options('1GB')
    device = types.SimpleNamespace(offsets=offsets)
    maker = plan_maker.PlanMaker(
        types.SimpleNamespace(device=device, options=options, tell=print)
    )

    def left(in_core_seconds):
        problem = types.SimpleNamespace(in_core_seconds=in_core_seconds)
        return maker.find_deadline(problem).left_seconds

    assert left(0.1) == least
    clock[0] += 0.75
    assert left(50.0) == least - 0.75  # still the same pause
    maker.begin_pause()
    clock[0] += 1.0  # a profile is built and judged
    assert left(50.0) == 149.0
    options.plan_with('hybrid', {'time_budget': 0.25})
    maker.begin_pause()
    assert left(50.0) == 0.25


@pytest.mark.parametrize('fitting', range(len(plan_maker.ROOMS) + 1))
def test_fewer_drops_are_left_out_until_the_arena_fits_also_after_the_deadline(
    fitting, monkeypatch
):
    profile = toys.random_graph(3)
    end = profile.operations[-1].first_event  # the graph dies before the update
    problem = make_problem(dataclasses.replace(profile, graph_end_event=end))
    plan = make_plan(problem, problem.in_core_peak_bytes - 1, 'pooch')
    device = types.SimpleNamespace(clock=types.SimpleNamespace(asynchronous=True))
    maker = plan_maker.PlanMaker(
        types.SimpleNamespace(device=device, options=Options('1GB'), tell=print)
    )
    maker._deadline = Deadline(0.0)
    tried = []

    def fits(guide, problem, plan):
        tried.append(plan)
        return len(tried) > fitting

    monkeypatch.setattr(maker, 'arena_fits', fits)
    guide = types.SimpleNamespace(foreign=types.SimpleNamespace(nbytes=0))
    left = maker._leave_to_graph(guide, problem, plan)
    dropped = [sum(m.drop_before >= 0 for m in one.maps) for one in (*tried, plan)]
    assert dropped == sorted(dropped) and dropped[0] < dropped[-1]
    assert left is plan or left is tried[fitting]


def test_a_planner_takes_no_more_time_than_is_left(clock):
    problem, _, limit, _ = setting(1)
    alike = make_plan(problem, limit)
    for seconds in (0.0, 1e-9, 60.0):
        options = plan_maker._timely(problem, 'hybrid', {'seed': 0}, Deadline(seconds))
        assert options['time_budget'] <= max(seconds, 1e-3)
        plan = make_plan(problem, limit, **options)
        assert plan.predicted_peak_bytes <= limit
    assert plan.maps == alike.maps  # an hour changes nothing: the steps are the same
    given = {'time_budget': 3.0}
    for planner, seconds in (('hybrid', 2.0), ('exact', 2.0), ('hybrid', 3.0)):
        options = plan_maker._timely(problem, planner, given, Deadline(seconds))
        assert options == {'time_budget': seconds}
    assert plan_maker._timely(problem, 'pooch', {}, Deadline(1.0)) == {}


@pytest.mark.parametrize('seconds', [0.5, 1000.0])
def test_a_long_wait_for_a_plan_is_told_before(seconds):
    """Only one that may be long."""
    out = io.StringIO()
    networks.train(
        networks.Everything,
        networks.batches(4),
        memory_limit=4_400_000,
        planner='hybrid',
        time_budget=seconds,
        steps=100,
        progress=out,
    )
    text = out.getvalue()
    waits = text.find('planning, for about ')
    assert (0 < waits < text.index('planned in')) == (seconds > 3)
    assert ('for about' in text) == (seconds > 3)
