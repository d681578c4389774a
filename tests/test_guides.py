"""Which kind of iteration is followed, recorded and profiled."""

from __future__ import annotations

import numpy as np
import pytest

from chainer_hybridmem.session.guides.guide import Guide, Stage
from chainer_hybridmem.session.guides.known_signatures import (
    CAUTIOUS_TRIES,
    FREE_TRIES,
    ITERATIONS_PER_TRY,
    MOST_FINGERPRINTS,
    KnownSignatures,
)


def kind(length: int, stage: Stage = Stage.PROFILING) -> Guide:
    guide = Guide([('f', k) for k in range(length)])
    guide.stage = stage
    return guide


@pytest.fixture
def guides() -> KnownSignatures:
    guides = KnownSignatures()
    for length in range(2, 10):
        guides.add(kind(length, Stage.GUIDED))
    return guides


def go(guides: KnownSignatures, met: Guide) -> bool:
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


# -- where nobody has asked for a plan -----------------------------------------
KEY = ('f', 0)


def test_what_comes_once_is_not_recorded():
    guides = KnownSignatures(cautious=True)
    for number in range(100):
        guides.miss(KEY, number)
        assert not guides.wants_draft(KEY)
    guides.miss(KEY, 7)
    assert guides.wants_draft(KEY)


def test_the_first_shortage_is_reason_enough():
    guides = KnownSignatures(cautious=True)
    guides.miss(KEY)  # before prints are taken
    assert guides.wants_draft(KEY)


def test_old_prints_are_forgotten():
    guides = KnownSignatures(cautious=True)
    for number in range(MOST_FINGERPRINTS + 1):
        guides.miss(KEY, number)
    guides.miss(KEY, 0)
    assert not guides.wants_draft(KEY)
    guides.miss(KEY, MOST_FINGERPRINTS)
    assert guides.wants_draft(KEY)


def test_drafts_in_vain_are_given_up_although_nothing_else_is_known():
    guides = KnownSignatures(cautious=True)
    guides.add(kind(20))
    tries = 0
    for _ in range(200):
        if guides.begin(KEY) is not None:
            tries += 1
            guides.count_vain_try()
        else:
            guides.miss(KEY, 0)
    assert tries == CAUTIOUS_TRIES + 200 // ITERATIONS_PER_TRY
    eager = KnownSignatures()
    eager.add(kind(20))
    for _ in range(200):
        assert eager.begin(KEY) is not None
        eager.count_vain_try()


def test_drafts_make_no_more_drafts_where_only_what_comes_again_counts():
    guides = KnownSignatures(cautious=True)
    guides.add(kind(3, Stage.GUIDED))
    for length in range(4, 4 + CAUTIOUS_TRIES):
        guides.add(kind(length))
    assert not guides.wants_draft(KEY)
