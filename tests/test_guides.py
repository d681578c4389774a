"""Which kind of iteration is followed, recorded and profiled."""

from __future__ import annotations

import numpy as np
import pytest

from chainer_hybridmem.training.session.guides.guide import Guide, Stage
from chainer_hybridmem.training.session.guides.guidebook import (
    FEWEST_REPEATS,
    FREE_TRIES,
    ITERATIONS_PER_TRY,
    LEAST_AGAIN,
    LONGEST_STEP,
    MOST_FINGERPRINTS,
    NEWEST,
    SELDOM_FITTING,
    TRY_ITERATIONS,
    GuideBook,
    IterationOrder,
    Past,
)


def kind(length: int, stage: Stage = Stage.PROFILING) -> Guide:
    guide = Guide([('f', k) for k in range(length)])
    guide.stage = stage
    return guide


@pytest.fixture
def guides() -> GuideBook:
    guides = GuideBook()
    for length in range(2, 10):
        guides.add(kind(length, Stage.GUIDED))
    return guides


def go(guides: GuideBook, met: Guide) -> bool:
    """One iteration; whether it was begun as a draft's."""
    begun = guides.begin(met.signature[0])
    tried = begun is not None and begun.stage is Stage.PROFILING
    guides.meet(met, tried)
    return tried


def test_a_draft_that_never_comes_is_tried_ever_more_rarely(guides):
    others = list(guides)
    guides.add(kind(20))
    tries = sum(go(guides, others[i % len(others)]) for i in range(1000))
    assert tries == FREE_TRIES + 1000 // ITERATIONS_PER_TRY


def test_a_draft_that_comes_every_time_is_tried_every_time(guides):
    draft = kind(20)
    guides.add(draft)
    assert all(go(guides, draft) for _ in range(50))


def test_every_kind_is_profiled_in_the_end(guides):
    rng = np.random.RandomState(0)
    drafts = [kind(length) for length in range(20, 51)]
    for draft in drafts:
        guides.add(draft)
    left = {id(draft): 2 for draft in drafts}
    vain = iterations = 0
    while any(draft.stage is Stage.PROFILING for draft in drafts):
        met = drafts[rng.randint(len(drafts))]
        was_draft = met.stage is Stage.PROFILING
        tried = go(guides, met)
        iterations += 1
        vain += tried and not was_draft
        if tried and was_draft:
            left[id(met)] -= 1
            if not left[id(met)]:
                met.stage = Stage.GUIDED
    assert vain <= FREE_TRIES + iterations / ITERATIONS_PER_TRY
    assert iterations < 4000


def test_a_kind_that_begins_alone_is_tried_although_others_were_in_vain(guides):
    others = list(guides)
    guides.add(kind(20))
    for i in range(100):
        go(guides, others[i % len(others)])
    lonely = Guide([('g', 0), ('g', 1)])
    lonely.stage = Stage.PROFILING
    guides.add(lonely)
    assert go(guides, lonely)


# -- where no plan is asked for ------------------------------------------------
KEY = ('f', 0)


def test_the_first_shortage_is_reason_enough():
    guides = GuideBook(cautious=True)
    guides.miss(KEY, 1, 1.0, 0.0)
    assert guides.wants_draft(KEY)


def test_what_comes_alone_is_learnt_at_once():
    guides = GuideBook(cautious=True)
    guides.miss(KEY, 1, 1.0, 0.0)
    guides.end_learning(KEY, 1, 5.0)
    guides.add(kind(20))
    assert guides.begin(KEY) is not None


def test_families_that_begin_differently_are_learnt_as_far_as_that_is_paid():
    guides = GuideBook(cautious=True)
    guides.miss(('f', 1), 1, 1.5, 0.5)
    guides.miss(('f', 2), 2, 1.5, 0.5)
    assert guides.wants_draft(('f', 2))
    guides.end_learning(('f', 1), 1, 4.0)  # 3 s more than usual
    guides.add(kind(20))
    for number in range(3, 7):
        assert not guides.wants_draft(('f', 2))
        guides.miss(('f', 3), number, 1.5, 0.5)
    assert guides.wants_draft(('f', 2))


def test_families_that_come_once_are_recorded_once():
    guides = GuideBook(cautious=True)
    guides.miss(('f', 0), 0, 2.0, 1.0)
    guides.end_learning(('f', 0), 100, 1.0)
    draft = kind(20)
    draft.stage = Stage.PROFILING
    guides.add(draft)
    for number in range(1, 50):
        guides.miss(('f', number), number, 2.0, 1.0)
        assert not guides.wants_draft(('f', number))
    guides.miss(('f', 7), 7, 2.0, 1.0)
    assert guides.wants_draft(('f', 7))


def test_what_never_comes_again_is_not_recorded():
    guides = GuideBook(cautious=True)
    guides.miss(KEY, 0, 1.0, 0.9)
    guides.end_learning(KEY, 1, 1.0)
    for number in range(2, 100):
        guides.miss(KEY, number, 1.0, 0.0)
        assert not guides.wants_draft(KEY)


def test_a_draft_is_not_tried_where_signatures_do_not_come_again():
    guides = GuideBook(cautious=True)
    guides.miss(KEY, 0, 1.0, 0.9)
    guides.end_learning(KEY, 1, 1.0)
    guides.add(kind(20, Stage.PROFILING))
    for number in range(2, 100):
        guides.miss(KEY, number, 10.0, 9.0)
        assert guides.begin(KEY) is None and not guides.wants_draft(KEY)
    for number in range(NEWEST // LEAST_AGAIN):
        assert guides.begin(KEY) is None
        guides.miss(KEY, number, 10.0, 9.0)
    assert guides.begin(KEY) is not None


def test_drafts_are_not_tried_while_none_comes_again():
    """Also where a planner is named, so that every kind is recorded."""
    guides = GuideBook()
    tried = []
    for number in range(20, 60):
        tried.append(guides.begin(KEY) is not None)
        guides.add(kind(number, Stage.PROFILING))
    assert tried == [False] + [True] * FREE_TRIES + [False] * (39 - FREE_TRIES)
    again = next(iter(guides))
    guides.meet(again, tried=False)
    assert guides.begin(KEY) is again


def test_a_family_is_learnt_once_it_has_lost_what_learning_costs():
    guides = GuideBook(cautious=True)
    guides.miss(KEY, 1, 2.0, 1.0)
    guides.end_learning(KEY, 2, 3.0)  # one iteration, which costs 1 s, and 2 s more
    guides.add(kind(20))
    lost = 1.0
    while lost < 2.0 + TRY_ITERATIONS:
        assert guides.begin(KEY) is None and not guides.wants_draft(KEY)
        guides.miss(KEY, 1 + lost % 2, 2.0, 1.0)
        lost += 1.0
    assert guides.begin(KEY) is not None and guides.wants_draft(KEY)
    guides.end_learning(KEY, 2, 11.0)  # the next try is expected to cost as much
    for _ in range(2 * 10 + 2 - int(lost)):
        assert guides.begin(KEY) is None
        guides.miss(KEY, 1 + lost % 2, 2.0, 1.0)
        lost += 1.0
    assert guides.begin(KEY) is not None


def learn_first(guides: GuideBook, number: int) -> Guide:
    """An iteration of this fingerprint is recorded, the second one of all."""
    guides.miss(KEY, -1, 1.0, 0.0)  # as of a network without a state yet
    guides.end(None, -1, 1, missed=True)
    guides.end_learning(KEY, number, 2.0)
    draft = kind(20)
    guides.add(draft)
    guides.end(draft, number, 1)
    return draft


def test_what_has_come_several_times_in_a_row_is_learnt():
    guides = GuideBook(cautious=True)
    draft = learn_first(guides, 2)
    for _ in range(FEWEST_REPEATS):
        assert guides.begin(KEY) is None
        guides.miss(KEY, 2, 1.0, 0.0)
        guides.end(None, 2, 1, missed=True)
    assert guides.begin(KEY) is draft


@pytest.mark.parametrize('length', [2, 3, 7])
def test_each_iteration_of_a_step_that_repeats_is_learnt_where_it_comes(length):
    """They begin alike, and what passive iterations lose does not pay for learning."""
    guides = GuideBook(cautious=True)
    last = length - 1  # nothing has to leave in the first one
    draft = learn_first(guides, last)
    guides.end(None, -2, 1)  # as of an evaluation: no step has begun yet
    for number in [*range(length), *range(length)]:
        assert guides.begin(KEY) is None and not guides.wants_draft(KEY)
        if number:
            guides.miss(KEY, number, 1.0, 0.0)
        guides.end(None, number, 1, missed=number > 0)
    for number in range(length):
        is_known, fits = number == last, number == 0
        assert guides.begin(KEY) is (draft if is_known else None)
        assert guides.wants_draft(KEY) == (not is_known and not fits)
        guide = draft if is_known else None if fits else kind(20 + number)
        if not (is_known or fits):
            guides.add(guide)
        guides.end(guide, number, 1)
    for number in range(length):
        guide = guides.begin(KEY)
        assert guide is None if number == 0 else guide is not None
        assert guide is None or len(guide.signature) == 20 + number % last
        assert not guides.wants_draft(KEY)
        guides.end(guide, number, 1)


def test_a_step_that_is_left_is_not_taken_for_one_that_repeats():
    guides = GuideBook(cautious=True)
    draft = learn_first(guides, 2)
    for number in (2, 2):
        guides.end(None, number, 1, missed=True)
    assert guides.begin(KEY) is draft
    guides.end(None, 5, 1, missed=True)
    assert guides.begin(KEY) is None and not guides.wants_draft(KEY)


# -- the order of iterations -----------------------------------------------------
def note(order: IterationOrder, kinds: str) -> None:
    for letter in kinds:
        order.note(Past(letter))


@pytest.mark.parametrize(
    ('kinds', 'expected', 'repeats'),
    [
        ('', None, False),
        ('a', None, False),
        ('ab', None, False),
        ('aa', 'a', False),
        ('aaa', 'a', True),
        ('aba', 'b', False),
        ('abab', 'a', True),
        ('abcab', 'c', False),
        ('abcabc', 'a', True),
        ('aaaabaaaaba', 'a', True),
        ('aaaabaaaabaaaa', 'b', True),  # four times the same is no step of its own
        ('abcabcx', None, False),
        ('abcabcxabcabc', 'x', False),
        ('xyzabab', 'a', True),
    ],
)
def test_what_is_expected_comes_one_step_after_the_same(kinds, expected, repeats):
    order = IterationOrder()
    note(order, kinds)
    past = order.expected
    assert (None if past is None else past.kind) == expected
    assert order.repeats == repeats


def test_what_comes_once_in_a_while_is_not_expected_in_the_place_of_the_usual():
    """A batch of a seldom size; which one it is, is drawn."""
    rng, order, vain = np.random.RandomState(0), IterationOrder(), 0
    kinds = ['b' if rng.rand() < 0.05 else 'a' for _ in range(500)]
    for letter in kinds:
        past = order.expected
        vain += past is not None and past.kind != 'a' and letter == 'a'
        order.note(Past(letter))
    assert kinds.count('b') > 10 and 2 * vain <= kinds.count('b')


def test_the_longest_step_is_found_and_longer_ones_are_not():
    for length in (LONGEST_STEP, LONGEST_STEP + 1):
        order = IterationOrder()
        for number in range(3 * length):
            order.note(Past(number % length))
        found = length == LONGEST_STEP
        assert order.repeats == found
        assert order.expected == (Past(0) if found else None)


def test_learning_never_costs_more_than_passive_iterations_have():
    rng = np.random.RandomState(0)
    guides = GuideBook(cautious=True)
    lost = spent = most = 0.0
    for i in range(2000):
        fingerprint, share = int(2 * rng.randint(15) + i % 2), float(rng.rand())
        if guides.begin(KEY) is not None or guides.wants_draft(KEY):
            cost = float(rng.choice([2.0, 8.0]))
            guides.end_learning(KEY, fingerprint, 1.0 + cost)
            guides.end(None, fingerprint, 1)
            spent, most = spent + cost, max(most, cost)
            continue
        guides.miss(KEY, fingerprint, 1.0 + share, share)
        guides.end(None, fingerprint, 1, missed=True)
        lost += share
    assert 0 < spent <= lost + 3 * most


def test_old_prints_are_forgotten():
    guides = GuideBook(cautious=True)
    for number in range(MOST_FINGERPRINTS + 1):
        guides.miss(KEY, number, 1.0, 100.0)
    assert len(guides._family(KEY).fingerprints) == MOST_FINGERPRINTS


def test_plans_that_do_not_fit_are_followed_seldom():
    guides = GuideBook(cautious=True)
    guides.add(kind(3, Stage.GUIDED))
    for number in range(NEWEST):
        assert guides.begin(KEY) is not None
        guides.end_plan(KEY, fits=number % 3 == 0)
    begun = [guides.begin(KEY) is not None for _ in range(10 * SELDOM_FITTING)]
    assert sum(begun) == 10
    for _ in range(NEWEST):
        guides.end_plan(KEY, fits=True)
    assert guides.begin(KEY) is not None
