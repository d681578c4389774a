"""Recordings without times: the same memory, operations and recipes, in fewer runs."""

from __future__ import annotations

import dataclasses

import pytest
from session_tests.test_largest_batch import Trained

from chainer_hybridmem.commands import programs, training
from chainer_hybridmem.commands.networks import Network
from chainer_hybridmem.forecasting.recording_session import record_step
from chainer_hybridmem.planning.records.profile import Profile
from chainer_hybridmem.training.recording import trials


def without_times(profile: Profile) -> Profile:
    operations = [
        dataclasses.replace(op, device_seconds=0.0, host_seconds=0.0)
        for op in profile.operations
    ]
    recipes = [dataclasses.replace(recipe, seconds=0.0) for recipe in profile.recipes]
    return dataclasses.replace(
        profile, operations=tuple(operations), recipes=tuple(recipes)
    )


def record(timed: bool, parts: bool) -> tuple[Profile, int]:
    trained = Trained()
    (kind,) = record_step(trained.step, trained.model, 4, parts, timed)
    profile = kind.profile
    return profile, len(trained.sizes)


@pytest.mark.parametrize('parts', [False, True])
def test_memory_and_recipes_are_the_same(parts):
    timed, steps = record(True, parts)
    untimed, fewer = record(False, parts)
    assert fewer < steps
    assert timed.recipes and any(recipe.covers for recipe in timed.recipes)
    left, right = without_times(timed), without_times(untimed)
    for field in dataclasses.fields(Profile):
        if field.name != 'link':
            assert getattr(left, field.name) == getattr(right, field.name), field.name


def test_a_replay_runs_once(monkeypatch):
    runs = []
    run = trials.run_trial

    def counted(*args):
        runs.append(args[1])
        return run(*args)

    monkeypatch.setattr(trials, 'run_trial', counted)
    record(True, False)
    often = len(runs)
    runs.clear()
    record(False, False)
    assert 0 < len(runs) < often / 2


def test_the_commands_stop_where_enough_is_recorded(monkeypatch):
    begun, finished = [], []
    step = training.Training.step

    def counted(self):
        begun.append(1)
        step(self)
        finished.append(1)

    monkeypatch.setattr(training.Training, 'step', counted)
    recorded = programs.record(Network('alexnet', 2, 67, device='cpu'))
    assert recorded.find_largest().profile.recipes
    assert len(begun) == 3 and len(finished) == 2
