"""Plans that another rank has made are judged like a rank's own."""

from __future__ import annotations

from types import SimpleNamespace

from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.search import deadline
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.planning.machine_plans import MachinePlans
from chainer_hybridmem.training.session.planning.plan_maker import PlanMaker
from chainer_hybridmem.training.session.setting.ranks import Decision


def test_the_wait_for_a_plan_leaves_time_to_judge_it(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(deadline, 'clock', lambda: seconds[0])
    problem = make_problem(toys.chain())
    plan = make_plan(problem, problem.in_core.peak_bytes, 'in-core')

    def wait(topic, decide):
        seconds[0] += 100
        return Decision(plan, True)

    runtime = SimpleNamespace(
        device=None,
        tell=None,
        options=SimpleNamespace(
            planner='hybrid', planner_options={'time_budget': 1.0}, limit_bytes=1
        ),
        ranks=SimpleNamespace(decide=wait, forget_changes=lambda topic: None),
    )
    maker = PlanMaker(runtime)
    maker.begin_pause()
    assert not maker.find_deadline(problem).is_over

    def judge(guide, problem, plan):
        assert not maker.find_deadline(problem).is_over
        return plan

    monkeypatch.setattr(maker, 'take', judge)
    taken = MachinePlans(runtime, maker).decide('plan', Guide([]), problem, None)
    assert taken is plan
    seconds[0] += 2
    assert maker.find_deadline(problem).is_over
