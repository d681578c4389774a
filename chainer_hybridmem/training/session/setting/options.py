"""What a session may be told: each option is declared, checked and described here."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners import (
    DEFAULT,
    check_name,
    check_options,
    find_planner,
    improvable_names,
    options_of,
)
from chainer_hybridmem.planning.records.rules import check_rules, moves_maps, pairs_of
from chainer_hybridmem.planning.records.splits import EXACT, Splitting, check_splitting
from chainer_hybridmem.planning.simulation.problem import CrossIteration, crossing_of
from chainer_hybridmem.training.devices import host_limit_bytes, parse_device
from chainer_hybridmem.training.execution.verifier import iterations_of
from chainer_hybridmem.training.session.setting.cache_folder import open_folder
from chainer_hybridmem.training.session.setting.ranks import check_communicator
from chainer_hybridmem.units import FREE, parse_bandwidth, parse_limit

SESSION_TOLERANCE = 0.005  # of the bound; measured times are not more exact than that

_SWITCHES = {'bool': 'True or False', 'bool | None': 'True, False or None'}  # by type
_PLACE = '{options}'  # of the options in a docstring

_NOT_OF_PLANS = frozenset(  # options with which the same plan is right
    {
        *('memory_limit', 'host_limit'),  # their bytes count
        *('device', 'link_bandwidth', 'disk_bandwidth', 'swap_dir'),  # the device tells
        'shared_link',  # the device tells whether there is one; its name is arbitrary
        *('progress', 'improve', 'feedback', 'cache_dir', 'verify', 'keep_graph'),
        'communicator',  # its ranks count
    }
)

Documented = TypeVar('Documented', bound=Callable[..., Any])


@dataclasses.dataclass
class Options:
    """What a session is told beside its model.

    Args:
        memory_limit: Most bytes on the compute device, such as ``'16GiB'``. With
            ``'free'``, what is free there when the session is made, less a sixteenth,
            1 GiB at most; on a CPU, less what ``host_limit`` allows, which is a quarter
            of it unless it is given or there is ``swap_dir``.
        planner: Name of the planner. With a name there is a plan also where
            everything fits; None: ``'hybrid'``, for iterations in which memory has
            been short. As long as it has not, nothing is recorded or planned.
        device: ``'cpu'``, ``'cuda'`` or ``'cuda:1'``; by default, and with ``'auto'``,
            the model's device.
        swap_dir: Host device only: folder for swapped feature maps instead of
            RAM or, with ``host_limit``, for those that RAM has no room for.
        link_bandwidth: Host device only: most bytes per second and direction
            for swapping, such as ``'100MB/s'``.
        shared_link: Host device only: name of a link that processes of this machine
            share, such as ``'bus0'``. All that give the same name and
            ``link_bandwidth`` together copy no more than that; None for an own link.
        progress: Whether to tell what the session does, or the file to tell.
        improve: Whether planner ``hybrid`` goes on searching in a thread of low
            priority. Give it where a core is idle, as with a GPU; where training
            uses all of them, it takes time from it.
        arena: Whether guided iterations allocate at places laid out beforehand, so
            that nothing is lost to fragmentation; see docs/internals/memory.md.
        feedback: Whether swap-ins that were late begin earlier in later iterations,
            as far as the plan's memory allows; None: with planner ``capuchin``.
        cross_iteration: Whether optimizer states (``'states'``) or these and
            parameters (``'all'`` or True) may leave between their uses, too; see
            docs/guide/cross_iteration.md.
        host_limit: Most bytes of RAM for the host copies of swapped feature maps, such
            as ``'8GiB'``. Beyond them, ``swap_dir`` is used; without it, no more is
            swapped. None: no limit or, with ``swap_dir``, no RAM.
        disk_bandwidth: Host device only: like ``link_bandwidth``, for copies to and
            from ``swap_dir``.
        splitting: Whether a function that does not fit as a whole runs in parts:
            ``'exact'`` where that keeps every bit, True also where results are then
            equal up to rounding only, False never; see docs/guide/splitting.md.
        cache_dir: Folder in which plans are kept, so that the next process that trains
            the same iterations under the same circumstances follows them from its
            first one; see docs/guide/cache_dir.md.
        verify: How many of the first guided iterations are checked bit by bit; True:
            three. See docs/guide/checking.md.
        communicator: ChainerMN's, where several processes train together: those of one
            node measure their link at once and follow one plan, and ``host_limit`` is
            that of the node; see docs/guide/data_parallel.md.
        rules: What plans may do with feature maps, by name of a layer or function,
            such as ``{'*/conv1/*': 'keep', 'LSTM': 'no recompute', 'decoder/*': 'at
            most 2GiB'}``; see docs/guide/rules.md.
        keep_graph: Whether a graph that outlives the session comes back whole, also
            beyond ``memory_limit``. Else it does as far as the limit has room, and a
            read of the rest says that it is gone.
        planner_options: Options of the planner; others are taken for those. With
            ``time_budget``, in seconds, nothing new is begun for the next iteration's
            plan or arena after so long: planner, checks and layouts together. A first
            plan is always made. By default that is what three plain iterations take,
            at least a second (12 on a GPU, where the limit needs the arena).

    Attributes:
        limit_bytes (int): ``memory_limit``.
        host_limit_bytes (int or None): ``host_limit``; None is no limit.
        verified_iterations (int): ``verify``.
        checked_rules (tuple of Rule): ``rules``.
        plans_anyway (bool): Whether iterations are recorded and planned where nothing
            has to leave, too. States can leave only in such iterations.

    Raises:
        UnknownNameError: If there is no such planner or device.
        OptionError: If a value cannot be used.
    """

    memory_limit: int | str
    planner: Any = None  # a name, once it is checked
    device: str | None = None
    swap_dir: str | None = None
    link_bandwidth: Any = None  # float, once it is checked, as the other one
    progress: Any = False  # bool or file
    improve: bool = False
    arena: bool = True
    feedback: bool | None = None
    cross_iteration: CrossIteration = False
    host_limit: int | str | None = None
    disk_bandwidth: Any = None
    shared_link: str | None = None
    splitting: Splitting = EXACT
    cache_dir: Any = None  # an absolute path, once it is checked
    verify: bool | int = False
    communicator: Any = None
    rules: Any = None  # pairs of pattern and rule, once they are checked
    keep_graph: bool = False
    planner_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        named = self.planner is not None
        rules = self.checked_rules = check_rules(self.rules)
        self.rules = pairs_of(rules)
        self.plans_anyway = named or bool(
            self.cross_iteration or self.improve or any(map(moves_maps, rules))
        )
        if self.planner is None:
            default = {'tolerance': SESSION_TOLERANCE}
            self.plan_with(DEFAULT, {**default, **self.planner_options})
        else:
            self.plan_with(self.planner, self.planner_options)
        self._check_switches()
        if self.improve and not find_planner(self.planner).improvable:
            raise OptionError(
                f'improve needs planner {" or ".join(map(repr, improvable_names()))}; '
                f'the planner is {self.planner!r}.'
            )
        crossing_of(self.cross_iteration)
        check_splitting(self.splitting)
        self.verified_iterations = iterations_of(self.verify)
        self.limit_bytes = 0  # of what is free, it is known with the model
        if self.memory_limit != FREE:
            self.limit_bytes = parse_limit(self.memory_limit)
        self.host_limit_bytes = host_limit_bytes(self.host_limit, self.swap_dir)
        if self.communicator is not None:
            check_communicator(self.communicator)
            if self.memory_limit == FREE:
                raise OptionError(
                    f'memory_limit is {FREE!r}, which is another size for each rank; '
                    f'name one for all, such as 8GiB.'
                )
        if self.host_limit_bytes is not None:
            self.host_limit_bytes //= self.ranks_per_node
        for name in ('link_bandwidth', 'disk_bandwidth'):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, parse_bandwidth(value, name))
        if self.device not in (None, 'auto'):
            parse_device(self.device)
        if self.cache_dir is not None:
            self.cache_dir = open_folder(self.cache_dir)

    @classmethod
    def of(
        cls, memory_limit: int | str, planner: str | None, others: dict[str, Any]
    ) -> Options:
        """Options by name; the planner's own among them.

        Raises:
            OptionError: If a name is nearly that of an option.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {'planner_options'}
        own = {name: value for name, value in others.items() if name not in names}
        known = {name: value for name, value in others.items() if name in names}
        for name in own:
            close = difflib.get_close_matches(name, names, 1)
            if close and name not in options_of(planner or DEFAULT):
                raise OptionError(
                    f'There is no option {name!r}. Did you mean {close[0]!r}?'
                )
        return cls(memory_limit, planner, planner_options=own, **known)

    def plan_with(self, planner: str, planner_options: dict[str, Any]) -> None:
        """From now on plans are made by this planner.

        Raises:
            UnknownNameError: If there is none with this name.
            OptionError: If it has no such options, or not with these values.
        """
        planner_options = check_options(check_name(planner), planner_options)
        self.planner, self.planner_options = planner, planner_options

    def of_plans(self) -> dict[str, Any]:
        """Those that plans depend on; a kept plan counts only under the same ones."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _NOT_OF_PLANS
        }

    @property
    def ranks_per_node(self) -> int:
        """Processes that train together on this machine."""
        return 1 if self.communicator is None else int(self.communicator.intra_size)

    @property
    def feeds_back(self) -> bool:
        """Whether late swap-ins are looked for."""
        if self.feedback is not None:
            return self.feedback
        return find_planner(self.planner).feeds_back

    def _check_switches(self) -> None:
        for field in dataclasses.fields(self):
            needed = _SWITCHES.get(str(field.type))
            value = getattr(self, field.name)
            if needed is None or isinstance(value, bool):
                continue
            if value is not None or 'None' not in needed:
                raise OptionError(f'{field.name} is {value!r}; {needed} is needed.')
        told = self.progress
        if told not in (True, False, None) and not hasattr(told, 'write'):
            raise OptionError(
                f'progress is {told!r}; True, False or a file to write to is needed.'
            )


def documents_options(documented: Documented) -> Documented:
    """A decorator: docstring and signature name every option.

    Args:
        documented: A function or class that takes ``**options``; ``{options}`` in its
            docstring stands for their descriptions.
    """
    function: Any = vars(documented).get('__init__', documented)
    signature = inspect.signature(function)
    *given, rest = signature.parameters.values()
    names = {parameter.name for parameter in given} | {'planner_options'}
    added = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in dataclasses.fields(Options)
        if field.name not in names
    ]
    function.__signature__ = signature.replace(parameters=[*given, *added, rest])
    if documented.__doc__ and Options.__doc__:  # there are none under python -OO
        documented.__doc__ = _with_descriptions(documented.__doc__, Options.__doc__)
    return documented


def _with_descriptions(text: str, options: str) -> str:
    """Puts the options' descriptions where a docstring has its place for them."""
    section = options.partition('Args:\n')[2].partition('\n\n')[0]
    lines = textwrap.dedent(section).replace('planner_options:', 'options:')
    line = next(line for line in text.splitlines() if _PLACE in line)
    indent = line[: line.index(_PLACE)]
    return text.replace(line, textwrap.indent(lines, indent))
