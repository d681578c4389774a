"""What runs the iterations of a session."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable

import chainer

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.planning.planners import find_planner
from chainer_hybridmem.planning.records.profile import Phase, Profile
from chainer_hybridmem.planning.records.rules import (
    Rules,
    check_names,
    check_spelling,
    names_of,
)
from chainer_hybridmem.training.chainer_access.graph.function_nodes import (
    known_functions,
)
from chainer_hybridmem.training.chainer_access.models import device_of, name_device
from chainer_hybridmem.training.chainer_access.owners import model_arrays
from chainer_hybridmem.training.devices import measure_free, open_device, parse_device
from chainer_hybridmem.training.devices.protocol import Device
from chainer_hybridmem.training.execution import Executor
from chainer_hybridmem.training.execution.verifier import Followed, Verification
from chainer_hybridmem.training.session.setting.measuring_instruments import Instruments
from chainer_hybridmem.training.session.setting.options import Options
from chainer_hybridmem.training.session.setting.ranks import Ranks, open_ranks
from chainer_hybridmem.training.splitting import Splitter
from chainer_hybridmem.units import FREE, format_bytes

# Of memory that is free: for the context, kernels and libraries, which grow later.
FREE_MARGIN_SHARE, FREE_MARGIN_BYTES = 16, 2**30
FREE_HOST_SHARE = 4  # of RAM, for host copies: they take the RAM that they free


@dataclasses.dataclass(frozen=True)
class FreeMemory:
    """A limit that is all that is free on a model's device.

    Attributes:
        free_bytes (int): What was free.
        margin_bytes (int): Left for libraries and others.
        limit_bytes (int): The limit; what the model has taken already is in it.
        host_limit_bytes (int or None): For host copies: on a CPU, of the same RAM.
    """

    free_bytes: int
    margin_bytes: int
    limit_bytes: int
    host_limit_bytes: int | None

    @classmethod
    def measure(cls, model: chainer.Link, options: Options) -> FreeMemory:
        """What is free now.

        Args:
            model: Is on the device.
            options: Say where host copies go.

        Raises:
            OptionError: If the device does not tell.
        """
        name = _name_device(model, options.device)
        free, held = measure_free(name)
        margin = min(free // FREE_MARGIN_SHARE, FREE_MARGIN_BYTES)
        host_limit = options.host_limit_bytes
        room = free - margin
        if parse_device(name)[0] == 'host':
            held = sum(array.nbytes for array in model_arrays(model))
            if host_limit is None:
                host_limit = room // FREE_HOST_SHARE
            room -= min(room, host_limit)
        return cls(free, margin, room + held, host_limit)

    def __str__(self) -> str:
        told = f'{format_bytes(self.free_bytes)} less {format_bytes(self.margin_bytes)}'
        if self.host_limit_bytes:
            told += f' and {format_bytes(self.host_limit_bytes)} for host copies'
        return told


def open_device_of(model: chainer.Link, options: Options) -> Device:
    """Opens the device that the model is on.

    Args:
        model: Is trained there.
        options: Say which device is meant, and with which limits.

    Raises:
        OptionError: If the model is on another one.
        UnknownNameError: If there is no such device.
    """
    if options.memory_limit == FREE:
        found = FreeMemory.measure(model, options)
        options.limit_bytes = found.limit_bytes
        options.host_limit_bytes = found.host_limit_bytes
    return open_device(
        _name_device(model, options.device),
        options.limit_bytes,
        link_bandwidth=options.link_bandwidth,
        swap_dir=options.swap_dir,
        host_limit_bytes=options.host_limit_bytes,
        disk_bandwidth=options.disk_bandwidth,
        shared_link=options.shared_link,
    )


def _name_device(model: chainer.Link, device: str | None) -> str:
    """The device to open; the model must be on it already."""
    name = name_device(model)
    if device is None or device == 'auto':
        return name
    kind, number = parse_device(device)
    own_kind, own_number = parse_device(name)
    if kind != own_kind or number not in (None, own_number):
        raise OptionError(
            f'device is {device!r} but the model is on {device_of(model)}; move one of '
            f'them, for example with model.to_device.'
        )
    return name


class SessionRules:
    """Tells which rules an iteration's plan obeys.

    An iteration need not run every layer of the model: a rule about the generator says
    nothing about the discriminator's iterations. A rule is unknown if its pattern names
    no function that any planned iteration has run, and no layer that has not run yet.

    Args:
        rules (tuple of Rule): What the user says.
        model (Link): Its links have names.
    """

    def __init__(self, rules: Rules, model: chainer.Link) -> None:
        self._rules = rules
        self._paths = {path for path, _ in model.namedlinks() if path != '/'}
        self._met: set[str] = set()  # patterns that have named something
        if rules:
            check_spelling(rules, self._paths, known_functions())

    def choose(self, profile: Profile) -> Rules:
        """Those rules that name a function of an iteration.

        Raises:
            OptionError: If one names nothing here, and nothing anywhere else.
        """
        labels = [
            (op.label, op.index)
            for op in profile.operations
            if op.phase is Phase.FORWARD
        ]
        chosen = tuple(
            rule
            for rule in self._rules
            if any(rule.names(label, index) for label, index in labels)
        )
        self._met.update(rule.pattern for rule in chosen)
        run = {label.rpartition('/')[0] for label, _ in labels}
        absent = {
            name
            for path in self._paths
            if not any(f'{known}/'.startswith(f'{path}/') for known in run)
            for name in names_of(f'{path}/', 0)
        }
        for rule in self._rules:
            patterns = (rule.pattern, rule.pattern.rpartition('/')[0])
            elsewhere = any(
                fnmatch.fnmatchcase(name, pattern)
                for name in absent
                for pattern in patterns
                if pattern
            )
            if rule.pattern not in self._met and not elsewhere:
                check_names((rule,), profile)
        return chosen


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The parts that every iteration passes through.

    Attributes:
        options (Options): What the session is told; the planner may change between
            iterations.
        device (Device): Where iterations run.
        executor (Executor): Moves feature maps as a plan says.
        splitter (Splitter): Runs functions in parts.
        instruments (Instruments): Find something out about the iteration under way.
        rules (SessionRules): What plans obey.
        tell (callable): Takes a line of progress.
        ranks (Ranks or None): Those on this node, if there are several.
    """

    options: Options
    device: Device
    executor: Executor
    splitter: Splitter
    instruments: Instruments
    rules: SessionRules
    tell: Callable[[str], None]
    ranks: Ranks | None


def open_runtime(
    model: chainer.Link,
    options: Options,
    tell: Callable[[str], None],
    followed: Callable[[], Followed],
) -> Runtime:
    """Opens the device of a model, with all that runs iterations there.

    Args:
        model: Is trained.
        options: How.
        tell: Takes a line of progress.
        followed: Tells what the iteration under way follows.

    Raises:
        OptionError: If the model is on another device.
        UnknownNameError: If there is no such device.
        SessionError: If other ranks do not come.
    """
    device = open_device_of(model, options)
    executor = Executor(device, rules=options.checked_rules)
    whole = find_planner(options.planner).whole  # nothing runs in parts then
    splitter = Splitter(device, False if whole else options.splitting, tell)
    verified = options.verified_iterations
    verification = Verification(model, verified, followed)
    instruments = Instruments(device, executor, verification)
    rules = SessionRules(options.checked_rules, model)
    ranks = open_ranks(options.communicator, tell)
    return Runtime(options, device, executor, splitter, instruments, rules, tell, ranks)
