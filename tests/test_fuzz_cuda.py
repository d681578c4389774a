"""A few cases that ``FUZZ_DEVICE=cuda make fuzz`` draws; see docs/cuda_emulator.md."""

from __future__ import annotations

import pathlib

import pytest
from fuzz import places
from fuzz.cases import Case, draw
from fuzz.checking import check

from chainer_hybridmem.devices.protocol import View

pytestmark = pytest.mark.gpu
SEEDS = range(8)
KEPT = pathlib.Path(__file__).parent / 'fuzz' / 'cuda_regressions.jsonl'


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setenv('FUZZ_DEVICE', 'cuda')
    yield
    control = places._emulator()
    if control is not None:
        control.schedule('random', 0)


# The memory of a view was taken for free, and what a door had handed out for unchanged.
@pytest.mark.parametrize('line', KEPT.read_text().splitlines())
def test_kept_cases_are_exact(line):
    result = check(Case.from_json(line))
    assert result.outcome == 'same', result.detail


def test_drawn_cases_are_exact():
    results = {seed: check(draw(seed)) for seed in SEEDS}
    failed = {seed: r.detail for seed, r in results.items() if r.failed}
    assert not failed
    same = [result for result in results.values() if result.outcome == 'same']
    assert len(same) > len(SEEDS) / 2
    assert sum(result.guided for result in same) > len(SEEDS)
    assert any(sum(result.moved) for result in same)


def test_a_wrong_bit_is_found(monkeypatch):
    """What the harness would say about a plan that is executed wrongly."""
    from chainer_hybridmem.devices.cuda import CudaDevice

    swap_in = CudaDevice.swap_in

    def wrong(self, copy, root):
        transfer = swap_in(self, copy, root)
        self.synchronize()
        first = self.restore(root, View(0, (1,), (1,), '|u1'))
        first ^= 1  # not more: it may be an index
        return transfer

    monkeypatch.setattr(CudaDevice, 'swap_in', wrong)
    assert any(check(draw(seed)).outcome == 'different' for seed in SEEDS)
