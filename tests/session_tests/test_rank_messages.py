"""What the first rank changes reaches the others in order, however late."""

from __future__ import annotations

import random
import threading
from collections import deque

import pytest

from chainer_hybridmem.training.session.setting import ranks
from chainer_hybridmem.training.session.setting.ranks import Ranks, Topic

MPI = pytest.importorskip('mpi4py.MPI')
CHANGE, OTHER = Topic('change', ('a',)), Topic('change', ('b',))


class Communicator:
    """One end of a line between two ranks in one process, which may hold messages back.

    Args:
        rank (int): Its own.
        inbox (deque): Of what comes.
        outbox (deque): Of what goes.

    Attributes:
        held (int): Messages that have not arrived yet; the next try finds one more.
    """

    size = 2

    def __init__(self, rank, inbox, outbox):
        self.rank, self.inbox, self.outbox = rank, inbox, outbox
        self.held = 0
        self.mpi_comm = self

    def isend(self, value, dest, tag):
        self.outbox.append(value)
        return self

    def test(self):
        return True, None

    def improbe(self, tag, status):
        status.Set_source(1 - self.rank)
        if len(self.inbox) > self.held:
            return self
        self.held = max(self.held - 1, 0)
        return None

    def recv(self):
        return self.inbox.popleft()


@pytest.fixture
def pair():
    """The first rank, another one, its communicator, and what that has told."""
    lines, ends = [], (deque(), deque())
    communicators = [Communicator(r, ends[r], ends[1 - r]) for r in (0, 1)]
    opened = {}

    def open_one(rank):
        opened[rank] = Ranks(communicators[rank], lines.append)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return opened[0], opened[1], communicators[1], lines


def fail():
    raise ValueError('no plan')


def change(first, topic, value):
    """The first rank changes to a value, or tries to in vain."""
    if value is not None:
        first.change(topic, lambda: value)
        return
    with pytest.raises(ValueError, match='no plan'):
        first.change(topic, fail)


@pytest.mark.parametrize('seed', range(100))
def test_the_other_ends_where_the_first_is(seed, pair, monkeypatch):
    """Changes that all come to or only the first one, and those that fail, late."""
    monkeypatch.setattr(ranks, 'PATIENCE_SECONDS', 0.2)
    monkeypatch.setattr(ranks, 'POLL_SECONDS', 0.0)
    first, other, line, lines = pair
    rng, in_force, followed, made = random.Random(seed), 0, [0], 0
    for _ in range(20):
        for _ in range(rng.choice([0, 0, 1, 2])):  # as times become known
            made += 1
            first.announce(CHANGE, made)
            in_force = made
        assert first.end_iteration(CHANGE) is None
        awaited = rng.choice([0, 0, 1, 2])  # that all come to
        answers = [rng.choice([None, made + 1 + i]) for i in range(awaited)]
        made += awaited
        for answer in answers:
            change(first, CHANGE, answer)
            in_force = answer or in_force
        if rng.random() < 0.2:  # that the other one does not come to
            change(first, OTHER, -1)
        if rng.random() < 0.2:
            made += 1
            change(first, CHANGE, made)
            in_force = made
        first.close_iteration(CHANGE)
        line.held = rng.randint(0, len(line.inbox))
        followed.append(other.end_iteration(CHANGE) or followed[-1])
        for answer in answers:
            assert other.await_change(CHANGE) == answer
            followed[-1] = max(followed[-1], answer or 0)
        for _ in range(rng.choice([0, 0, 0, 1, 2])):  # which the first one does not
            followed[-1] = other.await_change(CHANGE) or followed[-1]
            assert followed[-1] == in_force
    line.held = 0
    followed.append(other.end_iteration(CHANGE) or followed[-1])
    assert followed[-1] == in_force
    assert followed == sorted(followed)
    assert lines == []


def test_a_change_that_fails_leaves_the_one_before_it_in_force(pair):
    first, other, _, _ = pair
    first.announce(CHANGE, 'a plan')
    for _ in range(2):
        change(first, CHANGE, None)
    assert other.end_iteration(CHANGE) == 'a plan'
    assert other.end_iteration(CHANGE) is None


def test_what_was_changed_before_all_decide_is_out_of_date(pair):
    first, other, _, _ = pair
    first.announce(CHANGE, 'a plan')
    first.decide(Topic('replan'), lambda: 'a newer one')
    assert other.decide(Topic('replan'), fail).value == 'a newer one'
    other.forget_changes(CHANGE)
    assert other.end_iteration(CHANGE) is None


def test_a_rank_that_changes_nothing_is_waited_for_once(pair, monkeypatch):
    monkeypatch.setattr(ranks, 'PATIENCE_SECONDS', 0.01)
    _, other, _, lines = pair
    for _ in range(2):
        assert other.await_change(CHANGE) is None
    assert len(lines) == 1 and 'rank 1 goes on alone (change)' in lines[0]
