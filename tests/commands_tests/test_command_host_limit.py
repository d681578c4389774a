"""``--host-limit`` of the commands that plan and record."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import toys

from chainer_hybridmem.planning.records import library
from chainer_hybridmem.planning.records.plan import Tier
from chainer_hybridmem.planning.records.profile import Link, Profile
from chainer_hybridmem.planning.simulation import make_problem

LIMIT = ('--memory-limit', '60%')


@pytest.fixture
def with_disk(folder) -> Profile:
    profile = toys.chain(6)
    link = profile.link
    disk = Link(0.0, link.d2h_bytes_per_second / 4, link.h2d_bytes_per_second / 4)
    profile = dataclasses.replace(profile, disk_link=disk)
    library.save(profile, 'p.json')
    return profile


def test_plan_tells_what_goes_where(with_disk, hybridmem):
    total = sum(s.nbytes for s in make_problem(with_disk).maps)
    arguments = ('plan', 'p.json', *LIMIT, '--planner', 'swap-all', '--maps')
    arguments += ('--host-limit', str(total // 2), '-o', 'plan.json')
    status, out, err = hybridmem(*arguments, '--json', 'f')
    assert (status, err) == (0, '')
    with open('f') as file:
        figures = json.load(file)
    plan = library.load_plan('plan.json')
    assert figures['host_bytes'] == plan.tier_bytes(with_disk, Tier.RAM) <= total // 2
    assert figures['disk_bytes'] == plan.tier_bytes(with_disk, Tier.DISK) > 0
    lines = [line for line in out.splitlines() if ' -> swap' in line]
    assert {line.endswith('-> swap to disk') for line in lines} == {True, False}
    assert '\ndisk ' in out
    status, out, _ = hybridmem('plan', 'p.json', *LIMIT, '--planner', 'swap-all')
    assert status == 0 and 'disk' not in out


def test_compare_shows_the_disk_where_there_is_one(with_disk, hybridmem):
    arguments = ('compare', 'p.json', *LIMIT, '--planner', 'swap-all', 'hybrid')
    status, out, _ = hybridmem(*arguments, '--host-limit', '0', '--json', 'f')
    assert status == 0
    header = next(line for line in out.splitlines() if line.startswith('planner'))
    assert header.split().index('disk') == header.split().index('host') + 1
    with open('f') as file:
        rows = json.load(file)
    assert [row['host_bytes'] for row in rows] == [0, 0]
    assert rows[0]['disk_bytes'] > 0
    assert 'disk' not in hybridmem(*arguments)[1]


def test_a_planner_that_needs_more_host_memory_is_a_row(profile, hybridmem):
    arguments = ('compare', 'p.json', *LIMIT, '--planner', 'swap-all', 'hybrid')
    status, out, _ = hybridmem(*arguments, '--host-limit', '0')
    assert status == 0
    assert 'does not fit' in out and '--host-limit' in out and 'swap_dir' in out


def test_a_limit_that_cannot_be_read(profile, hybridmem):
    status, _, err = hybridmem('plan', 'p.json', *LIMIT, '--host-limit', 'much')
    assert status != 0 and 'much' in err
