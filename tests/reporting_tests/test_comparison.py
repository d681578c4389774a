"""Planners side by side: the table over all cases, and the picture."""

from __future__ import annotations

import itertools
import math

import pytest

from chainer_hybridmem.reporting import canvas, comparison

PLANNERS = ('fast', 'slow', 'picky')


def row(planner, limit, seconds, bound=1.0, profile='p'):
    fits = seconds is not None
    return {
        'profile': profile,
        'memory_limit_bytes': limit,
        'planner': planner,
        'fits': fits,
        'iteration_seconds': seconds,
        'in_core_seconds': 1.0,
        'overhead': seconds - 1 if fits else None,
        'lower_bound_seconds': bound if fits else None,
        'planning_seconds': limit / 100 if fits else None,
        'reason': None if fits else 'too small',
    }


ROWS = [
    row('fast', 300, 1.0),
    row('slow', 300, 4.0),
    row('picky', 300, 1.00005),
    row('fast', 100, 1.5, 1.25),
    row('slow', 100, 3.0, 1.2),
    row('picky', 100, None),
]


@pytest.fixture
def panels(monkeypatch):
    """The panels of the figure that is drawn."""
    drawn = []
    monkeypatch.setattr(canvas, 'save', lambda figure, path: drawn.append(figure))

    def draw(rows, peaks, marked=None):
        comparison.draw_comparison(rows, 'c.png', peaks, PLANNERS, 'fast', marked)
        return drawn[-1].axes

    return draw


def lines(panel):
    return {line.get_label(): line for line in panel.get_lines()}


def test_over_all():
    table = [line.split('  ') for line in comparison.summary(ROWS).split('\n')]
    cells = [[cell.strip() for cell in line if cell] for line in table[2:]]
    assert cells == [
        ['fast', '2 of 2', '1.095', '2', '3.000 s'],  # sqrt(1.5 / 1.25)
        ['slow', '2 of 2', '3.098', '0', '3.000 s'],
        ['picky', '1 of 2', '1.000', '1', '3.000 s'],
    ]


def test_a_planner_that_never_fits_is_the_last():
    table = comparison.summary([row('never', 100, None), row('slow', 100, 9.0)])
    assert table.split('\n')[-1].split() == ['never', '0', 'of', '1', '-', '-', '-']


def test_the_highest_bound_counts_for_all():
    assert comparison.bound_seconds(ROWS[3:]) == 1.25
    assert comparison.bound_seconds(ROWS[5:]) is None


def test_lines_go_from_the_least_limit_on_and_have_gaps(panels):
    found = lines(panels(ROWS, {'p': 2**20})[0])
    assert list(found['fast'].get_ydata()) == pytest.approx([50.0, 0.0])
    assert list(found['bound'].get_ydata()) == [25.0, 0.0]
    picky = found['picky'].get_ydata()
    assert math.isnan(picky[0]) and picky[1] >= 0.005


def test_lines_that_would_coincide_are_told_apart_and_others_stay(panels):
    rows = [row(planner, 100, 1.5) for planner in PLANNERS]
    rows += [row('fast', 300, 1.0), row('slow', 300, 1.2), row('picky', 300, 1.2)]
    panel = panels(rows, {'p': 400})[0]
    found = lines(panel)
    scale = panel.yaxis.get_transform().transform
    low, high = scale(panel.get_ylim())
    apart = comparison.APART * (high - low)
    for limit, values in ((0, (50, 50, 50)), (1, (0, 20, 20))):
        drawn = [float(found[name].get_ydata()[limit]) for name in PLANNERS]
        places = sorted(scale(drawn))
        assert all(b - a > 0.99 * apart for a, b in itertools.pairwise(places))
        for value, place in zip(values, drawn, strict=True):
            assert value - 1e-9 <= place
            assert scale([place])[0] <= scale([value])[0] + 2.01 * apart
    assert found['fast'].get_ydata()[0] == pytest.approx(50)  # the best is below
    assert found['fast'].get_ydata()[1] == pytest.approx(0)


def test_the_peak_and_where_the_reader_is_are_marked(panels):
    found = lines(panels(ROWS, {'p': 400}, {'p': [100]})[0])
    assert found['in-core peak'].get_xdata()[0] == 400 / 1024
    assert found['limit of 100 B'].get_xdata()[0] == 100 / 1024


def test_the_default_is_emphasised_and_styles_do_not_depend_on_who_is_drawn(panels):
    everyone = lines(panels(ROWS, {'p': 2**20})[0])
    some = lines(panels([r for r in ROWS if r['planner'] != 'slow'], {'p': 2**20})[0])
    assert everyone['picky'].get_color() == some['picky'].get_color()
    assert everyone['picky'].get_marker() == some['picky'].get_marker()
    assert everyone['fast'].get_linewidth() > 2 * everyone['slow'].get_linewidth()


def test_a_panel_for_each_profile(panels):
    names = [f'p{i}' for i in range(5)]
    rows = [row('fast', 100, None, profile=name) for name in names]
    drawn = panels(rows, dict.fromkeys(names, 200))
    assert [panel.get_title() for panel in drawn] == names


def test_only_the_best_of_many_planners_have_colours(monkeypatch):
    """Nobody tells 22 colours of thin lines apart; what has none lies below."""
    planners = [f'planner-{number}' for number in range(22)]
    rows = [
        row(name, limit, 1.5 + (number * 7 % 22) / 10)
        for number, name in enumerate(planners)
        for limit in (50, 100)
    ]
    drawn = []
    monkeypatch.setattr(canvas, 'save', lambda figure, path: drawn.append(figure))
    comparison.draw_comparison(rows, 'c.png', {'p': 100}, planners, planners[5])
    (figure,) = drawn
    found = {
        name: line for name, line in lines(figure.axes[0]).items() if name in planners
    }
    grey = comparison.PLAIN['color']
    coloured = {name for name, line in found.items() if line.get_color() != grey}
    ranked = comparison.rank(rows)
    best = [name for name in ranked if name != planners[5]]
    assert coloured == {planners[5], *best[: comparison.MOST_COLOURED]}
    assert len({found[name].get_color() for name in coloured}) == len(coloured)
    below = max(found[name].get_zorder() for name in found.keys() - coloured)
    assert below < min(found[name].get_zorder() for name in coloured)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [t.removesuffix(' (default)') for t in texts if 'planner' in t] == ranked


def test_a_legend_of_all_planners_fits(monkeypatch):
    planners = [f'planner-{number}' for number in range(24)]
    rows = [row(name, limit, 1.5) for name in planners for limit in (50, 100)]
    figures = []

    def measure(figure, path):
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        figures.append((legend.y0, legend.y1, figure.bbox.height))

    monkeypatch.setattr(canvas, 'save', measure)
    comparison.draw_comparison(rows, 'c.png', {'p': 100}, planners, planners[0])
    ((bottom, top, height),) = figures
    assert bottom >= 0 and top <= height
