"""The page of a report in a real browser, at two widths, light and dark.

Numbers are read from the page and compared with the data, as Python formats it.
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from support import toys
from support.browser import find_chromium, open_browser
from support.timelines import measured_like

from chainer_hybridmem import make_plan, units
from chainer_hybridmem.planning.simulation import simulate
from chainer_hybridmem.reporting.page import Run, make_data, make_frame, make_page

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason='no Chromium is installed; on Debian: apt install chromium',
)

HOSTILE = '/<img src=x onerror="document.title=1">&amp;<b>1</b>/Layer'
REVERSED = '\u202e</script>'
FORMATS = {
    'bytes': units.format_bytes,
    'seconds': units.format_seconds,
    'share': '{:+.1%}'.format,
    'count': str,
    'name': str,
}
SHOWN = """[...document.querySelectorAll('[data-path]')].map(
    (e) => [e.dataset.path, e.dataset.unit, e.textContent])"""
# Text with a digit that is no number or name of the data.
OTHER_DIGITS = """(() => {
    const found = [], main = document.getElementById('main');
    const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode;
        if (/[0-9]/.test(node.data) && !node.parentElement.closest('[data-path]'))
            found.push(node.data);
    }
    return found;
})()"""
TITLES = 'hybridmem.live.charts.map((c) => c.plot.axes.map((a) => a.label || null))'
FIGURES = """[...document.querySelectorAll(
    '[aria-label="figures of all runs"] tbody tr'
)].map((row) => [...row.cells].map((cell) => cell.textContent))"""
ADVICE = "[...document.querySelectorAll('.advice')].map((p) => p.textContent)"
HEADING = "document.querySelector('.composition h3').textContent"
PLACE = """(() => {{
    const box = hybridmem.live.charts[{}].plot.over.getBoundingClientRect();
    return [box.left, box.top, box.width, box.height];
}})()"""
# How far labels below an axis reach beyond their picture, in pixels.
CUT_LABELS = """hybridmem.live.charts.map(({plot}) => {
    const ctx = plot.ctx, [axis] = plot.axes, ratio = devicePixelRatio;
    ctx.save();
    ctx.font = axis.font[0];
    const found = axis._values.map((text, i) => {
        const half = ctx.measureText(text).width / 2;
        const middle = plot.valToPos(axis._splits[i], 'x', true);
        return text ? Math.max(middle + half - ctx.canvas.width, half - middle) : -1;
    });
    ctx.restore();
    return Math.max(...found) / ratio;
})"""
# Words of names that a line break cuts inside, and swatches alone on a line.
TORN = """(() => {
    const torn = [];
    for (const name of document.querySelectorAll('td .name, th .name, h3 .name')) {
        for (const node of name.childNodes) {
            if (node.nodeType !== 3 || !node.data) continue;
            const range = document.createRange();
            range.selectNodeContents(node);
            const tops = [...range.getClientRects()].map((r) => Math.round(r.top));
            const word = /^[A-Za-z0-9]{1,17}$/.test(node.data);
            if (new Set(tops).size > 1 && word) torn.push(node.data);
        }
    }
    for (const kind of document.querySelectorAll('td .kind')) {
        const swatch = kind.querySelector('.swatch').getBoundingClientRect();
        const range = document.createRange();
        range.selectNodeContents(kind.lastChild);
        if (range.getClientRects()[0].left < swatch.right) torn.push(kind.textContent);
    }
    return torn;
})()"""
REPORT_LINES = """(() => {
    const range = document.createRange();
    range.selectNodeContents(document.querySelector('pre'));
    const tops = [...range.getClientRects()].map((r) => Math.round(r.top / 5));
    return new Set(tops).size;
})()"""
FOCUS = """(() => {
    const e = document.activeElement;
    return e.getAttribute('aria-label') || e.textContent;
})()"""


@pytest.fixture(scope='module')
def data():
    """Two plans of a chain with hostile names; the first one was measured."""
    profile = toys.chain(12, nbytes=[10 * toys.MIB + 1280 * k for k in range(12)])
    names = {4: HOSTILE, 5: REVERSED}
    profile = dataclasses.replace(
        profile,
        operations=tuple(
            dataclasses.replace(op, label=names.get(op.index, op.label))
            for op in profile.operations
        ),
        storages=tuple(
            dataclasses.replace(s, label=names.get(s.id, s.label))
            for s in profile.storages
        ),
        device={'name': HOSTILE},
    )
    limits = {'pooch': '50MiB', 'swap-all': '100MiB'}
    plans = [make_plan(profile, limit, name) for name, limit in limits.items()]
    measured = measured_like(simulate(profile, plans[0]), plans[0])
    data = make_data(
        profile,
        [Run(HOSTILE, plans[0], measured), Run('second', plans[1])],
        'a profile',
        report=f'the report\n17 iterations\n{"a/long_line " * 20}',
    )
    # A round number at the end of the axis: its label is wide.
    data['bounds'].append({**data['bounds'][-1], 'memory_limit_bytes': 3000 << 20})
    return data


@pytest.fixture(scope='module')
def path(data, tmp_path_factory):
    path = tmp_path_factory.mktemp('page') / 'page.html'
    path.write_text(make_page(data))
    return path


@pytest.fixture(scope='module')
def browser():
    with open_browser() as browser:
        yield browser


def check_numbers(browser, data):
    """Every number and name in the page is that of the data."""
    shown = browser.run(SHOWN)
    for place, unit, text in shown:
        value = data
        for key in place.split('.'):
            value = value[int(key)] if isinstance(value, list) else value[key]
        assert text == FORMATS[unit](value), place
    assert browser.run(OTHER_DIGITS) == []
    return {place for place, _, _ in shown}


@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 400])
def test_every_number_is_that_of_the_data(browser, path, data, width, dark):
    browser.open(path, width, 800, dark)
    browser.settle()
    assert browser.problems() == []
    assert browser.run('document.documentElement.scrollWidth') == width
    background = browser.run(
        'getComputedStyle(document.documentElement).backgroundColor'
    )
    light = sum(map(int, re.findall('[0-9]+', background)[:3]))
    assert light < 200 if dark else light > 600
    places = check_numbers(browser, data)
    for key in data['runs'][0]['figures']:
        if key != 'planner':
            told = any(run['figures'].get(key) for run in data['runs'])
            assert not told or f'runs.0.figures.{key}' in places, key
    for run in (0, 1):
        load = max(data['runs'][run]['moments']['load_bytes'])
        assert load == data['runs'][run]['figures']['peak_bytes']
    embedded = browser.run("document.getElementById('hybridmem-data').textContent")
    assert json.loads(embedded) == data


@pytest.mark.parametrize('width', [1280, 400, 360])
def test_nothing_is_cut(browser, path, data, width):
    browser.open(path, width, 800, False)
    browser.settle()
    assert max(browser.run(CUT_LABELS)) <= 0
    assert browser.run(TORN) == []
    assert browser.run(REPORT_LINES) == data['report'].count('\n') + 1


@pytest.mark.parametrize(
    'name, words',
    [
        ('/a/Convolution2DFunction', '/ a/ Convolution 2D Function'),
        ('run_50.json', 'run_ 50. json'),
        ('x' * 20, f'{"x" * 18} xx'),
    ],
)
def test_names_break_between_words(browser, path, name, words):
    browser.open(path, 400, 800, False)
    found = browser.run(f"""(() => {{
        hybridmem.data.names[0] = '{name}';
        return [...hybridmem.name('names.0').childNodes].map((n) => n.data);
    }})()""")
    assert ' '.join(filter(None, found)) == words


def test_pictures_side_by_side_have_one_scale(browser, path, data):
    browser.open(path, 1280, 800, False)
    tops = browser.run('[0, 2].map((i) => hybridmem.live.charts[i].plot.scales.y.max)')
    runs = [run['figures'] for run in data['runs']]
    peaks = [run['peak_bytes'] for run in runs]
    assert peaks[0] != peaks[1] and tops[0] == tops[1] > max(peaks)


def test_axes_have_titles_and_one_unit(browser, path, data):
    """The unit of bytes is that of the tiles, also where steps are smaller."""
    browser.open(path, 1280, 800, False)
    titles = browser.run(TITLES)
    assert titles[0] == ['time, s', 'memory, MiB']
    assert titles[1] == ['time, s', None]
    assert titles[4] == ['memory limit, GiB', 'time over in-core']
    most = max(run['figures']['memory_limit_bytes'] for run in data['runs'])
    for chart, axis, size, top in ((0, 1, 2**20, most), (4, 0, 2**30, 3000 << 20)):
        found = f'hybridmem.live.charts[{chart}].plot.axes[{axis}]'
        texts = [text for text in browser.run(f'{found}._values') if text]
        assert max(map(len, texts)) <= 4
        numbers = [float(text) for text in texts]
        assert numbers == sorted(set(numbers)) and len(numbers) > 2
        assert 0.5 * top < numbers[-1] * size <= 1.1 * top


def test_what_is_nothing_in_every_run_is_not_listed(browser, path, data):
    browser.open(path, 1280, 800, False)
    rows = browser.run(FIGURES)
    runs = [run['figures'] for run in data['runs']]
    assert not any(run['disk_bytes'] or run['sources'] for run in runs)
    titles = [row[0] for row in rows]
    assert 'iteration' in titles and 'peak' in titles
    for title in ('host copies on disk', 'kept for replays alone'):
        assert title not in titles
    nothing = {'0', '0 B', '0.000 s', '–', ''}
    assert all(set(row[1:]) - nothing for row in rows)


def test_the_page_says_what_to_do_next(browser, path, data):
    browser.open(path, 1280, 800, False)
    texts = browser.run(ADVICE)
    found = [run['advice'] for run in data['runs']]
    assert any(found) and len(texts) == len(found)
    for advice, text in zip(found, texts, strict=True):
        if advice is None:
            assert 'save nothing' in text
            continue
        assert text.startswith(units.format_bytes(advice['bytes']))
        assert text.endswith(f'--memory-limit {advice["limit"]}')
        assert f'{units.format_seconds(advice["seconds"])} an iteration' in text


def test_the_page_says_what_plans_treat_otherwise(browser, path):
    browser.open(path, 1280, 800, False)
    text = browser.run("document.querySelector('.differences').textContent")
    assert 'feature maps are treated otherwise' in text


def test_the_bar_tells_the_moment(browser, path, data):
    browser.open(path, 1280, 800, False)
    before = browser.run("document.querySelector('.bar .moment').textContent")
    browser.run("document.querySelector('.bar button').focus()")
    browser.press('Tab')
    browser.press('Enter')
    after = browser.run("document.querySelector('.bar .moment').textContent")
    assert 'operation' in before and 'operation' in after and before != after


def test_names_stay_text(browser, path):
    browser.open(path, 1280, 800, False)
    assert browser.run("document.querySelectorAll('main img, main b b').length") == 0
    assert browser.run('document.title') == 'a profile – hybridmem report'
    text = browser.run("document.getElementById('main').textContent")
    assert HOSTILE in text and '\u202e' not in text
    assert r'\u202e</script>' in text


def test_the_picture_shows_the_parts(browser, path, data):
    """A pixel in the middle of each part has its colour."""
    browser.open(path, 1280, 800, False)
    browser.settle()
    for run in (0, 1):
        moments = data['runs'][run]['moments']
        starts = [*moments['start_seconds'], moments['end_seconds']]
        k = len(starts) // 3
        # Not where the line of the moment is that the page shows.
        k += k == max(range(len(starts) - 1), key=moments['load_bytes'].__getitem__)
        middle = (starts[k] + starts[k + 1]) / 2
        below = 0
        for place, group in enumerate(data['groups']):
            nbytes = moments['group_bytes'][place][k]
            height = below + nbytes / 2
            below += nbytes
            if nbytes < 5 * toys.MIB:
                continue
            red, green, blue = browser.run(f"""(() => {{
                const plot = hybridmem.live.charts[{2 * run}].plot;
                const x = plot.valToPos({middle}, 'x', true);
                const y = plot.valToPos({height}, 'y', true);
                return [...plot.ctx.getImageData(x, y, 1, 1).data].slice(0, 3);
            }})()""")
            colour = f'#{red:02x}{green:02x}{blue:02x}'
            assert colour == data['colours']['groups'][group], group
        assert below == moments['load_bytes'][k] > 30 * toys.MIB


def test_the_keyboard_alone(browser, path, data):
    browser.open(path, 1280, 800, False)
    moments = data['runs'][0]['moments']
    peak = moments['load_bytes'].index(max(moments['load_bytes']))
    reached = []
    while len(reached) < 300:
        browser.press('Tab')
        reached.append(browser.run(FOCUS))
        if reached[-1] == 'moment of the iteration':
            break
    browser.press('ArrowRight')
    assert browser.run('hybridmem.state.moment') == peak + 1
    assert f'operation {moments["operation"][peak + 1]})' in browser.run(HEADING)
    check_numbers(browser, data)
    while not reached[-1].startswith('Memory over time') and len(reached) < 300:
        browser.press('Tab')
        reached.append(browser.run(FOCUS))
    for label in ('show the highest moment', 'next operation', 'zoom in', 'zoom out'):
        assert label in reached
    browser.press('p')
    assert browser.run('hybridmem.state.moment') == peak
    browser.press('Home')
    assert browser.run('hybridmem.state.moment') == 0
    browser.press('+')
    start, end = browser.run('hybridmem.state.window')
    whole = browser.run('hybridmem.state.end')
    assert start <= moments['start_seconds'][0] and end - start < 0.6 * whole
    scale = browser.run('hybridmem.live.charts.map((c) => c.plot.scales.x.max)')
    assert scale[:4] == [end] * 4
    browser.press('0')
    assert browser.run('hybridmem.state.window') is None
    while browser.run("document.activeElement.id !== 'query'") and len(reached) < 300:
        browser.press('Tab')
        reached.append(browser.run(FOCUS))
    for letter in 'onerror':
        browser.press(letter)
    browser.press('Tab')
    assert browser.run(FOCUS) == HOSTILE
    browser.press('Enter')
    selected = browser.run('hybridmem.state.selected')
    assert data['names'][data['storages']['name'][selected]] == HOSTILE
    assert browser.run("document.activeElement.getAttribute('aria-pressed')") == 'true'
    check_numbers(browser, data)
    said = "document.querySelector('.composition p').textContent"
    assert browser.run(said).startswith(f'Selected: {HOSTILE}, ')
    browser.press('Enter')
    assert browser.run('hybridmem.state.selected') == -1
    assert browser.problems() == []


def test_the_mouse(browser, path, data):
    browser.open(path, 1280, 800, False)
    browser.settle()
    left, top, width, height = browser.run(PLACE.format(0))
    browser.point(left + width / 2, top + height / 2)
    browser.settle()
    tip = "document.querySelector('.tip:not([hidden])')"
    assert 'operation' in browser.run(f'{tip}.textContent')
    check_numbers(browser, data)
    browser.run('window.scrollTo(0, hybridmem.live.charts[4].box.offsetTop - 300)')
    browser.settle()
    x, y, wide, high = browser.run(PLACE.format(4))
    browser.point(x + wide / 2, y + high / 2)
    browser.settle()
    assert browser.run(f'{tip}.textContent').startswith('limit ')
    check_numbers(browser, data)
    browser.run('window.scrollTo(0, 0)')
    browser.point(left + width / 4, top + height / 2, click=True)
    moment = browser.run('hybridmem.state.moment')
    moments = data['runs'][0]['moments']
    at = browser.run('hybridmem.state.end') / 4
    assert moments['start_seconds'][moment] <= at + 1e-6
    assert moments['start_seconds'][moment + 1] >= at - 0.01 * at
    middle = top + height / 2
    browser.drag((left + width / 4, middle), (left + width / 2, middle))
    browser.settle()
    start, end = browser.run('hybridmem.state.window')
    assert start == pytest.approx(at, rel=0.02) and end == pytest.approx(
        2 * at, rel=0.02
    )
    assert browser.problems() == []


def test_a_cell_of_a_notebook(browser, data, tmp_path):
    path = tmp_path / 'cell.html'
    path.write_text(
        f'<!DOCTYPE html><meta charset="utf-8">{make_frame(make_page(data))}'
    )
    browser.open(path, 1280, 800, False)
    browser.settle()
    found = browser.run(
        "document.querySelector('iframe').contentDocument"
        ".querySelectorAll('.chart canvas').length"
    )
    assert found == 5
    assert browser.problems() == []
