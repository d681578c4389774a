"""``--rule`` of the commands that plan."""

import json

import pytest

from chainer_hybridmem.planning.planners import make_plan
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.validation import check_plan

LIMIT = ('--memory-limit', '70%')
RULES = ('--rule', '/0/*=keep', '--rule', 'Layer=at most 20MiB')


def test_plan_obeys_and_tells_what_each_rule_costs(profile, hybridmem):
    status, out, err = hybridmem(
        'plan', 'p.json', *LIMIT, *RULES, '-o', 'plan.json', '--json', 'f'
    )
    assert (status, err) == (0, '')
    plan = library.load_plan('plan.json')
    check_plan(profile, plan, plan.memory_limit_bytes)
    assert plan.rules == (('/0/*', 'keep'), ('Layer', 'at most 20MiB'))
    with open('f') as file:
        rows = json.load(file)['rules']
    assert [(r['pattern'], r['maps']) for r in rows] == [('/0/*', 1), ('Layer', 6)]
    limit = plan.memory_limit_bytes
    for row, other in zip(rows, plan.rules[::-1], strict=True):
        without = make_plan(profile, limit, rules=[other]).predicted_seconds
        expected = plan.predicted_seconds - without
        assert row['seconds'] == pytest.approx(expected, rel=0.005, abs=1e-9)
    assert 'rule /0/*: keep' in out and '6 feature maps, 60.0 MiB; costs ' in out


def test_compare_says_who_cannot_obey(profile, hybridmem):
    rule = ('--rule', '/1/*=swap')
    status, out, _ = hybridmem(
        'compare', 'p.json', *LIMIT, *rule, '--planner', 'dtr', 'swap-all', 'hybrid'
    )
    assert status == 0
    assert "Planner 'dtr' cannot obey the rules" in out
    assert out.count('failed') == 1


@pytest.mark.parametrize('command', ['plan', 'compare'])
def test_an_unknown_name(command, profile, refused):
    error = refused(command, 'p.json', *LIMIT, '--rule', 'Lyer=keep')
    assert "called 'Lyer'" in error and 'Nearest names: Layer' in error


@pytest.mark.parametrize(
    ('rule', 'message'),
    [
        ('Layer', 'is not of the form PATTERN=RULE'),
        ('=keep', 'is not of the form PATTERN=RULE'),
        ('Layer=kep', "Did you mean 'keep'?"),
        ('Layer=at most much', 'is not a size'),
    ],
)
def test_a_rule_that_is_none(rule, message, profile, hybridmem):
    status, out, err = hybridmem('plan', 'p.json', *LIMIT, '--rule', rule)
    assert (status, out) == (2, '')
    assert message in err


def test_a_pattern_may_have_an_equals_sign(profile, hybridmem):
    status, _, err = hybridmem('plan', 'p.json', *LIMIT, '--rule', 'a=b=keep')
    assert status == 1 and "called 'a=b'" in err
