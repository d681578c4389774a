"""What reports say about sessions whose recording ran functions in parts."""

from __future__ import annotations

import json
import re

from support import networks  # imports chainer_hybridmem before chainer

# isort: split
import pytest

from chainer_hybridmem.commands.arguments import Limit
from chainer_hybridmem.commands.compare import compare_one
from chainer_hybridmem.commands.report import KEPT_IN_PARTS, make_in_core
from chainer_hybridmem.errors import InfeasibleError, OptionError
from chainer_hybridmem.forecasting.batches import find_largest_batch
from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records.profile_file import (
    parse_profile,
    serialise_profile,
)
from chainer_hybridmem.planning.simulation import make_problem
from chainer_hybridmem.planning.simulation.problem import with_parts, with_plain_peak
from chainer_hybridmem.reporting.page import Run, make_data
from chainer_hybridmem.training.recording import Detail
from chainer_hybridmem.training.session.session import Session
from chainer_hybridmem.units import format_bytes

ITERATIONS = 8
LIMIT = 2_300_000  # the largest function needs 3.6 MB as a whole
PLENTY = 10**9


@pytest.fixture(scope='module')
def limited(data):
    """A session that finds out while it trains what has to run in parts."""
    _, session = networks.train(
        networks.Everything, data, memory_limit=LIMIT, planner='pooch'
    )
    assert session.statistics()['split'] == 8
    return session


def test_a_peak_in_parts_is_not_called_plain_chainers(limited, peak):
    figures = limited.statistics()
    assert figures['in_core_peak_bytes'] is None
    in_parts = figures['in_core_peak_in_parts_bytes']
    assert LIMIT < in_parts < peak
    report = limited.report()
    named = f'in-core peak, functions in parts +{format_bytes(in_parts)}\n'
    assert re.search(named, report) and 'in-core peak  ' not in report


def test_without_parts_it_is_plain_chainers(data, peak):
    _, session = networks.train(
        networks.Everything, data, memory_limit=3_800_000, planner='pooch'
    )
    figures = session.statistics()
    assert figures['split'] == 0
    assert figures['in_core_peak_bytes'] == peak
    assert figures['in_core_peak_in_parts_bytes'] == peak
    assert re.search(f'\nin-core peak +{format_bytes(peak)}\n', session.report())


def test_the_page_counts_the_parts_of_the_table(limited, tmp_path):
    path = tmp_path / 'run.html'
    limited.report(html=path)
    _, rest = path.read_text().split(
        '<script type="application/json" id="hybridmem-data">'
    )
    data = json.loads(rest.split('</script>')[0])
    figures, statistics = data['runs'][0]['figures'], limited.statistics()
    assert figures['parts'] == figures['measured_parts'] == statistics['split'] == 8
    assert figures['planning_seconds'] == statistics['planning_seconds']
    assert figures['whole_peak_bytes'] == statistics['peak_bytes']
    assert data['profile']['in_core_peak_bytes'] is None
    in_parts = statistics['in_core_peak_in_parts_bytes']
    assert data['profile']['in_core_peak_in_parts_bytes'] == in_parts


def test_a_saved_profile_knows_what_ran_in_parts(limited):
    profile = parse_profile(serialise_profile(limited.profile))
    assert len(profile.functions_in_parts) == 8
    assert profile == limited.profile
    assert make_problem(profile).in_core.plain_peak_bytes is None


def test_a_percentage_is_of_what_plain_chainer_has_been_seen_to_need(limited, peak):
    seen = with_plain_peak(make_problem(limited.profile), peak).profile
    profile = parse_profile(serialise_profile(seen))
    assert profile.functions_in_parts and profile.plain_peak_bytes == peak
    assert make_plan(profile, '75%').memory_limit_bytes == int(0.75 * peak)
    assert Limit('75%').bytes_for(make_problem(profile)) == int(0.75 * peak)
    in_parts = make_problem(limited.profile).in_core_peak_bytes
    assert make_plan(limited.profile, '99%').memory_limit_bytes == int(0.99 * in_parts)


def test_a_session_tells_what_plain_chainer_has_been_seen_to_need(limited, peak):
    limited.know_plain_peak(peak)
    try:
        assert limited.statistics()['in_core_peak_bytes'] == peak
        assert re.search(f'\nin-core peak +{format_bytes(peak)}\n', limited.report())
        plan, problem = limited._results.planned
        shown = make_data(
            problem.profile, [Run('run', plan, problem=problem)], 'p', sweep_seconds=0
        )
        assert shown['profile']['in_core_peak_bytes'] == peak
    finally:
        limited.know_plain_peak(None)


def test_plans_with_parts_know_the_peak_of_the_whole(data, peak, monkeypatch):
    monkeypatch.setattr(Session, 'detail', Detail(parts=True, keep_small_arrays=True))
    _, session = networks.train(
        networks.Everything, data[:5], memory_limit=PLENTY, planner='swap-all'
    )
    profile = session.profile
    plan = make_plan(profile, LIMIT, 'pooch')
    problem = with_parts(make_problem(profile), plan.parts)
    assert (
        plan.parts
        and problem.in_core_peak_bytes < problem.in_core.plain_peak_bytes == peak
    )
    shown = make_data(profile, [Run('plan', plan)], 'p', sweep_seconds=0)
    assert shown['profile']['in_core_peak_bytes'] == peak
    places = {(part.operation, part.function) for part in plan.parts}
    assert shown['runs'][0]['figures']['parts'] == len(places)


@pytest.fixture(scope='module')
def with_splits(data):
    """A profile that knows what its functions need in parts, and ran none so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, 'detail', Detail(parts=True, keep_small_arrays=True))
        _, session = networks.train(
            networks.Everything, data[:5], memory_limit=PLENTY, planner='swap-all'
        )
    return session.profile


def test_in_core_is_plain_chainer_at_every_limit(with_splits, peak):
    """It needs one number, and no row of that name has functions in parts."""
    problem = make_problem(with_splits)
    in_parts = make_plan(problem, LIMIT, 'hybrid')
    assert in_parts.parts
    kept = with_parts(problem, in_parts.parts)
    for limit in (LIMIT, kept.in_core_peak_bytes, (LIMIT + peak) // 2, peak - 1):
        row = compare_one(problem, limit, 'in-core')
        assert not row['fits'] and not row['failed']
        with pytest.raises(InfeasibleError) as caught:
            make_plan(problem, limit, 'in-core')
        if 'plain Chainer' in str(caught.value):
            assert caught.value.requested_bytes == peak
        with pytest.raises(InfeasibleError):
            make_plan(kept, limit, 'in-core')
    plan = make_plan(problem, peak, 'in-core')
    assert plan.parts == () and plan.predicted_peak_bytes == peak
    with pytest.raises(OptionError, match='as a whole'):
        make_plan(kept, peak, 'in-core')


def test_the_largest_batch_of_in_core_is_that_of_plain_chainer(with_splits, peak):
    found = find_largest_batch(lambda _: make_problem(with_splits), peak - 1, 1)
    assert found.in_core is None and found.planned is not None
    found = find_largest_batch(
        lambda _: make_problem(with_splits), peak - 1, 1, 'in-core'
    )
    assert found.planned is None and found.refusal.batchsize == 1


def test_what_was_recorded_in_parts_is_never_called_in_core(limited):
    problem = make_problem(limited.profile)
    kept = problem.in_core_peak_bytes
    with pytest.raises(InfeasibleError, match='not known, but more than'):
        make_plan(problem, 2 * kept, 'in-core')
    assert 'in-core peak, functions in parts of' in Limit('50%').describe(problem)
    plan = make_in_core(limited.profile)
    assert plan.planner == KEPT_IN_PARTS and plan.predicted_peak_bytes == kept
