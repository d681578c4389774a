"""Trains what a case describes, with a session or without, and looks at everything."""

from __future__ import annotations

import collections
import contextlib
import random
import warnings
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import chainer_hybridmem
from chainer_hybridmem.planning import planners

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from support.drawn_plans import RANDOM, random_plan
from support.virtual import Conditions, Machine

from chainer_hybridmem.planning.records.profile import Link
from chainer_hybridmem.training.chainer_access import owners
from chainer_hybridmem.training.devices.link import LEAST_ROOM_BYTES
from chainer_hybridmem.training.execution import table
from chainer_hybridmem.training.recording import profile_builder, recipe_trials, trials
from chainer_hybridmem.training.session.guides import guide as guides
from chainer_hybridmem.training.session.setting import link_measurement
from chainer_hybridmem.training.splitting.splitter import SUM, SUM_IN_PLACE, Splitter

from .cases import DEEP, UNNAMED, Case, Step
from .layers import Layer, bring, overwrite, reach
from .places import place

Observation = dict[str, Any]
CLASSES = 5
READS = 'what backward reads'
# How late copies are at most, in what they take, for each way to run them.
LATENESS = {0.0: 1000.0, 0.3: 30.0, 0.7: 3.0}


class DrawnError(Exception):
    """What a case raises itself."""


class Network(chainer.Chain):
    """The layers of a case, each reading some of the values before it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.back = [back for _, _, back in case.layers]
        with self.init_scope():
            self.layers = chainer.ChainList(
                *(Layer(name, options) for name, options, _ in case.layers)
            )
            self.last = L.Linear(None, CLASSES)
            self.other = L.Linear(None, 2)

    def forward(self, x: Any, chance: random.Random) -> tuple[Any, Any]:
        """Two variables for losses, one of them from the middle."""
        values = [chainer.as_variable(x)]
        for layer, back in zip(self.layers, self.back, strict=True):
            layer.chance = chance
            values.append(layer(*(values[-min(b, len(values))] for b in back)))
        middle = F.tanh(bring(values[len(values) // 2], 'vector'))
        ends = self.last(F.tanh(bring(values[-1], 'vector'))), self.other(middle)
        del values, middle
        for layer in self.layers:
            if 'to write' in layer.state:
                overwrite(layer.state.pop('to write'))
            if 'to reach' in layer.state:
                reach(*layer.state.pop('to reach'))
        return ends


class Scaled(chainer.LinkHook):
    """A variable stands in for the weights of a link while that runs."""

    name = 'Scaled'

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def forward_preprocess(self, args: Any) -> None:
        weights = args.link.W
        self.kept.append(weights)
        if weights.array is not None:  # else the link is about to make it
            scale = F.sqrt(F.mean(weights * weights) + 1e-3)
            args.link.W = weights / F.broadcast_to(scale, weights.shape)

    def forward_postprocess(self, args: Any) -> None:
        kept = self.kept.pop()
        if kept.array is not None and args.link.W is not kept:
            args.link.W = kept


class Run:
    """One training run, step by step.

    Attributes:
        updates (int): Updates that have been made.
        updating (bool): Whether one is under way.
        seen (Observation): What the steps have shown beside the model.
        reads (Counter): What backward functions have read in the last step.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        mixed = case.dtype == 'mixed16'
        self.mode = chainer.mixed16 if mixed else np.dtype(case.dtype)
        self.dtype = np.dtype(np.float16) if mixed else self.mode
        self.deep = any(step.kind in DEEP for step in case.steps)
        self.updates = 0
        self.updating = False
        self.seen: Observation = {}
        self.reads: collections.Counter[Any] = collections.Counter()
        self.kept: Any = None
        self.chain: Any = None  # a variable whose graph lives over iterations
        self.links = 0  # iterations in it
        self.active: chainer_hybridmem.Session | None = None
        self.place = place()
        self.place.begin(case)
        with self.configured():
            self.model = Network(case)
            self.model.to_device(self.place.name)
            if case.training.get('replaced'):
                for link in self.model.links():
                    if isinstance(link, L.Linear | L.Convolution2D):
                        link.add_hook(Scaled())
            self.teacher: Any = None  # no part of what is trained
            if any(step.kind == 'teacher' for step in case.steps):
                self.teacher = Network(case)
                self.teacher.to_device(self.place.name)
            # One forward pass makes every parameter; else the first iteration does.
            if case.training['initialised']:
                self.evaluate(case.steps[0])
            self.optimizer = self._make_optimizer()
            if case.training['frozen'] and case.layers:
                self.model.layers[len(case.layers) // 2].disable_update()
            self.inputs = [self._batch(step) for step in case.steps]

    def _make_optimizer(self) -> Any:
        training = self.case.training
        rate = {} if training['optimizer'] in ('Adam',) else {'lr': 0.002}
        optimizer = getattr(chainer.optimizers, training['optimizer'])(**rate)
        optimizer.setup(self.model)
        if training['decay']:
            optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.001))
        if training['clip']:
            optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))
        return optimizer

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """Chainer's configuration of the case."""
        with (
            chainer.using_config('dtype', self.mode),
            chainer.using_config('type_check', False),  # it takes time
            np.errstate(all='ignore'),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter('ignore')
            yield

    def _batch(self, step: Step) -> tuple[Any, Any]:
        rng = np.random.RandomState(step.seed)
        x = rng.randn(step.batch, 3, 6, 6).astype(self.dtype)
        t = rng.randint(0, CLASSES, step.batch).astype(np.int32)
        return self.model.device.send((x, t))

    def _losses(self, step: Step, inputs: Any, salt: int = 0) -> tuple[Any, Any]:
        x, t = inputs
        y, side = self.model(x, random.Random(step.seed + salt))
        loss = F.softmax_cross_entropy(y, t, enable_double_backprop=self.deep)
        return loss, F.mean(side * side)

    def _forward(self, step: Step) -> None:
        x, _ = self._batch(step)
        y, side = self.model(x, random.Random(step.seed))
        self.seen['evaluated'] = y.array.tobytes() + side.array.tobytes()

    def evaluate(self, step: Step) -> None:
        """Forward only, as in a validation."""
        with chainer.no_backprop_mode(), chainer.using_config('train', False):
            self._forward(step)

    def update(self) -> None:
        """One update of the parameters."""
        self.updating = True
        self.optimizer.update()
        self.updates += 1
        self.updating = False

    def step(self, number: int) -> None:
        """One iteration."""
        step = self.case.steps[number]
        inside = self.case.training['inside']
        inputs = self._batch(step) if inside else self.inputs[number]
        self.seen.clear()
        self.reads = collections.Counter()
        if not step.keep:
            self.kept = None
        with self.place.reading(_reads, self.reads):
            getattr(self, '_' + step.kind.replace(' ', '_'))(step, inputs)
        if step.evaluate == 'after':
            self.evaluate(step)

    # -- kinds of iterations ---------------------------------------------------
    def _backward(self, step: Step, loss: Any, **options: Any) -> None:
        if step.evaluate == 'between':
            self.evaluate(step)
        test = self.case.training.get('test_backward', False)
        hoard = self.model.xp.empty(step.hoard << 10, np.uint8)
        with chainer.using_config('train', not test):
            loss.backward(**options)
        del hoard
        self.seen['loss'] = loss.array.tobytes()
        if step.keep:
            self.kept = loss

    def _plain(self, step: Step, inputs: Any) -> None:
        loss, _ = self._losses(step, inputs)
        self.model.cleargrads()
        self._backward(step, loss)
        del loss
        self.update()

    def _accumulate(self, step: Step, inputs: Any) -> None:
        self.model.cleargrads()
        for salt in range(2):
            loss, _ = self._losses(step, inputs, salt)
            self._backward(step, loss)
            del loss
        self.update()

    def _two_losses(self, step: Step, inputs: Any) -> None:
        loss, other = self._losses(step, inputs)
        self.model.cleargrads()
        self._backward(step, loss)
        other.backward()
        del loss, other
        self.update()

    def _sum(self, step: Step, inputs: Any) -> None:
        loss, other = self._losses(step, inputs)
        total = loss + F.cast(other, loss.dtype) * 0.5
        del loss, other
        self.model.cleargrads()
        self._backward(step, total)
        del total
        self.update()

    def _retain_grad(self, step: Step, inputs: Any) -> None:
        loss, _ = self._losses(step, inputs)
        self.model.cleargrads()
        self._backward(step, loss, retain_grad=True)
        del loss
        self.update()

    def _grad(self, step: Step, inputs: Any) -> None:
        x = chainer.Variable(inputs[0])
        loss, _ = self._losses(step, (x, inputs[1]))
        (slope,) = chainer.grad([loss], [x])
        self.seen['slope'] = b'' if slope is None else slope.array.tobytes()
        self.model.cleargrads()
        self._backward(step, loss)
        del loss
        self.update()

    def _penalty(self, step: Step, inputs: Any) -> None:
        """Gradients of gradients."""
        x = chainer.Variable(inputs[0])
        loss, _ = self._losses(step, (x, inputs[1]))
        (slope,) = chainer.grad([loss], [x], enable_double_backprop=True)
        if slope is not None:
            loss = loss + F.cast(F.sum(slope * slope), loss.dtype) * 0.1
        del slope
        self.model.cleargrads()
        self._backward(step, loss)
        del loss
        self.update()

    def _abandoned(self, step: Step, inputs: Any) -> None:
        """A forward pass that nobody needs."""
        loss, _ = self._losses(step, inputs, 1)
        self.seen['abandoned'] = loss.array.tobytes()
        del loss
        self._plain(step, inputs)

    def _interleaved(self, step: Step, inputs: Any) -> None:
        first, _ = self._losses(step, inputs)
        second, _ = self._losses(step, inputs, 1)
        self.model.cleargrads()
        self._backward(step, first)
        del first
        second.backward()
        del second
        self.update()

    def _again(self, step: Step, inputs: Any) -> None:
        """Backward of one graph twice."""
        loss, _ = self._losses(step, inputs)
        self.model.cleargrads()
        self._backward(step, loss)
        loss.backward()
        del loss
        self.update()

    def _no_update(self, step: Step, inputs: Any) -> None:
        loss, _ = self._losses(step, inputs)
        self.model.zerograds()
        self._backward(step, loss)
        if step.seed % 2:
            self.update()

    def _function(self, step: Step, inputs: Any) -> None:
        """The optimizer does it all."""
        self.updating = True
        self.optimizer.update(lambda: self._losses(step, inputs)[0])
        self.updates += 1
        self.updating = False

    def _error(self, step: Step, inputs: Any) -> None:
        """Something goes wrong in backward; the user goes on with what follows."""
        try:
            loss, _ = self._losses(step, inputs)
            self.model.cleargrads()
            with _Failing(step.seed % 7):
                loss.backward()
        except DrawnError:
            pass
        loss = None
        self._plain(step, inputs)

    def _cycle(self, step: Step, inputs: Any) -> None:
        """Backward reaches into the graphs of former iterations, now and then cut."""
        loss, side = self._losses(step, inputs)
        total = loss + F.cast(side, loss.dtype) * 0.1
        if self.chain is not None:
            total += F.cast(self.chain, loss.dtype) * 0.1
        self.chain = side * 0.5 if self.chain is None else side + self.chain * 0.5
        self.links += 1
        del loss, side
        self.model.cleargrads()
        self._backward(step, total)
        before_last = any(step is other for other in self.case.steps[-2:-1])
        if before_last or self.links == self.case.training['cycle']:
            total.unchain_backward()
            self.chain, self.links = None, 0
        del total
        self.update()

    def _adversarial(self, step: Step, inputs: Any) -> None:
        """One backward finds out where to push the inputs, another one learns."""
        x = chainer.Variable(inputs[0])
        loss, _ = self._losses(step, (x, inputs[1]))
        self.model.cleargrads()
        loss.backward()
        del loss
        pushed = inputs[0] if x.grad is None else inputs[0] + x.grad
        loss, _ = self._losses(step, (pushed, inputs[1]), 1)
        self.model.cleargrads()
        self._backward(step, loss)
        del loss
        self.update()

    def _teacher(self, step: Step, inputs: Any) -> None:
        """Another network, whose graph nobody needs, tells what is to be learnt."""
        loss, side = self._losses(step, inputs)
        with chainer.using_config('enable_backprop', step.seed % 2 == 0):
            _, told = self.teacher(inputs[0], random.Random(step.seed))
            aim = F.mean(told * told).array
            del told
        loss = loss + F.cast((side - aim) ** 2, loss.dtype)
        del side
        self.model.cleargrads()
        self._backward(step, loss)
        del loss
        self.update()

    # -- results ---------------------------------------------------------------
    def parameters(self) -> Observation:
        """Parameters and the states of their update rules."""
        found: Observation = {}
        for name, parameter in self.model.namedparams():
            found[name] = _bits(parameter.array)
            rule = parameter.update_rule
            for key, value in sorted((rule.state or {}).items()) if rule else ():
                found[f'{name}:{key}'] = _bits(value)
        return found

    def observe(self) -> Observation:
        """All that must be equal, bit for bit."""
        found = {**self.seen, **self.parameters(), READS: self.reads}
        for name, parameter in self.model.namedparams():
            found[f'{name}.grad'] = _bits(parameter._grad)
        for name, link in self.model.namedlinks():
            for persistent in sorted(link._persistent):
                found[f'{name}.{persistent}'] = _bits(getattr(link, persistent))
            held = getattr(link, 'state', {}).get('held')
            if held is not None:
                found[f'{name}.held'] = _bits(held.array), _bits(held.grad)
        for number, layer in enumerate(self.model.layers):
            if 'codes' in layer.state:
                found[f'effects {number}'] = _moved(layer.state)
            if hasattr(layer, 'lstm'):
                state = layer.lstm.h
                found[f'lstm {number}'] = state is not None and _bits(state.array)
        found['random'] = self.place.random_state()
        return found


def _moved(state: dict[str, Any]) -> Any:
    """What the functions of the program have changed."""
    keys = state['own'].get_state()[1].tobytes(), state['own'].get_state()[2]
    new, python = repr(state['new'].bit_generator.state), state['python'].getstate()
    figures = state['average'], state['codes'].tobytes(), len(state['seen'])
    return keys, new, python, figures


@contextlib.contextmanager
def _reads(found: collections.Counter[Any]) -> Iterator[None]:
    """Counts the contents of all that functions ask for in backward."""

    def noted(ask: Any) -> Any:
        def asked(function: Any) -> Any:
            result = ask(function)
            for variable in result:
                if variable is not None and variable.array is not None:
                    array = variable.array
                    name = type(function).__name__
                    found[name, array.shape, zlib.crc32(array.tobytes())] += 1
            return result

        return asked

    with contextlib.ExitStack() as stack:
        for name in ('get_retained_inputs', 'get_retained_outputs'):
            ask = noted(getattr(chainer.FunctionNode, name))
            patch = mock.patch.object(chainer.FunctionNode, name, ask)
            stack.enter_context(patch)
        yield


class _Failing(chainer.FunctionHook):
    """Raises at a backward function."""

    name = 'failing'

    def __init__(self, at: int) -> None:
        self.left = at

    def backward_preprocess(self, function: Any, in_data: Any, out_grad: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise DrawnError


def _bits(array: Any) -> Any:
    if array is None:
        return None
    array = np.asarray(chainer.get_device('@numpy').send(array))
    return array.dtype.str, array.shape, array.tobytes()


# -- sessions ------------------------------------------------------------------
@contextlib.contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """Odd memory and copies, a drawn link, and no map too small to move."""
    options = case.session
    machine = Machine(
        Conditions(
            seed=options['clock'],
            noise=1.0,
            link=options['speed'],
            lateness=LATENESS.get(options['copies'], 1.0),
        )
    )
    speed = options['speed']
    link = Link(1e-6, speed, speed * machine.chance.uniform(0.5, 2))
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        place().surround(enter, case, machine)
        enter(mock.patch.dict(planners.PLANNERS, {RANDOM: random_plan}))
        enter(
            mock.patch.object(
                link_measurement, 'measure_link', lambda device, **_: link
            )
        )
        enter(mock.patch.object(guides, 'TIMING_RUNS', options['timing_runs']))
        enter(mock.patch.object(Splitter, 'add_up', _short_sums(case)))
        enter(mock.patch.object(trials, 'TIMED_RUNS', 1))
        enter(mock.patch.object(trials, 'WALKED_BYTES', 0))
        unasked = options.get('unasked', table.MOST_UNASKED)
        enter(mock.patch.object(table, 'MOST_UNASKED', unasked))
        least = options['minimum_bytes']
        enter(mock.patch.object(profile_builder, 'MINIMUM_MAP_BYTES', least))
        enter(mock.patch.object(recipe_trials, 'SMALLEST_COPY_BYTES', least))
        yield


def _short_sums(case: Case, add_up: Any = Splitter.add_up) -> Any:
    """Adds gradients up; there has been no room for another array for some of them."""
    share, chance = case.session.get('sums', 0.0), random.Random(case.session['clock'])

    def short(self: Splitter, gradients: list[Any]) -> Any:
        if chance.random() < share:
            self.known[(*self.place, SUM)] = SUM_IN_PLACE
        return add_up(self, gradients)

    return short


def open_session(run: Run, limit_bytes: int, folder: str) -> chainer_hybridmem.Session:
    """The case's session for a run."""
    options = run.case.session
    share = options.get('host_share')
    host_limit = None if share is None else LEAST_ROOM_BYTES + int(share * limit_bytes)
    opened = chainer_hybridmem.optimize(
        run.model,
        f'{limit_bytes}B',  # with a unit, also one of which nobody thinks
        None if options['planner'] == UNNAMED else options['planner'],
        swap_dir=folder if options['file'] else None,
        link_bandwidth=options['link_bandwidth'],
        host_limit=host_limit,
        arena=options['arena'],
        cross_iteration=options['cross_iteration'],
        rules=options.get('rules'),
        keep_graph=any(step.kind == 'cycle' for step in run.case.steps),
        **options['options'],
    )
    opened._runtime.executor.maps.minimum_map_bytes = options['minimum_bytes']
    run.active = opened
    return opened


def ask(opened: chainer_hybridmem.Session, event: str, case: Case) -> None:
    """What a user may ask of a session between iterations."""
    if event == 'replan' and opened.profile is not None:
        planner, options = case.session['replan']
        # A planner that does not fit leaves the plan as it was.
        with contextlib.suppress(
            chainer_hybridmem.InfeasibleError,
            *([chainer_hybridmem.OptionError] if case.session.get('rules') else []),
        ):
            opened.replan(planner, **options)
    elif event == 'trace':
        opened.trace_iteration()
    elif event == 'retime' and opened.plan is not None:
        opened.retime()
    elif event == 'finish':
        opened.finish_iteration()
    elif event == 'report':
        opened.report()
        opened.statistics()


def in_core_bytes(case: Case, steps: int) -> tuple[int, int]:
    """Memory that plain Chainer needs between and in its first iterations."""
    run = Run(case)
    device = place().open_unlimited()
    device.memory.adopt(owners.model_arrays(run.model))
    device.memory.install(lambda missing: None)
    try:
        with run.configured():
            for number in range(steps):
                run.step(number)
        return device.memory.used_bytes, device.memory.peak_bytes
    finally:
        device.memory.uninstall()
        device.close()
