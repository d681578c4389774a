"""The plans that all ranks of a node follow: those of its first rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import cast

from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.simulation import Problem
from chainer_hybridmem.training.session.guides.guide import Guide
from chainer_hybridmem.training.session.planning.plan_maker import PlanMaker
from chainer_hybridmem.training.session.setting.ranks import Topic
from chainer_hybridmem.training.session.setting.runtime import Runtime


class MachinePlans:
    """Hands the first rank's plans to the others, and takes them there.

    Without ranks, every plan is the session's own.

    Args:
        runtime (Runtime): Has the ranks.
        maker (PlanMaker): Checks plans that come from another rank.
    """

    def __init__(self, runtime: Runtime, maker: PlanMaker) -> None:
        self._ranks = runtime.ranks
        self._tell = runtime.tell
        self._options = runtime.options
        self._maker = maker
        self._followed: weakref.WeakSet[Guide] = weakref.WeakSet()

    def is_followed(self, guide: Guide) -> bool:
        """Whether the guide's plan is another rank's: that one changes it."""
        return guide in self._followed

    def begin_with(self, guides: Iterable[Guide]) -> None:
        """Plans of earlier runs, which all ranks of the node have loaded."""
        if self._ranks is not None and not self._ranks.plans:
            self._followed.update(guides)

    def decide(
        self,
        topic: str,
        guide: Guide,
        problem: Problem,
        decide: Callable[[], Plan],
    ) -> Plan:
        """What the first rank decides at a point that all come to.

        Args:
            topic: What is decided, in a word.
            guide: Whose plan it becomes.
            problem: Of its iterations.
            decide: Decides, where no other rank does.
        """
        if self._ranks is None:
            return decide()
        decision = self._ranks.decide(self._topic(topic, problem), decide)
        self._ranks.forget_changes(self._topic('change', problem))
        if not decision.followed:
            self._followed.discard(guide)
            return cast(Plan, decision.value)
        return self._take(guide, problem, decision.value) or decide()

    def change(self, guide: Guide, problem: Problem, make: Callable[[], Plan]) -> Plan:
        """Another plan, which others may need in the same iteration or not at all.

        Args:
            guide: Whose plan it becomes.
            problem: Of its iterations.
            make: Makes one, where no other rank does.

        Raises:
            InfeasibleError: If there is none; the old plan stays, and whose it is.
        """
        if self._ranks is None:
            return make()
        if self._ranks.plans:
            guide.pace.wait_for_ranks()
            topic = self._topic('change', problem)
            return cast(Plan, self._ranks.change(topic, make))
        plan = None
        if guide in self._followed:
            plan = self._ranks.await_change(self._topic('change', problem))
        taken = plan and self._take(guide, problem, plan)
        if taken is None:
            taken = make()
            if plan is None and guide in self._followed:
                self._tell_alone('the first rank of the node has changed nothing')
            self._followed.discard(guide)
        return taken

    def announce(self, guide: Guide, problem: Problem, plan: Plan) -> None:
        """The first rank's plan has changed; the others will find it."""
        if self._ranks is not None and self._ranks.plans:
            guide.pace.wait_for_ranks()
            self._ranks.announce(self._topic('change', problem), plan)

    def end_iteration(self, guide: Guide, problem: Problem) -> Plan | None:
        """What the first rank has changed its plan to, if it has and this fits here.

        To be called at the end of every guided iteration, before anything is changed.
        """
        if self._ranks is None or guide.plan is None:
            return None
        topic = self._name('change', guide.plan.profile_fingerprint)
        plan = self._ranks.end_iteration(topic)
        if plan is None or guide not in self._followed:
            return None
        return self._take(guide, problem, plan)

    def close_iteration(self, guide: Guide) -> None:
        """Tells the others that nothing more is changed in a guided iteration."""
        if self._ranks is not None and self._ranks.plans and guide.plan is not None:
            topic = self._name('change', guide.plan.profile_fingerprint)
            self._ranks.close_iteration(topic)

    def _take(self, guide: Guide, problem: Problem, plan: Plan) -> Plan | None:
        """The first rank's plan if it fits here; else the guide gets its own."""
        self._maker.begin_pause()  # that this rank has waited for the plan is no search
        taken = self._maker.take(guide, problem, plan)
        if taken is not None:
            self._followed.add(guide)
            return taken
        self._followed.discard(guide)
        self._tell_alone('the plan of the node has no room')
        return None

    def _tell_alone(self, why: str) -> None:
        assert self._ranks is not None
        self._tell(f'rank {self._ranks.rank} plans alone: {why}')

    def _topic(self, kind: str, problem: Problem) -> Topic:
        return self._name(kind, problem.profile.fingerprint())

    def _name(self, kind: str, fingerprint: str) -> Topic:
        options = self._options
        return Topic(kind, (fingerprint, options.limit_bytes, options.planner))
