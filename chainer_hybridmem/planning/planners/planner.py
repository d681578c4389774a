"""What a planner is: a function, and what others have to know about it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.records.plan import Action, Plan
from chainer_hybridmem.planning.search.planner_options import Option
from chainer_hybridmem.planning.simulation.fitting import fitted
from chainer_hybridmem.planning.simulation.problem import Problem

PlannerFunction = Callable[..., Plan]


@dataclasses.dataclass(frozen=True)
class Planner:
    """A way to make plans.

    Attributes:
        name (str): How users ask for it.
        function (callable): ``(problem, limit_bytes, **options) -> Plan``.
        source (str): Where it is published.
        options (Mapping): What checks the values of its options, by name. The options
            are the parameters of ``function`` after the first two; those without an
            entry take any value.
        acts_always (bool): Whether maps leave also where everything fits.
        quick (bool): Whether it makes its plan without a search.
        needs_options (bool): Whether it does nothing useful without options.
        actions (frozenset of Action): Those that its plans have. A planner cannot obey
            rules that leave a map none of them.
        whole (bool): Whether its plans run every function as a whole, as plain Chainer
            does, also where an operation alone exceeds the limit.
    """

    name: str
    function: PlannerFunction
    source: str = ''
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    acts_always: bool = False
    quick: bool = False
    needs_options: bool = False
    actions: frozenset[Action] = frozenset(Action)
    whole: bool = False

    def fit(self, problem: Problem, limit_bytes: int) -> Problem:
        """The problem with functions in parts where this planner takes them so."""
        return problem if self.whole else fitted(problem, limit_bytes)

    def __call__(self, problem: Problem, limit_bytes: int, **options: Any) -> Plan:
        """Makes a plan; the options are not checked."""
        return self.function(problem, limit_bytes, **options)

    @property
    def defaults(self) -> dict[str, Any]:
        """Default values of all options, by name; ``inspect.Parameter.empty``: none."""
        _, _, *parameters = inspect.signature(self.function).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters}

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns plain values of the options.

        Raises:
            OptionError: If an option cannot have its value.
        """
        return {name: self._check(name, value) for name, value in options.items()}

    def _check(self, name: str, value: Any) -> Any:
        option = self.options.get(name)
        return value if option is None else option.check(name, value)


def as_planner(name: str, planner: Planner | PlannerFunction) -> Planner:
    """A planner under this name; a plain function has none of the traits.

    Raises:
        OptionError: If it is no function.
    """
    if isinstance(planner, Planner):
        return (
            planner if planner.name == name else dataclasses.replace(planner, name=name)
        )
    if not callable(planner):
        raise OptionError(
            f'Planner {name!r} is {planner!r}, which is no function of '
            '(problem, limit_bytes, **options).'
        )
    return Planner(name, planner)
