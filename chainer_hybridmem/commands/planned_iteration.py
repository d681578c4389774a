"""The files of one planned iteration: profile, plan, measured timeline."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chainer_hybridmem.errors import FormatError, PlanError
from chainer_hybridmem.planning.records import library

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.measured_timeline import Measured
    from chainer_hybridmem.planning.records.plan import Plan
    from chainer_hybridmem.planning.records.profile import Profile
    from chainer_hybridmem.planning.records.timeline import Timeline


@contextmanager
def belonging(plan: str, profile: str) -> Iterator[None]:
    """Where the plan of one file is applied to the profile of another.

    Raises:
        FormatError: If it is not a plan for it, naming both files.
    """
    try:
        yield
    except PlanError as error:
        raise FormatError(
            f'{plan} is not a plan for {profile}, make it again: {error}'
        ) from error


def load_iteration(args: argparse.Namespace) -> tuple[Profile, Plan, Timeline]:
    """Reads profile and plan, and simulates the plan.

    Raises:
        FormatError: If one cannot be read, or they do not belong together.
    """
    from chainer_hybridmem.planning.simulation import simulate

    profile, plan = library.load_profile(args.profile), library.load_plan(args.plan)
    with belonging(args.plan, args.profile):
        timeline = simulate(profile, plan)
    return profile, plan, timeline


def check_plan(profile: Profile, plan: Plan, path: str, profile_path: str) -> None:
    """Checks by simulating it that a plan is one for a profile.

    Raises:
        FormatError: If it is not a plan for the profile, naming both files.
    """
    from chainer_hybridmem.planning.simulation import simulate

    with belonging(path, profile_path):
        simulate(profile, plan)


def load_measured(path: str, plan: Plan, plan_path: str) -> Measured:
    """Reads the timeline of an iteration that has followed a plan.

    Raises:
        FormatError: If it followed one for another profile, naming both files.
    """
    measured = library.load_timeline(path)
    theirs, ours = measured.profile_fingerprint, plan.profile_fingerprint
    if theirs != ours:
        raise FormatError(
            f'{path} was measured with a plan for profile {theirs}, {plan_path} is for '
            f'profile {ours}; trace an iteration of this one.'
        )
    return measured
