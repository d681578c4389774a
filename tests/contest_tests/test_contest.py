"""A contest: instances with checksums, entrants in processes, one checker, a page."""

import dataclasses
import hashlib
import html.parser
import itertools
import json
import multiprocessing

import pytest
from support.foreign import solution

from chainer_hybridmem import commands
from chainer_hybridmem.errors import FormatError, OptionError, UnknownNameError
from chainer_hybridmem.lab.contest import cells, instances, monet_rules, page
from chainer_hybridmem.lab.contest.instances import Instance, Known, load_catalogue
from chainer_hybridmem.planning.planners import registry
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import simulate

RULES = (('*', 'no swap'),)
LAYOUT = 'id,lower,upper,size\na,0,2,4\nb,1,3,4\nc,2,4,4\n'
# Forward 0 > 1 > 2 > 3 (the loss); backward reads all.
NET = solution(
    [64, 64, 64, 8, 8, 64, 64, 0],
    [10, 20, 30, 0, 5, 40, 30, 20],
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (2, 5), (5, 6), (1, 6), (6, 7), (0, 7)],
    4,
)


@pytest.fixture
def catalogue(tmp_path):
    """A catalogue of one network and one layout, with their files."""
    (tmp_path / 'net.pkl').write_bytes(NET)
    (tmp_path / 'layout.csv').write_text(LAYOUT)
    body = {
        'format': instances.FORMAT,
        'version': instances.VERSION,
        'instances': [
            {
                'name': 'ours/net',
                'task': 'plan',
                'kind': 'checkmate',
                'file': 'net.pkl',
                'rules': [['*', 'no swap']],
                'limits': [{'limit': '70%', 'best': 0.00195, 'by': 'somebody'}],
            },
            {
                'name': 'ours/layout',
                'task': 'layout',
                'file': 'layout.csv',
                'limits': [{'limit': '8', 'best': 8, 'by': 'somebody'}],
            },
        ],
    }
    path = tmp_path / 'held.json'
    path.write_text(json.dumps(body))
    return path


def test_a_contest_is_played_and_has_a_page(catalogue, tmp_path, capsys):
    out, md, html_page = (str(tmp_path / n) for n in ('r.json', 'arena.md', 'a.html'))
    arguments = ['--held', str(catalogue), '--instance', 'held', '--time-limit', '50']
    assert (
        commands.main(
            [
                'arena',
                'run',
                *arguments,
                '--entrant',
                'hybrid',
                'exact',
                'bound',
                '-o',
                out,
            ]
        )
        == 0
    )
    body = json.loads((tmp_path / 'r.json').read_text())
    rows = {(row['instance'], row['entrant']): row for row in body['rows']}
    assert {row['instance'] for row in body['rows']} == {'held/1', 'held/2'}
    assert {e for i, e in rows if i == 'held/1'} == {
        *cells.TRIVIAL_PLANS,
        'hybrid',
        'exact',
        'bound',
    }
    best = rows['held/1', 'exact']
    bound = rows['held/1', 'bound']
    assert 0 < bound['bound'] <= best['value'] and not bound['fits']
    assert best['fits'] and best['value'] <= rows['held/1', 'recompute all']['value']
    assert not rows['held/1', 'keep all']['fits']
    assert rows['held/2', 'exact']['value'] == 8
    assert rows['held/2', 'no reuse']['value'] == 12
    digest = hashlib.sha256(catalogue.read_bytes()).hexdigest()
    assert body['held_checksum'] == digest
    for path in (md, html_page):
        assert commands.main(['arena', 'page', out, '-o', path]) == 0
    text = (tmp_path / 'arena.md').read_text()
    assert 'our bound, for every schedule' in text and '| proven: ours |' in text
    assert digest in text and '| no reuse | 0.6667 | 1 of 1 | 0 of 1 | 0 | 0 |' in text
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed((tmp_path / 'a.html').read_text())
    assert tags.count('table') == 5 and not {'script', 'img', 'link'} & set(tags)
    assert 'net' not in text  # names are held back


def row(entrant, value, best=None, instance='x/1', **more):
    return {
        'instance': instance,
        'limit': '1',
        'entrant': entrant,
        'fits': value is not None,
        'value': value,
        'best_known': best,
        **more,
    }


def test_the_score_is_the_best_known_over_ones_own():
    rows = [row('a', 4.0, 2.0), row('b', None, 2.0), row('c', 1.0, 2.0)]
    assert [r['score'] for r in page.scored(rows)] == [0.25, 0.0, 1.0]
    unknown = [row('a', 4.0), row('b', 5.0)]
    assert [r['score'] for r in page.scored(unknown)] == [1.0, 0.8]
    assert page.scored([row('a', None)]) == []


def test_who_finds_what_nobody_has_published_is_below_it():
    more = {'task': 'plan', 'trivial': False, 'cpu_seconds': 1.0, 'wall_seconds': 1.0}
    more |= {'bound_known': 0.5, 'known_seconds': 9.0, 'bound': None, 'why': 'no'}
    rows = [
        row('a', 4.0, None, known_by='x', **more),
        row('a', 2.0, 2.0, 'x/2', known_by='x', **more),
        row('a', None, 2.0, 'x/3', known_by='x', **more),
        row('a', 3.0, None, 'x/4', known_by='', **more),
    ]
    standings, family = page.tables({'rows': rows})
    assert standings.rows == [
        ('a', '0.7500', '3 of 4', '2 of 3', '1', '0', '1.0', '4.0')
    ]
    assert [line[2] for line in family.rows] == [
        'none found',
        '2.00000',
        '2.00000',
        '-',
    ]


def test_the_best_known_has_its_finders_and_what_is_proven():
    more = {'task': 'plan', 'trivial': False, 'cpu_seconds': 1.0, 'wall_seconds': 1.0}
    more |= {'known_seconds': 9.0, 'known_by': 'x'}
    least = {**more, 'bound_known': 0.99998, 'bound': 0.5}  # two units below
    bound = {**more, 'task': 'bound', 'bound_known': None}
    rows = [
        row('a', 1.0, 1.1, '1/1', **least),
        row('b', 1.0, 1.1, '1/1', **least),
        row('bound', None, 1.1, '1/1', **bound, bound=0.9999901),
        row('a', 2.0, 1.0, '1/2', **least),
        row('bound', None, 1.0, '1/2', **bound, bound=0.99),
        row('a', 1.0, 1.0, '1/3', **{**least, 'bound_known': 0.999991}),
    ]
    _, family = page.tables({'rows': rows})
    found = [line[family.header.index('best known') :] for line in family.rows]
    assert found == [
        ('1.00000', 'a, b', '0.99999', '1.0', 'proven: ours'),
        ('1.00000', 'published', '0.99000', '1.0', '0.00% above a bound'),
        ('1.00000', 'published, a', '-', '-', 'proven: published'),
    ]


def test_what_the_defaults_lose_comes_first():
    more = {'trivial': False, 'wall_seconds': None, 'known_seconds': None}
    plan = {**more, 'task': 'plan', 'bound': 1.0, 'bound_known': None}
    layout = {**more, 'task': 'layout', 'bound': 8, 'bound_known': 8}
    rows = [
        row('hybrid', 1.0, 1.0, 'a/1', known_by='x', cpu_seconds=3.0, **plan),
        row('exact', 8, 8, 'b/1', known_by='y', cpu_seconds=0.1, **layout),
        row('exact', 10, 8, 'b/2', known_by='y', cpu_seconds=0.2, **layout),
        row('hybrid', 2.0, None, 'c/1', known_by='', cpu_seconds=1.0, **plan),
        row('other', 1.6, None, 'c/1', known_by='', cpu_seconds=1.0, **plan),
        row('hybrid', None, 1.0, 'd/1', known_by='x', cpu_seconds=1.0, **plan),
    ]
    families, lost, *_ = page.tables({'rows': rows})
    assert families.rows == [
        ('d', '1', 'hybrid', 'not found', '0 of 1', '0 of 1', 'not found', '1.0'),
        ('b', '2', 'exact', '25.00%', '1 of 2', '1 of 2', '25.00%', '0.2'),
        ('c', '1', 'hybrid', '25.00%', '0 of 0', '0 of 1', '100.00%', '1.0'),
        ('a', '1', 'hybrid', '0.00%', '1 of 1', '1 of 1', '0.00%', '3.0'),
    ]
    assert [(r[0], *r[2:6]) for r in lost.rows] == [
        ('d/1', '1.00000', 'x', 'none', 'not found'),
        ('b/2', '8', 'y', '10', '25.00%'),
        ('c/1', '1.60000', 'another entrant', '2.00000', '25.00%'),
    ]


def test_a_first_bound_counts_if_a_better_one_comes_too_late(tmp_path, monkeypatch):
    runner = cells.Runner()
    monkeypatch.setattr(runner, '_process', object())
    monkeypatch.setattr(runner, '_pipe', type('', (), {'send': print}), raising=False)
    for last, bound in (({'why': 'late'}, 1.0), ({'bound': 2.0}, 2.0)):
        answers = iter([None, {'bound': 1.0, cells.MORE: True}, last])
        monkeypatch.setattr(runner, '_receive', lambda *_: next(answers))  # noqa: B023
        cell = cells.Cell(None, None, cells.BOUND, 1.0)
        assert runner.run(cell) == {'bound': bound}


@pytest.fixture
def forked(monkeypatch):
    """Entrants find imported what they need; in the contest with a page they do not."""
    context = multiprocessing.get_context('fork')
    monkeypatch.setattr(multiprocessing, 'get_context', lambda kind: context)


@pytest.mark.usefixtures('forked')
def test_an_entrant_that_takes_too_long_is_ended_and_the_next_one_goes_on(tmp_path):
    (tmp_path / 'net.pkl').write_bytes(NET)
    path = str(tmp_path / 'net.pkl')
    known = (Known('70%'),)
    instance = Instance('x/net', 'plan', 'checkmate', path, None, (), known)
    slow = cells.Cell(instance, known[0], 'hybrid', 1e-9)
    soon = cells.Cell(instance, known[0], 'recompute all', 60.0)
    first, second = cells.run_cells([slow, soon])
    assert not first['fits'] and 'took more than 1e-09 s' in first['why']
    assert second['fits']


def test_what_an_entrant_says_is_checked(tmp_path):
    (tmp_path / 'net.pkl').write_bytes(NET)
    known = (Known('100%'), Known('70%'))
    rules = (('*', 'no swap'),)
    path = str(tmp_path / 'net.pkl')
    instance = Instance('x/net', 'plan', 'checkmate', path, None, rules, known)
    free = Instance('x/net', 'plan', 'checkmate', path, None, (), known)
    keeps = cells.Cell(instance, known[0], 'keep all', 60.0)
    answer = next(cells._answers(keeps, instance.problem()))
    read = lambda i: i.problem()  # noqa: E731
    assert cells._judge(keeps, answer, read) == pytest.approx(155e-5)
    tight = cells.Cell(instance, known[1], 'keep all', 60.0)
    with pytest.raises(Exception, match='limit|more than'):
        cells._judge(tight, answer, read)
    swaps = next(
        cells._answers(cells.Cell(free, known[0], 'swap all', 60.0), free.problem())
    )
    with pytest.raises(Exception, match='no swap'):
        cells._judge(keeps, swaps, read)


def test_in_monets_form_less_is_asked_for_until_it_fits(tmp_path, monkeypatch):
    (tmp_path / 'net.pkl').write_bytes(NET)
    known = Known('100%')
    path = str(tmp_path / 'net.pkl')
    instance = Instance('x/net', 'plan', 'monet', path, None, RULES, (known,))
    cell = cells.Cell(instance, known, 'hybrid', 60.0)
    problem = instance.problem()
    (answer,) = cells._answers(cell, problem)
    assert answer['bound'] is None
    seconds = cells._judge(cell, answer, lambda i: problem)
    assert 155e-5 <= seconds < 400e-5
    peaks, asked, maker = iter([10**9, 10**9, 0]), [], cells.make_plan
    cost = lambda *_: monet_rules.ScheduleCost(0, next(peaks))  # noqa: E731
    monkeypatch.setattr(monet_rules, 'judge', cost)

    def make(problem, limit_bytes):
        asked.append(limit_bytes)
        return maker(problem, limit_bytes)

    plan = cells._plan_in_form(cell, problem, make)
    assert asked[0] == cells.limit_of(cell, problem)
    assert len(asked) == 3 and asked == sorted(asked, reverse=True)
    assert plan.memory_limit_bytes == asked[2] >= least_memory(problem)[0]

    peaks, maker = itertools.repeat(10**9), cells.recompute_all
    asked.clear()
    plan = cells._plan_in_form(cell, problem, make)  # in which maps stay longer
    assert len(asked) == 2 * len(cells.SHARES)
    assert asked[0] == asked[len(cells.SHARES)] == cells.limit_of(cell, problem)
    assert simulate(problem, plan).peak_bytes <= asked[0]
    lasts = {s.id: max(s.backward_uses) for s in problem.maps}
    longer = [m for m in plan.maps if m.drop_before > lasts[m.storage] + 1]
    assert longer


def test_a_planner_that_fails_says_so(tmp_path, monkeypatch):
    def fails(problem, limit_bytes):
        raise KeyError('oops')

    monkeypatch.setitem(registry.PLANNERS, 'fails', fails)
    (tmp_path / 'net.pkl').write_bytes(NET)
    known = (Known('70%'),)
    path = str(tmp_path / 'net.pkl')
    instance = Instance('x/net', 'plan', 'checkmate', path, None, (), known)
    failing = cells.Cell(instance, known[0], 'fails', 9.0)
    answer = next(cells._answers(failing, instance.problem()))
    assert answer['why'] == "KeyError: 'oops'"


def test_other_limits_can_be_played():
    known = (Known('5GiB', 1.0), Known('60%'))
    plans = Instance('x/net', 'plan', 'checkmate', 'f', None, (), known)
    asked = ['5 GiB', '4GiB', '60%', '60%']
    found = instances.at_limits(plans, asked).known
    assert found == (known[0], Known('4GiB'), known[1])
    layout = dataclasses.replace(plans, task='layout')
    assert instances.at_limits(layout, asked) == layout
    with pytest.raises(OptionError):
        instances.at_limits(plans, ['much'])


@pytest.mark.usefixtures('forked')
def test_a_planner_may_have_options(tmp_path):
    output = tmp_path / 'arena.json'
    names = ['hybrid:steps=0', 'hybrid:steps=200,seed=3']
    case = ['--instance', 'shipped/lstm', '--limit', '60%', '-o', str(output)]
    assert commands.main(['arena', 'run', *case, '--entrant', *names]) == 0
    rows = {row['entrant']: row for row in json.loads(output.read_text())['rows']}
    few, many = (rows[name] for name in names)
    assert few['fits'] and many['fits']
    assert few['bound'] <= many['value'] <= few['value']
    with pytest.raises(OptionError, match='stepps'):
        cells.list_cells([], ['hybrid:stepps=3'], 1.0)


def test_drawn_instances_are_any_or_the_first_ones():
    found = instances.draw(['chains/17', 'chains/900', 'tilings'])
    names = [instance.name for instance in found]
    assert names[:2] == ['chains/17', 'chains/900']
    assert names[2:] == [f'tilings/{seed}' for seed in range(instances.SEEDS)]
    assert found[0].problem().profile != found[1].problem().profile
    assert found[2].trace() != found[3].trace()


@pytest.mark.usefixtures('forked')
def test_plans_and_layouts_are_compared_with_a_known_optimum(tmp_path):
    output = tmp_path / 'arena.json'
    drawn = ['--instance', 'chains/3', 'tilings/1', '--entrant', 'hybrid', 'bound']
    words = ['arena', 'run', *drawn, 'smartpool', '-o', str(output)]
    assert commands.main(words) == 0
    rows = {row['entrant']: row for row in json.loads(output.read_text())['rows']}
    optimum = rows['hybrid']['best_known']
    assert rows['hybrid']['value'] == pytest.approx(optimum) == rows['bound']['bound']
    assert rows['bound']['cpu_seconds'] < 5, 'what is proven is not searched for'
    assert rows['square root']['value'] > 1.1 * optimum
    assert rows['smartpool']['value'] > rows['smartpool']['best_known'] == 2**20


def test_unknown_entrants_and_files_are_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'hybrid'"):
        cells.list_cells([], ['hybri'], 1.0)
    (tmp_path / 'c.json').write_text('{"format": "x"}')
    with pytest.raises(FormatError, match="has format 'x'"):
        load_catalogue(str(tmp_path / 'c.json'))


def test_the_catalogue_is_whole():
    found = load_catalogue()
    shipped = found.instances()
    assert {i.family for i in shipped} == {'shipped'}
    for entry in found.entries:
        if 'source' in entry:
            files = found.sources[entry['source']].files
            assert entry['file'] in files
            assert entry.get('times', entry['file']) in files
    limits = sum(len(e['limits']) for e in found.entries)
    assert limits >= 45
    for kind, count in (('checkmate', 27), ('monet', 27), ('moccasin', 21)):
        own = [e for e in found.entries if e.get('kind') == kind]
        assert sum(len(e['limits']) for e in own) == count


def test_files_count_only_with_their_checksum(tmp_path, capsys, monkeypatch):
    source = instances.InstanceSource(
        'x', 'https://x', 'abc', None, {'a/b.csv': hashlib.sha256(b'yes').hexdigest()}
    )
    entry = {'name': 'x/b', 'task': 'layout', 'source': 'x', 'file': 'a/b.csv'}
    entry['limits'] = [{'limit': '8'}]
    found = instances.Catalogue({'x': source}, [entry])
    monkeypatch.setattr(instances, 'load_catalogue', lambda path=None: found)
    (tmp_path / 'b.csv').write_bytes(b'no')
    assert commands.main(['arena', 'fetch', str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert 'git clone https://x && git checkout abc' in told
    assert f'a/b.csv  sha256 {source.files["a/b.csv"]}' in told
    (tmp_path / 'b.csv').write_bytes(b'yes')
    assert commands.main(['arena', 'fetch', str(tmp_path)]) == 0
    assert [i.path for i in found.instances([str(tmp_path)])] == [
        str(tmp_path / 'b.csv')
    ]
