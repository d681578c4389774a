# ruff: noqa: RUF009 - fields are made by functions that declare more of them
"""What a session may be told: each option is declared, checked and described here.

The command line reads its flags from the declarations, before anything is planned: what
takes long to import is imported by what needs it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from chainer_hybridmem.errors import OptionError, nearest
from chainer_hybridmem.planning.records.rules import check_rules, moves_maps, pairs_of
from chainer_hybridmem.planning.records.splits import EXACT, Splitting, check_splitting
from chainer_hybridmem.training.session.setting.cache_folder import open_folder
from chainer_hybridmem.training.session.setting.ranks import check_communicator
from chainer_hybridmem.units import FREE, parse_bandwidth, parse_bytes, parse_limit

if TYPE_CHECKING:
    from chainer_hybridmem.planning.simulation.problem import CrossIteration

SESSION_TOLERANCE = 0.005  # of the bound; measured times are not more exact than that
FOLDER = 'FOLDER'  # metavar of a path, which a child of the command has to find, too
RATE = 'RATE', parse_bandwidth
_PLACE = '{options}'  # of the options in a docstring

Documented = TypeVar('Documented', bound=Callable[..., Any])


class Flag(NamedTuple):
    """How a command line has an option.

    Attributes:
        help (str): What ``--help`` says.
        metavar (str or None): Of its value; None for a switch.
        read (callable): Makes the value of text, or raises OptionError.
        spelling (str or None): None for that of the option.
        repeated (bool): Whether it may be given several times.
    """

    help: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    spelling: str | None = None
    repeated: bool = False

    @classmethod
    def of_words(cls, help: str, words: Mapping[str, Any]) -> Flag:
        """A flag whose value is one of some words."""

        def read(text: str) -> Any:
            if text.lower() not in words:
                raise OptionError(f'{text!r} is not one of {", ".join(words)}')
            return words[text.lower()]

        return cls(help, f'{{{",".join(words)}}}', read)


def _option(
    default: Any = dataclasses.MISSING,
    check: Callable[[str, Any], Any] | None = None,
    flag: Flag | None = None,
    of_plans: bool = True,
    recorded: bool = False,
) -> Any:
    """Declares an option; its description is in the docstring.

    Args:
        default: Its default value; it has to be given without one.
        check: Takes name and value and returns the value that sessions use, or raises
            OptionError.
        flag: Of the commands that have one.
        of_plans: Whether another plan may be right with another value.
        recorded: Whether sessions that only record are told, too.
    """
    told = {'check': check, 'flag': flag, 'of_plans': of_plans, 'recorded': recorded}
    return dataclasses.field(default=default, metadata=told)


_of_run = functools.partial(_option, of_plans=False)
_of_device = functools.partial(_option, of_plans=False, recorded=True)
_of_problem = functools.partial(_option, recorded=True)


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise OptionError(f'{name} is {value!r}; True or False is needed.')


def _bandwidth(name: str, value: Any) -> float | None:
    return None if value is None else parse_bandwidth(value, name)


def _file_or_switch(name: str, value: Any) -> Any:
    if value in (True, False, None) or hasattr(value, 'write'):
        return value
    raise OptionError(
        f'{name} is {value!r}; True, False or a file to write to is needed.'
    )


def _device(name: str, value: Any) -> Any:
    from chainer_hybridmem.training.devices import parse_device

    if value not in (None, 'auto'):
        parse_device(value)
    return value


def _splitting(name: str, value: Any) -> Splitting:
    return check_splitting(value)


def _folder(name: str, value: Any) -> str | None:
    return None if value is None else open_folder(value)


def _rules(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    return pairs_of(check_rules(value))


def _communicator(name: str, value: Any) -> Any:
    if value is not None:
        check_communicator(value)
    return value


def _read_rule(text: str) -> tuple[str, str]:
    pattern, separator, says = text.rpartition('=')
    if not separator or not pattern.strip():
        raise OptionError(
            f"{text!r} is not of the form PATTERN=RULE, such as '*/conv1/*=keep'"
        )
    (checked,) = check_rules([(pattern.strip(), says)])
    return checked.pair


def _crossing(name: str, value: Any) -> Any:
    from chainer_hybridmem.planning.simulation.problem import crossing_of

    crossing_of(value)
    return value


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
        host_limit: Most bytes of RAM for the host copies of swapped feature maps, such
            as ``'8GiB'``. Beyond them, ``swap_dir`` is used; without it, no more is
            swapped. None: no limit or, with ``swap_dir``, no RAM.
        splitting: Whether a function that does not fit as a whole runs in parts:
            ``'exact'`` where that keeps every bit, True also where results are then
            equal up to rounding only, False never; see docs/guide/splitting.md.
        rules: What plans may do with feature maps, by name of a layer or function,
            such as ``{'*/conv1/*': 'keep', 'LSTM': 'no recompute', 'decoder/*': 'at
            most 2GiB'}``; see docs/guide/rules.md.
        verify: How many of the first guided iterations are checked bit by bit; True:
            three. See docs/guide/checking.md.
        progress: Whether to tell what the session does, or the file to tell.
        link_bandwidth: Host device only: most bytes per second and direction
            for swapping, such as ``'100MB/s'``.
        shared_link: Host device only: name of a link that processes of this machine
            share, such as ``'bus0'``. All that give the same name and
            ``link_bandwidth`` together copy no more than that; None for an own link.
        arena: Whether guided iterations allocate at places laid out beforehand, so
            that nothing is lost to fragmentation; see docs/internals/memory.md.
        cross_iteration: Whether optimizer states (``'states'``) or these and
            parameters (``'all'`` or True) may leave between their uses, too; see
            docs/guide/cross_iteration.md.
        disk_bandwidth: Host device only: like ``link_bandwidth``, for copies to and
            from ``swap_dir``.
        cache_dir: Folder in which plans are kept, so that the next process that trains
            the same iterations under the same circumstances follows them from its
            first one; see docs/guide/cache_dir.md.
        communicator: ChainerMN's, where several processes train together: those of one
            node measure their link at once and follow one plan, and ``host_limit`` is
            that of the node; see docs/guide/data_parallel.md.
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

    memory_limit: int | str = _of_run()  # its bytes count
    planner: Any = _option(None)  # a name, once it is checked
    device: str | None = _of_run(None, _device)  # the model tells
    swap_dir: str | None = _of_device(
        None,
        flag=Flag(
            'swap to files in this folder, not to RAM; with --host-limit, what RAM has '
            'no room for',
            FOLDER,
        ),
    )
    host_limit: int | str | None = _of_device(
        None,
        flag=Flag(
            'most RAM for what is swapped, such as 8GiB; the rest goes to the disk of '
            '--swap-dir (of hybridmem profile), or is not swapped; default: no limit',
            'SIZE',
            functools.partial(parse_bytes, least=0),
        ),
    )
    splitting: Splitting = _of_problem(
        EXACT,
        _splitting,
        Flag.of_words(
            'which functions run in parts where they do not fit as a whole: those that '
            'keep every bit (exact, the default), also those equal up to rounding '
            '(true), or none (false)',
            {'exact': EXACT, 'true': True, 'false': False},
        ),
    )
    rules: Any = _of_problem(  # pairs of pattern and rule, once they are checked
        None,
        _rules,
        Flag(
            'what plans may do with the feature maps of layers or functions: keep, '
            "swap, recompute, no keep, no swap, no recompute, 'at most SIZE'; may be "
            'given several times',
            'PATTERN=RULE',
            _read_rule,
            spelling='--rule',
            repeated=True,
        ),
    )
    verify: bool | int = _of_run(False, flag=Flag('check three guided iterations'))
    progress: Any = _of_run(
        False, _file_or_switch, Flag('tell what the session does'), recorded=True
    )
    link_bandwidth: Any = _of_device(
        None,
        _bandwidth,
        Flag('slow swapping down, such as 2GB/s; default as it is', *RATE),
    )
    arena: bool = _option(True, _switch)
    cross_iteration: CrossIteration = _of_problem(
        False,
        _crossing,
        Flag.of_words(
            'optimizer states, or these and parameters (all), may leave between their '
            'uses, too; default: they stay',
            {'states': 'states', 'all': 'all'},
        ),
    )
    disk_bandwidth: Any = _of_device(
        None,
        _bandwidth,
        Flag('slow copies to and from --swap-dir down, such as 200MB/s', *RATE),
    )
    shared_link: str | None = _of_device(  # its name is arbitrary
        None,
        flag=Flag(
            'share --link-bandwidth with all processes that give this name', 'NAME'
        ),
    )
    cache_dir: Any = _of_run(
        None, _folder, Flag('keep plans here for the next run', FOLDER)
    )
    communicator: Any = _of_run(None, _communicator)  # its ranks count
    keep_graph: bool = _of_run(False, _switch)
    planner_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        from chainer_hybridmem.planning.planners import DEFAULT
        from chainer_hybridmem.training.devices import host_limit_bytes
        from chainer_hybridmem.training.execution.verifier import iterations_of

        named = self.planner is not None
        rules = self.checked_rules = check_rules(self.rules)
        self.plans_anyway = named or bool(
            self.cross_iteration or any(map(moves_maps, rules))
        )
        if self.planner is None:
            default = {'tolerance': SESSION_TOLERANCE}
            self.plan_with(DEFAULT, {**default, **self.planner_options})
        else:
            self.plan_with(self.planner, self.planner_options)
        for field in dataclasses.fields(self):
            check = field.metadata.get('check')
            if check is not None:
                setattr(self, field.name, check(field.name, getattr(self, field.name)))
        self.verified_iterations = iterations_of(self.verify)
        self.limit_bytes = 0  # of what is free, it is known with the model
        if self.memory_limit != FREE:
            self.limit_bytes = parse_limit(self.memory_limit)
        elif self.communicator is not None:
            raise OptionError(
                f'memory_limit is {FREE!r}, which is another size for each rank; '
                f'name one for all, such as 8GiB.'
            )
        self.host_limit_bytes = host_limit_bytes(self.host_limit, self.swap_dir)
        if self.host_limit_bytes is not None:
            self.host_limit_bytes //= self.ranks_per_node

    @classmethod
    def of(
        cls, memory_limit: int | str, planner: str | None, others: dict[str, Any]
    ) -> Options:
        """Options by name; the planner's own among them.

        Raises:
            OptionError: If a name is nearly that of an option.
        """
        from chainer_hybridmem.planning.planners import DEFAULT, options_of

        names = OPTIONS.keys()
        own = {name: value for name, value in others.items() if name not in names}
        known = {name: value for name, value in others.items() if name in names}
        for name in own:
            hint = nearest(name, names)
            if hint and name not in options_of(planner or DEFAULT):
                raise OptionError(f'There is no option {name!r}.{hint}')
        return cls(memory_limit, planner, planner_options=own, **known)

    def plan_with(self, planner: str, planner_options: dict[str, Any]) -> None:
        """From now on plans are made by this planner.

        Raises:
            UnknownNameError: If there is none with this name.
            OptionError: If it has no such options, or not with these values.
        """
        from chainer_hybridmem.planning.planners import check_name, check_options

        planner_options = check_options(check_name(planner), planner_options)
        self.planner, self.planner_options = planner, planner_options

    def of_plans(self) -> dict[str, Any]:
        """Those that plans depend on; a kept plan counts only under the same ones."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.metadata.get('of_plans', True)
        }

    @property
    def ranks_per_node(self) -> int:
        """Processes that train together on this machine."""
        return 1 if self.communicator is None else int(self.communicator.intra_size)


OPTIONS = {  # by name; those of planners are others
    field.name: field
    for field in dataclasses.fields(Options)
    if field.name != 'planner_options'
}
USUAL = 9  # options come first; few programs need the others
RECORDED_WITH = [name for name in OPTIONS if OPTIONS[name].metadata['recorded']]


def documents_options(documented: Documented) -> Documented:
    """A decorator: docstring and signature name every option.

    Args:
        documented: A function or class that takes ``**options``; ``{options}`` in its
            docstring stands for their descriptions.
    """
    function: Any = vars(documented).get('__init__', documented)
    signature = inspect.signature(function)
    *given, rest = signature.parameters.values()
    names = {parameter.name for parameter in given}
    added = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in OPTIONS.values()
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
