"""Cases that once failed, and a few of those that ``make fuzz`` draws."""

from __future__ import annotations

import pathlib

import pytest
from fuzz import __main__ as fuzz_main
from fuzz import places
from fuzz.cases import Case, draw
from fuzz.checking import Result, check, shrunk
from support.matrices import several

from chainer_hybridmem.training.execution.live_map import LiveMap

FUZZ = pathlib.Path(__file__).parent / 'fuzz'
KEPT = FUZZ / 'regressions.jsonl'
SEEDS = range(several(8, all_of_them=16))


def assert_kept_is_exact(line):
    """A case of a file, on the device that ``FUZZ_DEVICE`` names."""
    result = check(Case.from_json(line))
    assert result.outcome == 'same', result.detail


def assert_drawn_are_exact(seeds):
    """Most cases of these seeds train, and under plans that do something."""
    results = {seed: check(draw(seed)) for seed in seeds}
    failed = {seed: r.detail for seed, r in results.items() if r.failed}
    assert not failed
    same = [result for result in results.values() if result.outcome == 'same']
    assert len(same) > len(seeds) / 2
    assert sum(result.guided for result in same) > len(seeds)
    assert any(sum(result.moved) for result in same)


@pytest.mark.parametrize('line', KEPT.read_text().splitlines())
def test_kept_cases_are_exact(line):
    assert_kept_is_exact(line)


def test_drawn_cases_are_exact():
    assert_drawn_are_exact(SEEDS)


def test_a_wrong_bit_is_found_and_the_case_made_smaller(monkeypatch):
    """What the harness would say about a plan that is executed wrongly."""
    arrived = LiveMap._arrived

    def wrong(self, root):
        if root.dtype == 'u1' and root.size:  # what a swap-in has filled
            root[0] ^= 1
        arrived(self, root)

    monkeypatch.setattr(LiveMap, '_arrived', wrong)
    wrong_cases = (draw(s) for s in SEEDS if check(draw(s)).outcome == 'different')
    case = next(wrong_cases)
    small = shrunk(case, 'different', seconds=5)
    assert len(small.layers) < len(case.layers)
    assert check(small).outcome == 'different'


@pytest.mark.parametrize(
    ('valid', 'cases', 'status'), [([], 20, 1), ([], 19, 0), ([7], 20, 0)]
)
def test_a_run_that_has_compared_nothing_fails(
    valid, cases, status, monkeypatch, capsys
):
    def checked(case):
        return Result('same' if case.seed in valid else 'invalid', 'NameError: F')

    monkeypatch.setattr(fuzz_main, 'check', checked)
    monkeypatch.setattr('sys.argv', ['fuzz', '--cases', str(cases)])
    assert fuzz_main.main() == status
    out = capsys.readouterr().out
    assert ('could train none of the 20 cases' in out) == bool(status)
    assert ('NameError: F' in out) == bool(status)


def test_a_case_is_the_same_in_every_process_and_file():
    case = draw(5)
    assert draw(5) == case
    assert draw(6) != case
    again = Case.from_json(case.to_json())
    assert again.to_json() == case.to_json()


def test_a_case_on_cuda_is_the_same_without_what_only_the_host_has():
    cuda, host = places.Cuda(), places.Host()
    limited = 0
    for case in map(draw, range(200)):
        before = case.to_json()
        adapted = cuda.adapted(case)
        assert host.adapted(case) is case and case.to_json() == before
        assert cuda.adapted(adapted) == adapted
        again = Case.from_json(adapted.to_json())
        assert cuda.adapted(again).to_json() == adapted.to_json()
        assert (adapted.seed, adapted.steps) == (case.seed, case.steps)
        assert adapted.layers == case.layers
        assert not adapted.session['file'] and not adapted.session['link_bandwidth']
        limited += adapted.session['host_share'] is not None
    assert 20 < limited < 80


def test_a_run_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setenv('FUZZ_DEVICE', 'cuda')
    monkeypatch.setattr(fuzz_main.compat, 'cuda_available', lambda: False)
    monkeypatch.setattr('sys.argv', ['fuzz', '--cases', '1'])
    with pytest.raises(SystemExit):
        fuzz_main.main()
    assert 'make cuda-emulator' in capsys.readouterr().err
    monkeypatch.setenv('FUZZ_DEVICE', 'tpu')
    with pytest.raises(SystemExit):
        fuzz_main.main()
    assert 'host or cuda' in capsys.readouterr().err
