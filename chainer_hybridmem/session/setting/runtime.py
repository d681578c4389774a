"""What runs the iterations of a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chainer

from chainer_hybridmem.devices.protocol import Device
from chainer_hybridmem.execution import Executor
from chainer_hybridmem.execution.verifier import Followed, Verification
from chainer_hybridmem.planners import find_planner
from chainer_hybridmem.records.rules import check_rules
from chainer_hybridmem.session.setting.device_choice import open_device_of
from chainer_hybridmem.session.setting.measuring_instruments import Instruments
from chainer_hybridmem.session.setting.options import Options
from chainer_hybridmem.session.setting.ranks import Ranks, open_ranks
from chainer_hybridmem.session.setting.session_rules import SessionRules
from chainer_hybridmem.splitting import Splitter


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The parts that every iteration passes through.

    Attributes:
        device (Device): Where iterations run.
        executor (Executor): Moves feature maps as a plan says.
        splitter (Splitter): Runs functions in parts.
        instruments (Instruments): Find something out about the iteration under way.
        rules (SessionRules): What plans obey.
        tell (callable): Takes a line of progress.
        ranks (Ranks or None): Those on this node, if there are several.
    """

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
    may_drop = options.host_limit_bytes is not None
    executor = Executor(device, may_drop=may_drop, rules=check_rules(options.rules))
    whole = find_planner(options.planner).whole  # nothing runs in parts then
    splitter = Splitter(device, False if whole else options.splitting, tell)
    verified = options.verified_iterations
    verification = Verification(device, model, verified, followed)
    instruments = Instruments(device, executor, verification)
    rules = SessionRules(options.rules, model)
    ranks = open_ranks(options.communicator, tell)
    return Runtime(device, executor, splitter, instruments, rules, tell, ranks)
