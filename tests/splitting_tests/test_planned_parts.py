"""Iterations recorded with plenty of memory, planned where only parts fit."""

from __future__ import annotations

import dataclasses
import io
import types
from collections.abc import Sequence

from support import networks  # imports chainer_hybridmem before chainer

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainer_hybridmem as hybridmem
from chainer_hybridmem.errors import InfeasibleError
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.planning.records.splits import in_parts, part_of
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import lower_bound
from chainer_hybridmem.planning.simulation import make_problem, simulate
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.reporting.page import Run, make_data
from chainer_hybridmem.training.devices import open_device
from chainer_hybridmem.training.devices.host.device import HostOffsets
from chainer_hybridmem.training.recording import Detail
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.planning import plan_maker
from chainer_hybridmem.training.session.session import Session
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.splitting import splitter
from chainer_hybridmem.training.splitting.splitter import Trials

ITERATIONS = 8
PLENTY = 10**9
LIMIT = 2_300_000  # the largest function needs 3.6 MB as a whole
TIGHT_LIMIT = 1_300_000
NEW_WAY = 'does not fit as a whole'


@pytest.fixture(scope='module')
def recorded(data):
    """Profile of an iteration that nothing has cut; with everything it computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, 'detail', Detail(parts=True, keep_small_arrays=True))
        outcome, session = networks.train(
            networks.Everything, data, memory_limit=PLENTY, planner='swap-all'
        )
    assert session.statistics()['split'] == 0
    return session.profile, outcome


def test_trials_change_nothing(in_core, recorded):
    networks.assert_same(in_core, recorded[1])


def test_a_session_tries_nothing_by_itself(data):
    _, session = networks.train(networks.Everything, data[:4], memory_limit=PLENTY)
    assert session.profile is not None and not session.profile.splits


def test_only_the_trial_iteration_tries(data, monkeypatch):
    made = []

    def counted(*arguments):
        made.append(arguments)
        return Trials(*arguments)

    monkeypatch.setattr(Session, 'detail', Detail(parts=True, keep_small_arrays=True))
    monkeypatch.setattr(splitter, 'Trials', counted)
    networks.train(
        networks.Everything, data[:5], memory_limit=PLENTY, planner='swap-all'
    )
    assert len(made) == 1


def test_every_way_in_a_profile_needs_less_than_the_whole(recorded):
    profile, _ = recorded
    several = {split.operation for split in profile.splits if split.function}
    alone = [split for split in profile.splits if split.operation not in several]
    assert {'Sigmoid', 'MaxPoolingND', 'BatchNormalizationGrad'} <= (
        {split.name for split in alone}
    )
    for split in alone:
        k = split.operation
        cut = in_parts(profile, (part_of(split),)).operations[k]
        assert cut.workspace_bytes < profile.operations[k].workspace_bytes


@pytest.mark.parametrize('planner', ['swap-all', 'hybrid'])
def test_a_plan_for_less_than_the_largest_function(recorded, planner):
    profile, _ = recorded
    with pytest.raises(InfeasibleError, match='The least memory of any plan is'):
        make_plan(profile, LIMIT, planner, splitting=False)
    plan = make_plan(profile, LIMIT, planner)
    assert plan.parts and all(part.exact for part in plan.parts)
    check_plan(profile, plan, LIMIT)
    assert simulate(profile, plan).peak_bytes == plan.predicted_peak_bytes <= LIMIT
    with pytest.raises(InfeasibleError):
        make_plan(profile, TIGHT_LIMIT, planner)
    plan = make_plan(profile, TIGHT_LIMIT, planner, splitting=True)
    assert not all(part.exact for part in plan.parts)
    check_plan(profile, plan, TIGHT_LIMIT)


def test_a_report_has_what_parts_need(recorded):
    profile, _ = recorded
    whole = make_plan(profile, 2 * LIMIT, 'swap-all', splitting=False)
    plan = make_plan(profile, LIMIT, 'swap-all')
    data = make_data(profile, [Run('parts', plan), Run('whole', whole)], 'p')
    parts, larger = data['runs']
    for run, planned in ((parts, plan), (larger, whole)):
        loads = run['moments']['load_bytes']
        assert loads == list(simulate(profile, planned).load_bytes)
        columns = zip(*run['moments']['group_bytes'], strict=True)
        assert [sum(column) for column in columns] == loads
        rest = run['moments']['group_bytes'][data['groups'].index('rest')]
        assert len(set(rest)) == 1  # all else has a name and its own size
    assert parts['figures']['parts'] == len(plan.parts) > 0


@pytest.mark.parametrize(
    ('limit', 'splitting'), [(LIMIT, 'exact'), (TIGHT_LIMIT, True)]
)
def test_a_session_finds_the_same_parts_and_peak(data, recorded, limit, splitting):
    plan = make_plan(recorded[0], limit, 'swap-all', splitting=splitting)
    _, session = networks.train(
        networks.Everything,
        data,
        memory_limit=limit,
        planner='swap-all',
        splitting=splitting,
    )
    used = session._runtime.splitter.used
    found = {(*place, way.cut, way.parts, way.exact) for place, way in used.items()}
    planned = {
        (p.operation, p.function, p.name, p.cut, p.parts, p.exact) for p in plan.parts
    }
    assert planned == found
    assert plan.predicted_peak_bytes == session.statistics()['guided_peak_bytes']


@pytest.mark.parametrize(
    ('planner', 'limit', 'splitting'),
    [('swap-all', LIMIT, 'exact'), ('hybrid', 1_500_000, True)],
)
def test_guided_iterations_begin_with_the_planned_parts(
    data, recorded, monkeypatch, planner, limit, splitting
):
    def planned_for_less(session, problem):
        session.options.limit_bytes = limit

    monkeypatch.setattr(Session, 'detail', Detail(parts=True, keep_small_arrays=True))
    monkeypatch.setattr(Session, 'observe_problem', planned_for_less)
    told = io.StringIO()
    actual, session = networks.train(
        networks.Everything,
        data,
        memory_limit=PLENTY,
        planner=planner,
        splitting=splitting,
        progress=told,
    )
    # The device would have had room: nothing has failed, the plan alone wants parts.
    assert NEW_WAY not in told.getvalue()
    figures = session.statistics()
    assert figures['split'] == len(session.plan.parts) > 0
    assert figures['guided_peak_bytes'] == figures['predicted_peak_bytes'] <= limit
    assert session._results.find_planned().problem.parts == session.plan.parts
    if splitting == 'exact':
        networks.assert_same(recorded[1], actual)
    else:
        np.testing.assert_allclose(actual['losses'], recorded[1]['losses'], 1e-4)


def test_the_bound_of_a_smaller_plan_is_that_with_parts(recorded, monkeypatch):
    slow = dataclasses.replace(recorded[0], link=Link(0.0, 1e6, 1e6), recipes=())
    problem = make_problem(slow)
    bound = lower_bound(fitted(problem, LIMIT), LIMIT).seconds
    assert bound > lower_bound(problem, LIMIT).seconds

    def smaller(problem, make_plan_for, *ignored, **options):
        return make_plan_for(LIMIT - 1000), None, True

    monkeypatch.setattr(plan_maker, 'plan_with_arena', smaller)
    monkeypatch.setattr(HostOffsets, 'needed', True)
    device = open_device('cpu', PLENTY)
    options = Options(LIMIT, 'swap-all')
    maker = plan_maker.PlanMaker(
        types.SimpleNamespace(device=device, options=options, tell=print)
    )
    plan = maker.make_plan(Guide([]), problem, 'swap-all', {})
    device.close()
    assert plan.memory_limit_bytes == LIMIT - 1000
    assert plan.lower_bound_seconds == bound


class Larger(chainer.ChainList):
    """What the backward of its largest function reads is half of what that needs."""

    def __init__(self) -> None:
        np.random.seed(0)
        ups = [L.Deconvolution2D(8, 8, 4, stride=2, pad=1) for _ in range(2)]
        super().__init__(L.Convolution2D(8, 8, 1), *ups)

    def forward(self, x: np.ndarray) -> chainer.Variable:
        for layer in self:
            x = F.relu(layer(x))
        return F.average(x)


def enlarge(
    limit: float, sizes: Sequence[int] = (16,)
) -> tuple[list[bytes], Session, str]:
    model, made, told = Larger(), [], io.StringIO()
    with hybridmem.optimize(model, int(limit), progress=told) as session:
        for size in sizes:
            for _ in range(ITERATIONS):
                loss = model(np.ones((size, 8, 8, 8), np.float32))
                model.cleargrads()
                loss.backward()
                made += [parameter.grad.tobytes() for parameter in model.params()]
    return made, session, told.getvalue()


def test_a_larger_limit_has_a_plan_where_a_smaller_one_has():
    """Iterations without a plan run as a whole what no plan has room for so."""
    expected, in_core, _ = enlarge(PLENTY)
    peak = in_core.statistics()['peak_bytes']
    for share in (0.7, 0.8, 0.9, 0.95, 0.99):
        made, session, told = enlarge(share * peak)
        figures = session.statistics()
        assert made == expected
        assert figures['state'] == 'guided', share
        assert figures['peak_bytes'] <= share * peak
        assert told.count('profiled again, in parts') == (0.88 < share < 0.98)


def test_parts_that_do_not_help_are_tried_once(monkeypatch):
    """Not by each kind of iteration that comes later."""
    peak = enlarge(PLENTY)[1].statistics()['peak_bytes']
    monkeypatch.setattr(Trials, 'end', lambda trials, place: None)
    with pytest.warns(UserWarning, match='That is what plans need'):
        _, session, told = enlarge(0.9 * peak, (16, 15))
    assert session.state == 'passive'
    assert told.count('profiled again, in parts') == 1
