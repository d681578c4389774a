"""``hybridmem trace``."""

import json

from support import toys

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan_file import serialise_plan
from chainer_hybridmem.planning.simulation import simulate
from chainer_hybridmem.reporting.chrome_trace import chrome_trace
from chainer_hybridmem.units import format_bound

LIMIT = 60 * 2**20


def save_plan(profile, path='plan.json'):
    plan = make_plan(profile, LIMIT, 'swap-all')
    library.save(plan, path)
    return plan


def test_writes_the_predicted_timeline(profile, hybridmem):
    plan = save_plan(profile)
    status, out, err = hybridmem('trace', 'p.json', 'plan.json', '-o', 't.json')
    assert (status, err) == (0, '')
    with open('t.json') as file:
        trace = json.load(file)
    assert trace == chrome_trace(simulate(profile, plan), plan)
    assert f'{len(trace["traceEvents"])} events' in out
    assert format_bound(plan.lower_bound_seconds, plan.gap) in out


def test_to_standard_output(profile, hybridmem):
    save_plan(profile)
    _, out, _ = hybridmem('trace', 'p.json', 'plan.json', '-o', '-')
    assert json.loads(out)['traceEvents']


def test_plan_of_another_profile(profile, refused):
    save_plan(toys.chain(layers=5))
    message = refused('trace', 'p.json', 'plan.json', '-o', 't.json')
    assert 'plan.json is not a plan for p.json: The plan was made for' in message
    assert message.count(' again') == 1 and 'name its own, or plan again' in message


def test_a_damaged_plan(profile, refused):
    plan = json.loads(serialise_plan(save_plan(profile)))
    plan['maps'][0][2] = 10**6  # swap_out_before
    with open('plan.json', 'w') as file:
        json.dump(plan, file)
    message = refused('trace', 'p.json', 'plan.json', '-o', 't.json')
    assert 'plan.json is not a plan for p.json: ' in message
    assert 'swap_out_before lies outside' in message


def test_plan_is_not_one(folder, profile, refused):
    arguments = ('trace', 'p.json', 'plan.json', '-o', 't.json')
    assert 'cannot be read' in refused(*arguments)
    (folder / 'plan.json').write_text((folder / 'p.json').read_text())
    assert "'chainer_hybridmem/plan' was expected" in refused(*arguments)
    assert not (folder / 't.json').exists()
