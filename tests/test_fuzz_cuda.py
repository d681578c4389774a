"""A few cases that ``FUZZ_DEVICE=cuda make fuzz`` draws.

See docs/internals/cuda_emulator.md.
"""

from __future__ import annotations

import pathlib

import pytest
from fuzz import places
from fuzz.cases import draw
from fuzz.checking import check
from test_fuzz_regressions import assert_drawn_are_exact, assert_kept_is_exact

from chainer_hybridmem.training.devices.protocol import View

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


# The memory of a view was taken for free, what a door had handed out for unchanged, and
# what the program had written into before it left; a running average that had left when
# it turned out to stay was lost; a dropout that did not fit at once drew twice; a trial
# that evicted an attribute was taken for a change by the program; a model's array that
# a former graph still reads was taken for one that may leave; what the gradient of an
# input needs was dropped; what had no room on the host was dropped after an update, or
# with a function before it that cannot run again; a replay of what the program had
# written counted more than the copy; there was no room for a fingerprint; a digest was
# compared after its words had been used again; a sum of gradients lay elsewhere than in
# the gradient whose place it had; one array of a list left for the next; a replay in
# one kernel was tried before the first update, when ways to round give the same bits;
# what backward had written over came back as it was before; what is kept for replays
# alone was not made again where memory was short; a trial as a whole moved running
# statistics.
@pytest.mark.parametrize('line', KEPT.read_text().splitlines())
def test_kept_cases_are_exact(line):
    assert_kept_is_exact(line)


def test_drawn_cases_are_exact():
    assert_drawn_are_exact(SEEDS)


def test_a_wrong_bit_is_found(monkeypatch):
    """What the harness would say about a plan that is executed wrongly."""
    from chainer_hybridmem.training.devices.copies import Copies

    swap_in = Copies.swap_in

    def wrong(self, copy, root):
        transfer = swap_in(self, copy, root)
        self._engine.finish()
        first = self._arrays.restore(root, View(0, (1,), (1,), '|u1'))
        first ^= 1  # not more: it may be an index
        return transfer

    monkeypatch.setattr(Copies, 'swap_in', wrong)
    assert any(check(draw(seed)).outcome == 'different' for seed in SEEDS)
