"""Whatever times are measured, plans come to rest and the arena comes to stand."""

from __future__ import annotations

import itertools
import math

import pytest
from support import networks, virtual
from support.virtual import Machine

from chainer_hybridmem.training.devices.host.device import HostOffsets
from chainer_hybridmem.training.session.guides.guide import (
    LONGEST_WAIT,
    TIMING_RUNS,
    PlanPace,
)
from chainer_hybridmem.training.session.planning import (
    plan_maker,
    planning,
)

LIMIT = 4_400_000  # bytes; Everything needs 5.2 MB in-core
ITERATIONS = 30
LEARNING = 3  # iterations before there is a plan
SETTLING = 4  # guided ones at most until an arena stands; see docs/internals/memory.md
LAYING = 2  # iterations without an arena after a change


@pytest.fixture
def needs_arena(monkeypatch):
    """Plans are made so that their arena fits, as on a GPU."""
    monkeypatch.setattr(HostOffsets, 'needed', True)


class Watched:
    """What a session has done, iteration by iteration."""

    def __init__(self, data, **options):
        self.placing, self.missing, self.plans = [], [], []
        self.outcome, self.session = networks.train(
            networks.Everything,
            data,
            after=self._after,
            **{'memory_limit': LIMIT, 'link_bandwidth': '200MB/s', **options},
        )

    def _after(self, session, i):
        self.placing.append(session._runtime.instruments.placing)
        self.missing.append(session.statistics()['no_arena'])
        self.plans.append(session.plan)

    @property
    def changes(self):
        """Iterations that have followed other actions than the one before."""
        pairs = itertools.pairwise(self.plans)
        return [
            i + 1
            for i, (old, new) in enumerate(pairs)
            if old is not None and (old.maps, old.replays) != (new.maps, new.replays)
        ]

    def check(self):
        """The arena comes soon, and goes seldom and for a moment only."""
        first = self.placing.index(True)
        assert first <= LEARNING + SETTLING
        later = self.placing[first:]
        runs = [(on, len(list(same))) for on, same in itertools.groupby(later)]
        assert all(on or n <= LAYING for on, n in runs)
        changes = [i for i in self.changes if i > first]
        assert len(changes) <= 2  # for new times, and for an arena that does not fit


OPTIONS = {
    'unscheduled': {'planner': 'swap-all-unscheduled'},
    'hybrid': {},
}


@pytest.mark.matrix
@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('name', OPTIONS)
def test_under_a_hostile_clock(data, in_core, name, seed):
    """Every measurement is drawn by chance."""
    with Machine(virtual.draw(seed)).running():
        watched = Watched(data, **OPTIONS[name])
    networks.assert_same(in_core, watched.outcome)
    watched.check()


# -- what an arena waits for ---------------------------------------------------
def test_the_report_says_what_the_arena_waits_for(data):
    watched = Watched(data[:12])
    assert watched.missing[:3] == ['waits for a plan'] * 3
    laying = 'waits for two iterations in a row that follow the plan; {} logged'
    assert watched.missing[3:5] == [laying.format(0), laying.format(1)]
    assert watched.missing[-1] is None
    report = watched.session.report().splitlines()
    assert not any(row.startswith('arena  ') for row in report)
    watched = Watched(data[:4])
    report = watched.session.report().splitlines()
    assert any(row.split(maxsplit=1) == ['arena', laying.format(0)] for row in report)


def test_the_report_says_why_there_is_no_arena(data, monkeypatch):
    def refuse(self, arena, moves_in):
        return False

    monkeypatch.setattr(
        'chainer_hybridmem.training.devices.host.device.HostOffsets.follow', refuse
    )
    watched = Watched(data[:9])
    reason = 'none: no memory for it beside what the pool keeps'
    assert watched.missing[-1] == reason
    assert reason in watched.session.report()
    assert Watched(data[:6], arena=False).missing[-1] is None


def test_a_plan_leaves_room_for_what_the_pool_keeps(needs_arena, data, monkeypatch):
    follow, refused = HostOffsets.follow, []

    def refuse_once(self, arena, moves_in):
        refused.append(arena)
        return len(refused) > 1 and follow(self, arena, moves_in)

    monkeypatch.setattr(HostOffsets, 'follow', refuse_once)
    monkeypatch.setattr(HostOffsets, 'missing_bytes', 1 << 16)
    watched = Watched(data)
    assert watched.missing[-1] is None
    assert watched.session.last_iteration()['placed'] > 0
    assert refused[-1].footprint_bytes <= LIMIT - (1 << 16)


def refusing(monkeypatch, calls):
    """For these calls of the planner no arena fits; returns how many there were."""
    made = []
    plan_with_arena = plan_maker.plan_with_arena

    def refuse(*args, **kwargs):
        plan, arena, fits = plan_with_arena(*args, **kwargs)
        made.append(fits)
        return plan, arena, fits and len(made) not in calls

    monkeypatch.setattr(plan_maker, 'plan_with_arena', refuse)
    return made


def test_a_plan_that_is_not_followed_takes_no_arena_away(
    needs_arena, data, monkeypatch
):
    made = refusing(monkeypatch, calls=(2,))
    monkeypatch.setattr(planning, 'LEAST_GAIN', math.inf)  # nothing is better
    monkeypatch.setattr(  # nor as good as can be
        planning.Planning, '_lower_bound_seconds', lambda *of: 0.0
    )
    watched = Watched(data[:12], verify=3)  # timed once the arena stands
    assert len(made) == 2 and watched.missing[-1] is None
    assert watched.session._results.find_planned().arena.wanted


def test_an_arena_that_did_not_fit_gets_another_chance(needs_arena, data, monkeypatch):
    made = refusing(monkeypatch, calls=(1,))
    monkeypatch.setattr(planning, 'LEAST_GAIN', math.inf)
    watched = Watched(data[:12])
    assert len(made) == 2
    assert watched.missing[4] == f'none: {plan_maker.NONE_FITS}'
    assert watched.missing[-1] is None


def follow_until_timed(offsets_from: int, ranks: bool = False) -> list[int]:
    """A plan's iterations that are timed if its arena stands from one of them on."""
    pace = PlanPace()
    if ranks:
        pace.wait_for_ranks()
    pace.note_iteration(at_offsets=True)  # of the plan before
    pace.change_plan()
    timed = []
    for i in range(20):
        if pace.wants_times:
            pace.note_times([])
            timed.append(i)
        pace.note_iteration(at_offsets=i >= offsets_from)
    assert pace.timed
    return timed


def test_a_plan_is_timed_once_its_arena_stands():
    first = 2  # iteration at offsets, which is the first to touch that memory
    assert follow_until_timed(first) == [first + 1 + run for run in range(TIMING_RUNS)]
    none_wanted = 0
    assert follow_until_timed(none_wanted) == [1 + run for run in range(TIMING_RUNS)]
    late = [LONGEST_WAIT + run for run in range(TIMING_RUNS)]
    assert follow_until_timed(10) == follow_until_timed(100) == late


@pytest.mark.parametrize('offsets_from', [0, 2, 100])
def test_ranks_that_change_plans_later_are_waited_for(offsets_from):
    """Their arenas stand an iteration later; all wait for them in all-reduces."""
    alone = follow_until_timed(offsets_from)
    assert follow_until_timed(offsets_from, ranks=True) == [i + 1 for i in alone]
