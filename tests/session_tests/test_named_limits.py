"""The limit that an error names does for whole steps, whatever they are made of."""

from __future__ import annotations

import re

import pytest
from support import drawn_programs
from support.matrices import several

import chainer_hybridmem
from chainer_hybridmem.errors import OutOfMemoryError

PLENTY = 10**9
KEPT = {22, 31}  # another recording is known when the limit is named


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize(
    'seed', sorted(KEPT | {*range(several(len(drawn_programs.SHAPES), all_of_them=60))})
)
def test_the_next_run_trains(seed):
    program = drawn_programs.Program(seed)
    plain, expected = drawn_programs.train(seed, PLENTY)
    peak_bytes = plain.statistics()['peak_bytes']
    limit_bytes = int(peak_bytes * program.share)
    try:
        _, losses = drawn_programs.train(seed, limit_bytes, program.planner)
    except OutOfMemoryError as error:
        told = str(error)
        named_bytes = int(re.search(r'known to do is [^(]+ \((\d+) bytes\)', told)[1])
        assert limit_bytes < named_bytes < 1.02 * peak_bytes  # a 64th to spare
        session, losses = drawn_programs.train(seed, named_bytes, program.planner)
        assert session.statistics()['peak_bytes'] <= named_bytes
    assert losses == expected


@pytest.mark.filterwarnings('ignore::UserWarning')
@pytest.mark.parametrize('passes, known', [(1, False), (5, True)])
def test_what_has_not_come_again_is_not_called_known(passes, known):
    """A program that ends before its second update says what the number is for."""
    seed = drawn_programs.SHAPES.index('accumulated')
    program = drawn_programs.Program(seed)
    program.passes = 2
    with pytest.raises(OutOfMemoryError) as caught:
        with chainer_hybridmem.optimize(program.model, 400_000):
            for _ in range(passes):
                program.step()
    assert ('others may need more' in str(caught.value)) != known
