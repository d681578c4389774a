"""The files of one planned iteration: profile, plan, measured timeline."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from chainer_hybridmem.errors import FormatError, PlanError
from chainer_hybridmem.planning.records import library

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.measured_timeline import Measured
    from chainer_hybridmem.planning.records.plan import Plan
    from chainer_hybridmem.planning.records.profile import Profile
    from chainer_hybridmem.planning.records.timeline import Timeline


def load_iteration(args: argparse.Namespace) -> tuple[Profile, Plan, Timeline]:
    """Reads profile and plan, and simulates the plan.

    Raises:
        FormatError: If one cannot be read, or they do not belong together.
    """
    profile = library.load_profile(args.profile)
    return profile, *load_plan(args.plan, profile, args.profile)


def load_plan(path: str, profile: Profile, profile_path: str) -> tuple[Plan, Timeline]:
    """Reads a plan, and simulates it on the profile that it is for.

    Raises:
        FormatError: If it cannot be read, or is not a plan for the profile, naming
            both files.
    """
    from chainer_hybridmem.planning.simulation import simulate

    plan = library.load_plan(path)
    try:
        return plan, simulate(profile, plan)
    except PlanError as error:
        raise FormatError(
            f'{path} is not a plan for {profile_path}: {error}'
        ) from error


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
