"""Programs after public bug reports train with the bits of plain Chainer."""

from __future__ import annotations

import functools
import gc
import io
import re
from typing import Any
from unittest import mock

import pytest
from support import reports
from support.scenarios import Run

from chainer_hybridmem import timing
from chainer_hybridmem.errors import SwapStoreError
from chainer_hybridmem.training.devices import ports
from chainer_hybridmem.training.execution import evictor
from chainer_hybridmem.training.execution.evictor import Rescue
from chainer_hybridmem.training.execution.live_map import LiveMap, State
from chainer_hybridmem.training.session.setting.measuring_instruments import (
    Instruments,
)
from chainer_hybridmem.training.splitting import rules

QUICK: dict[Any, dict[str, Any]] = {
    'hybrid': {'steps': 1000},
    'swap-opt': {'node_budget': 60},
    'pooch': {'node_budget': 60},
}


@functools.cache
def plain(program: Any) -> Run:
    run = Run(counted=True)
    program(run)
    return run


def train(program: Any, share: float, planner: str | None = None, **others: Any) -> Any:
    """The session of a run in part of the memory that plain Chainer needs."""
    expected = plain(program)
    options = {'memory_limit': int(share * expected.peak_bytes), **others}
    if planner is not None:
        options |= {'planner': planner, **QUICK.get(planner, {})}
    run = Run(options)
    program(run)
    for i, (left, right) in enumerate(zip(expected.records, run.records, strict=True)):
        assert left == right, f'update {i}'
    assert run.session.statistics()['footprint_bytes'] <= options['memory_limit']
    return run.session


@pytest.mark.matrix
# -- the model is read while a link runs -----------------------------------------
@pytest.mark.parametrize(
    'program', [reports.spectral_normalization, reports.weight_standardization]
)
@pytest.mark.parametrize(('share', 'planner'), [(0.75, None), (0.65, 'swap-all')])
def test_parameters_are_replaced_while_their_link_runs(program, share, planner):
    train(program, share, planner)


# -- two registries of one map ----------------------------------------------------
@pytest.mark.parametrize(
    ('program', 'share', 'planner'),
    [
        (reports.penalty_of_relu, 0.72, None),
        (reports.penalty_of_relu, 0.72, 'pooch'),
        (reports.penalty_of_leaky_relu, 0.75, 'hybrid'),
        (reports.penalty_of_convolutions, 0.65, None),
        (reports.penalty_of_convolutions, 0.65, 'swap-all'),
        (reports.penalty_of_convolutions, 0.7, 'swap-opt'),
    ],
)
def test_gradient_penalties(program, share, planner):
    train(program, share, planner)


@pytest.mark.parametrize('state', ['leaving', 'away', 'coming', 'gone'])
def test_a_forgotten_map_is_not_away_whoever_still_names_it(state, host_map):
    device, live = host_map
    if state != 'gone':
        live.start_swap_out()
    if state in ('away', 'coming'):
        live.release()
    if state == 'coming':
        live.start_swap_in()
    if state == 'gone':
        live.drop()
    copy = live.host.copy
    live.forget()
    used_bytes = device.memory.used_bytes
    for act in (
        *(live.start_swap_out, live.release, live.finish_and_stay, live.drop),
        *(live.start_swap_in, live.finish_swap_in, live.relocate),
    ):
        act()
    assert live.state is State.RESIDENT and live.host.copy is None
    assert device.memory.used_bytes == used_bytes
    if copy is not None:
        with pytest.raises(SwapStoreError, match='closed'):
            _ = copy.block


@pytest.fixture
def host_map():
    """A device and a map of it that a node of a living graph has."""
    import chainer
    import numpy as np

    from chainer_hybridmem.planning.records.profile import Slot, SlotKind
    from chainer_hybridmem.training.chainer_access.graph import refer
    from chainer_hybridmem.training.devices.host.device import HostDevice

    device = HostDevice(1 << 24)
    device.memory.install(lambda missing: None)
    try:
        variable = chainer.Variable(np.zeros(1 << 16, np.float32))
        node, array = variable.node, variable.array
        node.retain_data()
        live = LiveMap(device, device.arrays.allocation_id(array), array.nbytes)
        slot = Slot(0, SlotKind.OUTPUT, 0)
        live.add(refer(slot, node, device.arrays.capture(array)))
        del variable, array
        yield device, live
    finally:
        device.memory.uninstall()
        device.close()


# -- what is learnt about one signature -------------------------------------------
@pytest.mark.parametrize(
    ('length', 'share', 'planner'),
    [
        (2, 0.75, None),
        (3, 0.75, None),
        (3, 0.75, 'hybrid'),
        (5, 0.6, 'hybrid'),
    ],
)
def test_graphs_that_live_over_several_iterations(length, share, planner):
    program = _cycle(length)
    session = train(program, share, planner)
    if planner is not None:  # all that come again are learnt
        assert session.statistics()['guided_iterations'] >= length


@functools.cache
def _cycle(length: int) -> Any:
    return functools.partial(
        reports.cycle, length=length, steps=3, iterations=4 * length + 4
    )


# -- iterations that are new each time ----------------------------------------------
@pytest.mark.parametrize(
    ('program', 'iterations'),
    [(reports.new_lengths, 9), (reports.episodes, 6), (reports.new_durations, 5)],
)
def test_what_is_new_each_time_is_recorded_once_at_most(
    program, iterations, monkeypatch
):
    made, record = [0], Instruments.record

    def counted(*args: Any, **options: Any) -> Any:
        made[0] += 1
        return record(*args, **options)

    monkeypatch.setattr(Instruments, 'record', counted)
    session = train(functools.partial(program, iterations=iterations), 0.55)
    assert made[0] <= 1
    assert not session.statistics()['fits']


# -- rescues have a price ----------------------------------------------------------
@pytest.mark.parametrize(
    ('program', 'share'), [(reports.distillation, 0.55), (reports.new_sizes, 0.65)]
)
def test_garbage_is_not_collected_again_and_again_in_vain(program, share, monkeypatch):
    """Functions run in parts in every iteration: that is another way."""
    collector = mock.Mock(wraps=gc)
    monkeypatch.setattr(ports, 'gc', collector)
    monkeypatch.setattr(evictor, 'SHARE', 0.0)  # however fast the machine is
    in_parts, run = [0], rules.run

    def counted(*args: Any, **options: Any) -> Any:
        in_parts[0] += 1
        return run(*args, **options)

    monkeypatch.setattr(rules, 'run', counted)
    train(program, share)
    assert in_parts[0] >= 10
    assert collector.collect.call_count <= 2


def test_a_rescue_that_helps_is_free_and_one_that_does_not_has_a_price(monkeypatch):
    now, used = [0.0], [100]
    monkeypatch.setattr(timing, 'now', lambda: now[0])

    def act(seconds: float, freed: int) -> None:
        now[0] += seconds
        used[0] -= freed

    work = iter([(1.0, 10), (1.0, 0), (0.1, 5), (0.2, 0)])
    tried = Rescue(lambda: act(*next(work)), lambda: used[0])
    assert tried.pays
    assert tried.run() and tried.pays
    assert not tried.run() and not tried.pays
    now[0] = 1.0 / evictor.SHARE + 1
    assert tried.pays  # a small share of all time
    assert tried.run() and tried.vain_seconds == 0.0
    assert not tried.run() and tried.vain_seconds == pytest.approx(0.2)


# -- steps of several backward passes -----------------------------------------------
STEPS = 9
LEARNT = 7  # steps, by which every iteration of a step is known
PROGRAMS = {  # iterations in a step, and the program
    'vat': (
        3,
        functools.partial(reports.adversarial_training, steps=STEPS, searches=2),
    ),
    'maml': (5, functools.partial(reports.meta_learning, steps=STEPS)),
    'critics': (3, functools.partial(reports.several_critics, steps=STEPS)),
    'accumulation': (3, functools.partial(reports.accumulation, steps=STEPS)),
}


@pytest.mark.matrix
@pytest.mark.parametrize('name', PROGRAMS)
@pytest.mark.parametrize('planner', [None, 'hybrid'])
def test_every_iteration_of_a_step_that_repeats_is_guided(name, planner):
    """Also where they begin alike; only where nothing moves, there may be no plan."""
    passes, program = PROGRAMS[name]
    progress = io.StringIO()
    session = train(program, 0.75, planner, progress=progress)
    states = re.findall(r'iteration \d+ \(([^)]+)\)', progress.getvalue())
    learnt = states[passes * LEARNT :]
    assert set(learnt) <= {'guided', 'in-core'} and 'guided' in learnt
    if planner is not None:
        assert set(learnt) == {'guided'}
    left = re.findall(r'iteration (\d+) left', progress.getvalue())
    assert all(int(number) <= 3 * passes for number in left)
    told = {kind['state']: 0 for kind in session.statistics()['kinds']}
    for kind in session.statistics()['kinds']:
        told[kind['state']] += kind['iterations']
    assert told == {state: states.count(state) for state in told}


@pytest.mark.parametrize(('name', 'share'), [('maml', 0.75), ('vat', 0.85)])
def test_what_plans_leave_of_older_graphs_is_not_copied(name, share):
    """All iterations of a step copy no more than what has no room beside them."""
    passes, program = PROGRAMS[name]
    session = train(program, share, 'hybrid')
    expected_bytes = plain(program).peak_bytes
    entries = session._history.entries[-passes:]
    copied_bytes = sum(entry['swapped_bytes'] for entry in entries)
    assert copied_bytes <= 2 * (expected_bytes - session.limit_bytes)


@pytest.mark.matrix
# -- others --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ('program', 'share'),
    [(reports.adversarial_training, 0.7), (reports.meta_learning, 0.7)],
)
@pytest.mark.parametrize('planner', [None, 'hybrid'])
def test_several_backward_passes_in_a_step(program, share, planner):
    train(program, share, planner)


@pytest.mark.parametrize('planner', [None, 'swap-all'])
def test_convolutions_of_volumes_run_in_parts(planner):
    session = train(reports.volumes, 0.78, planner)
    assert session.last_iteration()['split'] > 0
