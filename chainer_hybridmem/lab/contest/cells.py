"""Runs cells: one entrant on one instance at one limit, in a process of its own.

A process is warm when a cell begins: compiled functions are loaded, the instance is
read. It is ended when a cell takes longer than allowed, and another one goes on. What
it answers is a plan or offsets, as text; the checks of this process say whether they
hold and what they take, whatever the entrant says.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from chainer_hybridmem import timing
from chainer_hybridmem.errors import HybridMemoryError, OptionError, UnknownNameError
from chainer_hybridmem.lab.contest import checkmate_rules, monet_rules
from chainer_hybridmem.lab.contest.instances import (
    LAYOUT,
    MONET,
    STAGED,
    Instance,
    Known,
)
from chainer_hybridmem.lab.importing import monet
from chainer_hybridmem.lab.importing.checkmate import KIB, UNIT_SECONDS
from chainer_hybridmem.lab.importing.graphs import Buffer, GraphNode, build_profile
from chainer_hybridmem.lab.importing.reading import read_data
from chainer_hybridmem.planning.layouts.layout import Layout, check_layout
from chainer_hybridmem.planning.layouts.offline import exact, given, smartpool
from chainer_hybridmem.planning.layouts.trace import Trace
from chainer_hybridmem.planning.planners import (
    PLANNERS,
    check_options,
    find_planner,
    make_plan,
    options_of,
)
from chainer_hybridmem.planning.planners import names as planner_names
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.plan_file import parse_plan, serialise_plan
from chainer_hybridmem.planning.records.profile import Link, Profile
from chainer_hybridmem.planning.records.rules import check_rules, pairs_of
from chainer_hybridmem.planning.records.validation import check_plan
from chainer_hybridmem.planning.search.bound import TRUST, bound_of_schedules
from chainer_hybridmem.planning.search.candidates import (
    KEEP,
    RECOMPUTE,
    Search,
    least_memory,
)
from chainer_hybridmem.planning.search.planner_options import read_value
from chainer_hybridmem.planning.simulation import simulate
from chainer_hybridmem.planning.simulation.problem import (
    Problem,
    make_problem,
    with_parts,
    with_profile,
)
from chainer_hybridmem.units import parse_bytes

LEAVES = 0.8  # of the time limit, for searches that are told how long to search
START_SECONDS = 300.0  # to start a process, which may compile
_WARM_NODES = 24

# Of the way from the least limit; a smaller one does not always need less of MONeT's.
SHARES = 1, 0.95, 0.9, 0.85, 0.8, 0.7, 0.5, 0
MORE = 'more'  # in an answer that a better one may follow

Answer = dict[str, Any]


# -- entrants -----------------------------------------------------------------
def keep_all(problem: Problem, limit_bytes: int) -> Plan:
    """Keeps everything until backward has read it for the last time."""
    search = Search(problem, limit_bytes, barrier=False)
    return search.finish('keep all', search.evaluate(search.fill(KEEP)))


def recompute_all(problem: Problem, limit_bytes: int) -> Plan:
    """Makes everything again that can be; keeps the rest."""
    search = Search(problem, limit_bytes, barrier=False)
    action = np.where(problem.recomputable, RECOMPUTE, KEEP).astype(np.int64)
    return search.finish('recompute all', search.evaluate(action))


def _by_name(planner: str) -> Callable[[Problem, int], Plan]:
    return lambda problem, limit_bytes: make_plan(problem, limit_bytes, planner)


def no_reuse(trace: Trace) -> Layout:
    """Every buffer beside all others."""
    return given(trace, [int(o) for o in np.cumsum((0, *trace.sizes))[:-1]])


TRIVIAL_PLANS: dict[str, Callable[[Problem, int], Plan]] = {
    'keep all': keep_all,
    'swap all': _by_name('swap-all'),
    'square root': _by_name('checkpoint-sqrt'),
    'recompute all': recompute_all,
}
TRIVIAL_LAYOUTS: dict[str, Callable[[Trace], Layout]] = {'no reuse': no_reuse}
LAYOUTS: dict[str, Callable[[Trace], Layout]] = {'smartpool': smartpool, 'exact': exact}
BOUND = 'bound'  # of every schedule of Checkmate's form, on its instances


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entrant on one instance at one limit.

    Attributes:
        instance (Instance): The instance.
        known (Known): The limit, and what is known for it.
        entrant (str): A planner, a pool, a trivial answer, or a bound.
        time_limit (float): Seconds after which it is ended.
        best (float): The best value known when it begins; a bound needs it.
    """

    instance: Instance
    known: Known
    entrant: str
    time_limit: float
    best: float = math.inf


def list_cells(
    instances: Iterable[Instance],
    entrants: Iterable[str],
    time_limit: float,
) -> list[Cell]:
    """All cells; the trivial answers are always in.

    Args:
        instances: To be played.
        entrants: Names of planners, with options as in :func:`read_entrant`, and of
            layouts, and ``'bound'``.
        time_limit: Seconds for each answer.

    Raises:
        UnknownNameError: If there is no such planner or layout.
        OptionError: If a planner has no such option.
    """
    names = list(dict.fromkeys(entrants))
    for name in names:
        _check_name(name)
    plans = [*TRIVIAL_PLANS, *(name for name in names if _plans(name))]
    layouts = [*TRIVIAL_LAYOUTS, *(name for name in names if name in LAYOUTS)]
    bounds = [name for name in names if name == BOUND]
    by_kind = {LAYOUT: layouts, **{kind: [*plans, *bounds] for kind in STAGED}}
    return [
        Cell(instance, known, entrant, time_limit)
        for instance in instances
        for known in instance.known
        for entrant in by_kind.get(instance.task, by_kind.get(instance.kind, plans))
    ]


def read_entrant(name: str) -> tuple[str, dict[str, Any]]:
    """A planner and its options, as ``hybrid:time_budget=50,seed=1``."""
    planner, _, told = name.partition(':')
    pairs = (pair.partition('=') for pair in told.split(',') if pair)
    return planner, {key: read_value(value) for key, _, value in pairs}


def _plans(name: str) -> bool:
    """Whether there is a planner with this name."""
    planner, _ = read_entrant(name)
    return planner in planner_names()


def _check_name(name: str) -> None:
    if _plans(name):
        check_options(*read_entrant(name))
        return
    if name in LAYOUTS or name == BOUND:
        return
    known = dict.fromkeys((*planner_names(), *LAYOUTS, BOUND))
    close = difflib.get_close_matches(name, known, 1)
    hint = f' Did you mean {close[0]!r}?' if close else ''
    raise UnknownNameError(
        f'There is no planner or layout {name!r}.{hint} There are: {", ".join(known)}.'
    )


# -- the process --------------------------------------------------------------
def _serve(pipe: Connection) -> None:
    """Answers cells until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    read = functools.lru_cache(1)(_read)
    warm = functools.cache(_warm)
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        try:
            problem = read(cell.instance)
            if cell.instance.task != LAYOUT:
                warm(cell.entrant)
        except HybridMemoryError as error:
            pipe.send({'why': str(error)})
            continue
        pipe.send(None)  # it begins
        for answer in _answers(cell, problem):
            pipe.send(answer)


def _read(instance: Instance) -> Problem | Trace:
    return instance.trace() if instance.task == LAYOUT else instance.problem()


def _answers(cell: Cell, problem: Problem | Trace) -> Iterator[Answer]:
    """One answer, or a first one and a better one."""
    began, cpu = timing.now(), time.process_time()
    made = _made(cell, problem)
    while True:
        try:
            answer = next(made, None)
        except HybridMemoryError as error:
            answer = {'why': str(error)}
        except Exception as error:  # another package's, whatever it raises
            answer = {'why': f'{type(error).__name__}: {error}'}
        if answer is None:
            return
        yield {
            **answer,
            'wall_seconds': timing.now() - began,
            'cpu_seconds': time.process_time() - cpu,
        }


def _made(cell: Cell, problem: Problem | Trace) -> Iterator[Answer]:
    if isinstance(problem, Trace):
        layout = {**TRIVIAL_LAYOUTS, **LAYOUTS}[cell.entrant](problem)
        proven = layout.bound_bytes if cell.entrant in LAYOUTS else None
        yield {'offsets': layout.offsets, 'bound': proven}
    elif cell.entrant == BOUND:
        yield from _bounds(cell, problem)
    elif cell.entrant in TRIVIAL_PLANS:
        plan = _plan_in_form(cell, problem, TRIVIAL_PLANS[cell.entrant])
        yield {'plan': serialise_plan(plan)}
    else:
        make = functools.partial(_make_plan, cell.entrant, cell.time_limit)
        plan = _plan_in_form(cell, problem, make)
        # In MONeT's form a run in place takes less time than in the profile.
        planner, _ = read_entrant(cell.entrant)
        ours = planner in PLANNERS and cell.instance.kind != MONET
        bound = plan.lower_bound_seconds if ours else None
        yield {'plan': serialise_plan(plan), 'bound': bound}


def _plan_in_form(
    cell: Cell, problem: Problem, make: Callable[[Problem, int], Plan]
) -> Plan:
    """A plan; on MONeT's instances for less and less, until it fits in their form.

    There a map that a stage has read last still counts in the next one, unless that
    stage has made it, which a planner does not know. If none fits, it plans as if the
    next stage read each map as well.

    Raises:
        HybridMemoryError: If there is none.
    """
    limit_bytes = limit_of(cell, problem)
    if cell.instance.kind != MONET:
        return make(problem, limit_bytes)
    graph = _monet_graph(cell.instance.path)
    longer = with_profile(problem, _read_longer(problem))
    fingerprint = problem.profile.fingerprint()
    for planned in (problem, longer):
        least = min(least_memory(planned)[0], limit_bytes)
        for share in SHARES:
            plan = make(planned, least + int(share * (limit_bytes - least)))
            plan = dataclasses.replace(plan, profile_fingerprint=fingerprint)
            schedule = monet_rules.as_schedule(graph, problem.profile, plan)
            if monet_rules.judge(graph, schedule).peak_kib * KIB <= limit_bytes:
                return plan
    return plan


def _read_longer(problem: Problem) -> Profile:
    """The profile in which the operation after its last reads each map as well."""
    profile, maps = problem.profile, {storage.id for storage in problem.maps}
    storages = []
    for storage in profile.storages:
        after = max(storage.backward_uses, default=-1) + 1
        if storage.id in maps and 0 < after < len(profile.operations):
            uses = (*storage.backward_uses, after)
            storage = dataclasses.replace(storage, backward_uses=uses)
        storages.append(storage)
    return dataclasses.replace(profile, storages=tuple(storages))


def _bounds(cell: Cell, problem: Problem) -> Iterator[Answer]:
    """With fractions, then with whole operations in what is left of the time."""
    limit_bytes, began = limit_of(cell, problem), timing.now()
    bound = bound_of_schedules(problem, limit_bytes)
    yield {'bound': bound, MORE: True}
    left = LEAVES * cell.time_limit - 2 * (timing.now() - began)
    if left > 0 and bound < cell.best * (1 - TRUST):
        best = cell.best * (1 + 1e-9)
        whole = bound_of_schedules(problem, limit_bytes, best, left)
        bound = min(max(bound, whole), cell.best)
    yield {'bound': bound}


def _make_plan(
    entrant: str, time_limit: float, problem: Problem, limit_bytes: int
) -> Plan:
    """A search that would take longer than the cell is told to end before it."""
    planner, options = read_entrant(entrant)
    if 'time_budget' in options_of(planner):
        own = options.get('time_budget', find_planner(planner).defaults['time_budget'])
        if own is not None and own > LEAVES * time_limit:
            options['time_budget'] = LEAVES * time_limit
    return make_plan(problem, limit_bytes, planner, **options)


def _warm(entrant: str) -> None:
    """Has an entrant plan something small, or loading its code counts as planning."""
    n = _WARM_NODES
    nodes = [GraphNode(f'/{i}', False, 1e-3, (i,), (i + 1,)) for i in range(n)]
    nodes += [
        GraphNode(f'/{i}', True, 1e-3, (n - i, n + i), (n + i + 1,), n - 1 - i)
        for i in range(n)
    ]
    buffers = [Buffer(2**20) for _ in range(2 * n + 1)]
    problem = make_problem(build_profile(nodes, buffers, Link(1e-5, 1e9, 1e9), {}))
    limit_bytes = problem.in_core_peak_bytes * 2 // 3
    try:
        if entrant in TRIVIAL_PLANS:
            TRIVIAL_PLANS[entrant](problem, limit_bytes)
        elif entrant == BOUND:
            bound_of_schedules(problem, limit_bytes)
        else:
            _make_plan(entrant, 5.0, problem, limit_bytes)
    except HybridMemoryError:
        pass  # as its cells will say


class Runner:
    """A process that answers one cell after the other."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context('spawn')
        self._process: Any = None

    def run(self, cell: Cell) -> Answer:
        """What an entrant answers, or why it does not."""
        if self._process is None:
            self._start()
        self._pipe.send(cell)
        began = self._receive(START_SECONDS, 'reading the instance')
        if began is not None:
            return began
        began_at = timing.now()
        found = self._receive(cell.time_limit, 'planning')
        while found is not None and found.pop(MORE, False):
            left = max(cell.time_limit - (timing.now() - began_at), 0.0)
            better = self._receive(left, 'planning')
            if better is None or 'why' in better:
                break
            found = better
        return {'why': 'no answer'} if found is None else found

    def _receive(self, seconds: float, what: str) -> Answer | None:
        try:
            if self._pipe.poll(seconds):
                answer: Answer | None = self._pipe.recv()
                return answer
            why = f'{what} took more than {seconds:g} s'
        except (EOFError, OSError):
            why = f'its process ended while {what}'
        self.close()
        return {'why': why, 'wall_seconds': seconds}

    def _start(self) -> None:
        self._pipe, other = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def run_cells(
    cells: Iterable[Cell], best_known: Mapping[tuple[str, str], float] | None = None
) -> Iterator[dict[str, Any]]:
    """Runs cells one after the other; a row of plain values for each.

    Args:
        cells: To be run.
        best_known: Values of earlier runs, by instance and limit.
    """
    runner = Runner()
    problems = functools.lru_cache(1)(_read)
    best = dict(best_known or {})
    try:
        for cell in cells:
            case = cell.instance.name, cell.known.limit
            published = math.inf if cell.known.best is None else cell.known.best
            answer = runner.run(
                dataclasses.replace(cell, best=min(best.get(case, math.inf), published))
            )
            row = {
                'instance': cell.instance.name,
                'task': BOUND if cell.entrant == BOUND else cell.instance.task,
                'limit': cell.known.limit,
                'entrant': cell.entrant,
                'trivial': cell.entrant in {**TRIVIAL_PLANS, **TRIVIAL_LAYOUTS},
                'best_known': cell.known.best,
                'bound_known': cell.known.bound,
                'known_by': cell.known.by,
                'known_seconds': cell.known.search_seconds,
                'bound': answer.get('bound'),
                'wall_seconds': answer.get('wall_seconds'),
                'cpu_seconds': answer.get('cpu_seconds'),
            }
            if cell.entrant == BOUND:
                yield {**row, 'fits': False, 'value': None, 'why': answer.get('why')}
                continue
            try:
                value = _judge(cell, answer, problems)
                best[case] = min(best.get(case, math.inf), value)
                yield {**row, 'fits': True, 'value': value}
            except HybridMemoryError as error:
                yield {**row, 'fits': False, 'value': None, 'why': str(error)}
    finally:
        runner.close()


# -- the checks ---------------------------------------------------------------
def limit_of(cell: Cell, problem: Problem) -> int:
    """The limit of a plan in bytes."""
    return parse_bytes(cell.known.limit, whole_bytes=problem.in_core_peak_bytes)


def _judge(
    cell: Cell, answer: Answer, read: Callable[[Instance], Problem | Trace]
) -> float:
    """Seconds of a plan, or bytes of a layout, that holds.

    Raises:
        HybridMemoryError: Why it does not.
    """
    if 'why' in answer:
        raise OptionError(answer['why'])
    problem = read(cell.instance)
    if isinstance(problem, Trace):
        layout = given(problem, answer['offsets'])
        check_layout(problem, layout)
        return float(layout.footprint_bytes)
    return _judge_plan(cell, problem, parse_plan(answer['plan']))


def _judge_plan(cell: Cell, problem: Problem, plan: Plan) -> float:
    limit_bytes = limit_of(cell, problem)
    rules = pairs_of(check_rules(cell.instance.rules))
    plan = dataclasses.replace(plan, rules=rules)
    check_plan(problem.profile, plan, limit_bytes)
    seconds = simulate(with_parts(problem, plan.parts), plan).total_seconds
    profile = problem.profile
    if cell.instance.kind in STAGED:
        cost = checkmate_rules.judge_plan(profile, plan, limit_bytes)
    elif cell.instance.kind == MONET:
        graph = _monet_graph(cell.instance.path)
        cost = monet_rules.judge_plan(graph, profile, plan, limit_bytes)
    else:
        return seconds
    return cost.units * UNIT_SECONDS


@functools.lru_cache(1)
def _monet_graph(path: str) -> monet.MonetGraph:
    """What a profile of MONeT's leaves out: what runs in place, and how fast."""
    return monet.read_graph(read_data(path))
