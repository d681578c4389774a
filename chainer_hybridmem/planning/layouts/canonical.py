"""Compiled: whether blocks fit into a capacity, by search of all canonical layouts.

Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
Learning", ASPLOS 2023. Where any layout fits, so does a canonical one: every block
lies on another one or at the bottom, and blocks are placed by ascending offset, ties
by rank. So one step of the search puts a block exactly where those below it end, its
*low*, and what it may not undercut is known:

- *Sections* are the largest sets of blocks that live together. In each, all that is
  not placed yet lies above the current offset, and above the least low of its blocks:
  with their bytes on top of that it must end below the capacity. One block that is low
  enough is a section's *witness*; most steps only look whether it still is.
- A block whose low is below the current offset will be lifted by one that lives
  together with it: at least by the smallest of them.
- *Dominance*: nothing is placed so high that another block would fit below it.
- A block that no block to come lies on is tried in one place only.
- Blocks that no section connects any more are *parts*, searched one by one: where one
  cannot be placed, no other placement of another helps.

Ranks decide how soon a layout is found, and no ranking is best for all: several
searches take turns (:data:`RANKINGS`), each goes on where it has stopped, and the
first one that ends has the answer for all.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np
from numba import types

from chainer_hybridmem.jit import compiled
from chainer_hybridmem.jit_table import Ints, Ints2, Shorts, Table
from chainer_hybridmem.planning.layouts.placement import NOWHERE, Blocks
from chainer_hybridmem.planning.search.deadline import Deadline

_i64, _bool = types.int64, types.boolean
OPEN, FITS, CANNOT = 0, 1, 2  # what is known
# Keys of the ranks, the largest first; L stands for the highest load of a block's
# sections, of what is still to be placed when a part begins: the hottest first.
RANKINGS = (('L', 'length', 'area'), ('L', 'area', 'length'), ('length', 'area'))
PAIRS_AT_ONCE = 10_000_000  # of blocks, that one call looks at; less than 0.2 s
MOST_CONFLICTS = 20_000_000  # pairs of blocks that live together
ROOM = 8  # of the lists of parts inside each other, in numbers of blocks
ENDLESS = 2**62

# Places in ``Tree.now``, rows of ``Tree.frame``, ``Tree.part``.
DEPTH, TRAIL, LISTED, RUNS, PARTS, STATUS = range(6)
PART, PLACE, OFFSET, LIMIT, MARK, LIST_END, FIRST_RUN, SINGLE = range(8)
HEAD, FIRST, LAST = range(3)


@dataclasses.dataclass(frozen=True, eq=False)
class Tree(Table):
    """A search where it stands: frames, one for each block placed, one in the other.

    Frame 0 places nothing. A list of blocks is chained through places of ``listed``,
    so that a block leaves it and comes back at once.
    """

    size: Ints  # (n,)
    ranges: Ints2  # (n, 4), sections of each block, as spans
    pointer: Ints  # (n + 1,), see conflicts
    others: Shorts  # int32
    section_pointer: Ints  # (s + 1,), blocks of each section
    section_blocks: Shorts  # int32
    smallest: Annotated[Ints, 'n']  # of the blocks that live together with each
    rank: Ints  # (n,)
    low: Annotated[Ints, 'n']
    offset: Ints  # (n,), NOWHERE while it is not placed
    waiting: Ints  # (n,), others that are not placed
    total: Ints  # (s,), bytes of each section that are not placed
    cuts: Ints  # (s,), blocks not placed in each section and the next
    witness: Annotated[Ints, 's']
    found: Annotated[Ints, 'n']  # offsets of parts that are done
    listed: Annotated[Ints2, 3, 'room']  # block, next, previous
    trail: Annotated[Ints2, 2, 'pairs']  # block and the low it had
    frame: Annotated[Ints2, 'n + 2', 8]
    part: Annotated[Ints2, 'n + 2', 3]  # place before its first block, its sections
    run: Annotated[Ints2, 's + n + 2', 2]  # sections of parts to come
    key: Annotated[Ints, 'n']  # work
    now: Annotated[Ints, 6]


class Canonical:
    """Searches of all canonical layouts of some blocks.

    Args:
        blocks (Blocks): To be laid out.
        deadline (Deadline): The searches stop at it.

    Attributes:
        possible (bool): Whether there is memory for a search.
    """

    def __init__(self, blocks: Blocks, deadline: Deadline) -> None:
        self._size = np.ascontiguousarray(blocks.size, np.int64)
        self._deadline = deadline
        self._ranges, sections = find_sections(blocks.spans)
        n = len(self._size)
        self._pointer = np.zeros(n + 1, np.int64)
        count = conflicts(self._ranges, self._pointer, np.zeros(0, np.int32))
        self.possible = n > 0 and count <= MOST_CONFLICTS
        if not self.possible:
            return
        self._others = np.zeros(count, np.int32)
        conflicts(self._ranges, self._pointer, self._others)
        ranges = self._ranges
        inside = np.zeros(sections + 1, np.int64)
        self._total, self._cuts = np.zeros_like(inside), np.zeros_like(inside)
        for first, last in ((0, 1), (2, 3)):
            for change, at in ((1, first), (-1, last)):
                np.add.at(inside, ranges[:, at], change)
                np.add.at(self._total, ranges[:, at], change * self._size)
        self._total = np.cumsum(self._total)[:-1]
        split = ranges[:, 3] > ranges[:, 2]  # of two ranges the first begins at 0
        np.add.at(self._cuts, np.where(split, ranges[:, 2], ranges[:, 0]), 1)
        np.add.at(self._cuts, ranges[:, 1] - 1, -1)
        self._cuts = np.cumsum(self._cuts)[:-1]
        self._section_pointer = np.concatenate([[0], np.cumsum(np.cumsum(inside)[:-1])])
        length = blocks.durations()
        area = length.astype(float) * self._size
        keys = {'length': length, 'area': area}
        self._ranks = []
        for ranking in RANKINGS:
            columns = [-keys[key] for key in reversed(ranking) if key != 'L']
            order = np.lexsort(columns)
            rank = np.zeros(n, np.int64)
            rank[order] = np.arange(n)
            self._ranks.append((rank, 'L' in ranking))

    def fit(self, capacity: int, pairs: int) -> tuple[int, np.ndarray]:
        """Searches for a layout inside a capacity.

        Args:
            capacity: Bytes.
            pairs: Pairs of blocks that may be looked at.

        Returns:
            tuple: :data:`FITS` with offsets, (n,) int64; :data:`CANNOT` if there is no
            such layout, proven; :data:`OPEN` if that is not known.
        """
        steps = max(1, PAIRS_AT_ONCE // len(self._size))
        trees: list[Tree] = []
        left = pairs // len(self._size)
        while left > 0:
            for k, (rank, by_load) in enumerate(self._ranks):
                if left <= 0 or self._deadline.is_over:
                    return OPEN, self._size
                if k == len(trees):
                    trees.append(self._make_tree(rank, by_load))
                share = min(steps, left)
                left -= share
                status = search(trees[k], capacity, share, by_load)
                if status != OPEN:
                    return status, trees[k].found
        return OPEN, self._size

    def _make_tree(self, rank: np.ndarray, by_load: bool) -> Tree:
        n, sections = len(self._size), len(self._total)
        order = np.argsort(rank)
        lengths = {'n': n, 'n + 2': n + 2, 's': sections, 's + n + 2': sections + n + 2}
        lengths |= {'room': ROOM * n + 64, 'pairs': len(self._others) // 2 + n + 1}
        tree = Tree.zeros(
            lengths,
            size=self._size,
            ranges=self._ranges,
            pointer=self._pointer,
            others=self._others,
            section_pointer=self._section_pointer,
            section_blocks=np.zeros(self._section_pointer[-1], np.int32),
            rank=rank,
            offset=np.full(n, NOWHERE, np.int64),
            waiting=np.diff(self._pointer),
            total=self._total.copy(),
            cuts=self._cuts.copy(),
        )
        begin(tree, order, by_load)
        return tree


def find_sections(spans: np.ndarray) -> tuple[np.ndarray, int]:
    """Sections of each block, (n, 4) int64 like spans, and how many there are.

    After the last start before an end, and nowhere else, the most live together.
    """
    twice = spans[:, 3] > spans[:, 2]
    starts = np.unique(np.concatenate([spans[:, 0], spans[twice, 2]]))
    ends = np.unique(np.concatenate([spans[:, 1], spans[twice, 3]]))
    ended = np.searchsorted(ends, starts, 'right')  # a block that starts is no end
    largest = ended < np.append(ended[1:], len(ends))
    ranges = np.searchsorted(starts[largest], spans).astype(np.int64)
    return np.ascontiguousarray(ranges), int(largest.sum())


@compiled(
    _i64(
        _i64[:, ::1],
        _i64[::1],
        types.int32[::1],
    ),
    apart=True,
)
def conflicts(spans: np.ndarray, pointer: np.ndarray, others: np.ndarray) -> int:
    """Which blocks live together with each: ``others[pointer[i]:pointer[i + 1]]``.

    Args:
        spans: As for :func:`.placement.place`.
        pointer: Result, (n + 1,) int64.
        others: Result, as many int32 as there are; too few fill the pointer alone.

    Returns:
        int: How many there are.
    """
    n = len(spans)
    total = 0
    for i in range(n):
        pointer[i] = total
        lower, upper = spans[i, 0], spans[i, 1]
        lower2, upper2 = spans[i, 2], spans[i, 3]
        for j in range(n):
            a, b, c, d = spans[j, 0], spans[j, 1], spans[j, 2], spans[j, 3]
            meets = (
                (lower < b and a < upper)
                or (lower2 < b and a < upper2)
                or (lower < d and c < upper)
                or (lower2 < d and c < upper2)
            )
            if meets and i != j:
                if total < len(others):
                    others[total] = j
                total += 1
    pointer[n] = total
    return total


@compiled(
    types.void(
        Tree.compiled,
        _i64[::1],
        _bool,
    ),
    apart=True,
)
def begin(tree: Tree, order: np.ndarray, by_load: bool) -> None:
    """Makes frame 0, whose parts are those of all blocks.

    Args:
        tree: As it is made, with zeros for all that is not known before.
        order: Blocks by rank, (n,) int64.
        by_load: Whether the hottest blocks come first.
    """
    n = len(order)
    count = np.zeros(len(tree.total), np.int64)
    for k in range(n):
        i = order[k]
        for which in range(0, 4, 2):
            for s in range(tree.ranges[i, which], tree.ranges[i, which + 1]):
                if count[s] == 0:
                    tree.witness[s] = i
                tree.section_blocks[tree.section_pointer[s] + count[s]] = i
                count[s] += 1
        tree.smallest[i] = ENDLESS
        for q in range(tree.pointer[i], tree.pointer[i + 1]):
            tree.smallest[i] = min(tree.smallest[i], tree.size[tree.others[q]])
        tree.listed[0, k + 1] = i
    _chain(tree, 0, n + 1)
    tree.now[LISTED] = n + 1
    tree.part[0, LAST] = len(tree.total)
    tree.now[PARTS] = 1
    tree.frame[0, PLACE] = NOWHERE
    _divide(tree, 0)
    _begin_part(tree, 0, by_load)


@compiled(inline=True, counted=False)
def _chain(tree: Tree, head: int, end: int) -> None:
    """Makes what lies in places behind ``head`` a list."""
    for place in range(head, end):
        tree.listed[1, place] = place + 1
        tree.listed[2, place] = place - 1
    tree.listed[1, end - 1] = NOWHERE


@compiled(inline=True, counted=False)
def _divide(tree: Tree, depth: int) -> int:
    """Notes the parts that a frame leaves of its own; how many there are."""
    part = tree.frame[depth, PART]
    first = tree.now[RUNS]
    count, start = first, tree.part[part, FIRST]
    last = tree.part[part, LAST]
    for s in range(start, last):
        if s == last - 1 or tree.cuts[s] == 0:
            if tree.total[s] > 0:
                tree.run[count, 0], tree.run[count, 1] = start, s + 1
                count += 1
            start = s + 1
    tree.frame[depth, FIRST_RUN] = first
    tree.now[RUNS] = count
    return int(count - first)


@compiled(types.void(Tree.compiled, _i64, _bool), apart=True, counted=False)
def _begin_part(tree: Tree, depth: int, by_load: bool) -> None:
    """Makes a frame for the last part that is noted, its blocks by rank."""
    now, blocks = tree.now, tree.listed[0]
    now[RUNS] -= 1
    first, last = tree.run[now[RUNS], 0], tree.run[now[RUNS], 1]
    head = now[LISTED]
    end = head + 1
    tree.frame[depth, LIST_END] = head
    place = tree.listed[1, tree.part[tree.frame[depth, PART], HEAD]]
    while place != NOWHERE:
        i = blocks[place]
        if first <= tree.ranges[i, 1] - 1 < last:
            blocks[end] = i
            end += 1
        place = tree.listed[1, place]
    if by_load:
        _sort_by_load(tree, head + 1, end)
    _chain(tree, head, end)
    now[LISTED] = end
    part = now[PARTS]
    now[PARTS] += 1
    tree.part[part, HEAD] = head
    tree.part[part, FIRST], tree.part[part, LAST] = first, last
    _open(tree, depth + 1, part, tree.frame[depth, OFFSET], NOWHERE)


@compiled(inline=True, counted=False)
def _sort_by_load(tree: Tree, begin: int, end: int) -> None:
    """Orders blocks of a list by the highest load of their sections (Shell's sort)."""
    blocks, key, rank = tree.listed[0], tree.key, tree.rank
    for place in range(begin, end):
        i = blocks[place]
        key[i] = 0
        for which in range(0, 4, 2):
            for s in range(tree.ranges[i, which], tree.ranges[i, which + 1]):
                key[i] = max(key[i], tree.total[s])
    gap = 1
    while gap < (end - begin) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(begin + gap, end):
            i, at = blocks[k], k
            while at - gap >= begin:
                j = blocks[at - gap]
                if key[j] > key[i] or (key[j] == key[i] and rank[j] < rank[i]):
                    break
                blocks[at] = j
                at -= gap
            blocks[at] = i
        gap //= 3


@compiled(inline=True, counted=False)
def _open(tree: Tree, depth: int, part: int, offset: int, place: int) -> None:
    """Makes a frame whose blocks lie at an offset, behind a place, or above."""
    least = np.int64(ENDLESS)
    at = tree.listed[1, tree.part[part, HEAD]]
    while at != NOWHERE:
        i = tree.listed[0, at]
        least = min(least, tree.low[i] + tree.size[i])
        at = tree.listed[1, at]
    frame = tree.frame[depth]
    frame[PART], frame[OFFSET], frame[PLACE] = part, offset, place
    frame[LIMIT], frame[SINGLE] = least, 0
    tree.now[DEPTH] = depth


@compiled(types.void(Tree.compiled, _i64), apart=True, counted=False)
def _take_back(tree: Tree, depth: int) -> None:
    """Takes back what a frame has placed."""
    frame = tree.frame[depth]
    place = frame[PLACE]
    i = tree.listed[0, place]
    tree.offset[i] = NOWHERE
    _change_sections(tree, i, tree.size[i], 1)
    mark = tree.now[TRAIL]
    while mark > frame[MARK]:
        mark -= 1
        tree.low[tree.trail[0, mark]] = tree.trail[1, mark]
    tree.now[TRAIL] = mark
    for q in range(tree.pointer[i], tree.pointer[i + 1]):
        tree.waiting[tree.others[q]] += 1
    before, after = tree.listed[2, place], tree.listed[1, place]
    tree.listed[1, before] = place
    if after != NOWHERE:
        tree.listed[2, after] = place


@compiled(inline=True, counted=False)
def _change_sections(tree: Tree, i: int, nbytes: int, change: int) -> bool:
    """Adds a block to its sections or takes it out; whether that divides them."""
    ranges = tree.ranges[i]
    for which in range(0, 4, 2):
        for s in range(ranges[which], ranges[which + 1]):
            tree.total[s] += nbytes
    divided = False
    start = ranges[2] if ranges[3] > ranges[2] else ranges[0]
    for s in range(start, ranges[1] - 1):
        tree.cuts[s] += change
        if tree.cuts[s] == 0:
            divided = True
    return divided


@compiled(inline=True, counted=False)
def _put(tree: Tree, depth: int) -> bool:
    """Places the block that a frame has chosen; whether that divides its part."""
    frame = tree.frame[depth]
    place, offset = frame[PLACE], frame[OFFSET]
    i = tree.listed[0, place]
    before, after = tree.listed[2, place], tree.listed[1, place]
    tree.listed[1, before] = after
    if after != NOWHERE:
        tree.listed[2, after] = before
    tree.offset[i] = offset
    top = offset + tree.size[i]
    if tree.waiting[i] == 0:
        frame[SINGLE] = 1
    mark = tree.now[TRAIL]
    frame[MARK] = mark
    for q in range(tree.pointer[i], tree.pointer[i + 1]):
        j = tree.others[q]
        tree.waiting[j] -= 1
        if tree.offset[j] == NOWHERE and tree.low[j] < top:
            tree.trail[0, mark], tree.trail[1, mark] = j, tree.low[j]
            mark += 1
            tree.low[j] = top
    tree.now[TRAIL] = mark
    return _change_sections(tree, i, -tree.size[i], -1)


@compiled(inline=True, counted=False)
def _is_low(tree: Tree, i: int, offset: int, most: int) -> bool:
    """Whether a block that is not placed may lie so low, if what comes is above."""
    if tree.offset[i] != NOWHERE:
        return False
    low = tree.low[i]
    if low < offset:  # it will be lifted
        low = offset + tree.smallest[i]
    return bool(low <= most)


@compiled(inline=True, counted=False)
def _may_fit(tree: Tree, part: int, offset: int, capacity: int) -> bool:
    """Whether each section has room for what is not placed."""
    for s in range(tree.part[part, FIRST], tree.part[part, LAST]):
        if tree.total[s] == 0:
            continue
        most = capacity - tree.total[s]
        if offset > most:
            return False
        if _is_low(tree, tree.witness[s], offset, most):
            continue
        found = False
        for q in range(tree.section_pointer[s], tree.section_pointer[s + 1]):
            if _is_low(tree, tree.section_blocks[q], offset, most):
                tree.witness[s] = tree.section_blocks[q]
                found = True
                break
        if not found:
            return False
    return True


@compiled(inline=True, counted=False)
def _choose(tree: Tree, depth: int) -> bool:
    """Chooses the next block of a frame, by low and rank; whether there is one."""
    frame = tree.frame[depth]
    offset, place = frame[OFFSET], frame[PLACE]
    best, chosen = frame[LIMIT], NOWHERE
    if frame[SINGLE] == 0:
        at = tree.listed[1, tree.part[frame[PART], HEAD]]
        while at != NOWHERE:
            low = tree.low[tree.listed[0, at]]
            if low < best and (low > offset or (low == offset and at > place)):
                best, chosen = low, at
            at = tree.listed[1, at]
    if chosen == NOWHERE:
        return False
    frame[OFFSET], frame[PLACE] = best, chosen
    return True


@compiled(types.void(Tree.compiled, _i64, _bool), apart=True, counted=False)
def _finish_part(tree: Tree, depth: int, by_load: bool) -> None:
    """A part is placed: notes its offsets, and goes on with the next one."""
    now = tree.now
    while now[STATUS] == OPEN:
        part = tree.frame[depth, PART]
        while depth > 0 and tree.frame[depth, PART] == part:
            i = tree.listed[0, tree.frame[depth, PLACE]]
            tree.found[i] = tree.offset[i]
            _take_back(tree, depth)
            depth -= 1
        now[PARTS] = part
        now[LISTED] = tree.frame[depth, LIST_END]
        if now[RUNS] > tree.frame[depth, FIRST_RUN]:
            _begin_part(tree, depth, by_load)
            return
        if depth == 0:
            now[STATUS] = FITS


@compiled(
    _i64(
        Tree.compiled,
        _i64,
        _i64,
        _bool,
    ),
    apart=True,
    counted=False,
)
def search(tree: Tree, capacity: int, steps: int, by_load: bool) -> int:
    """Goes on with a search.

    Args:
        tree: Where it stands; changed.
        capacity: Bytes, always the same ones.
        steps: Blocks to place.
        by_load: See :func:`begin`.

    Returns:
        int: :data:`OPEN`, :data:`FITS` or :data:`CANNOT`.
    """
    now = tree.now
    while steps > 0 and now[STATUS] == OPEN:
        steps -= 1
        depth = now[DEPTH]
        part = tree.frame[depth, PART]
        if not _choose(tree, depth):
            depth -= 1
            if tree.frame[depth, PART] != part:  # no way to place this part
                now[PARTS] = part
                now[LISTED] = tree.frame[depth, LIST_END]
                now[RUNS] = tree.frame[depth, FIRST_RUN]
            if depth == 0:
                now[STATUS] = CANNOT
            else:
                _take_back(tree, depth)
                now[DEPTH] = depth
            continue
        divided = _put(tree, depth)
        offset, place = tree.frame[depth, OFFSET], tree.frame[depth, PLACE]
        top = offset + tree.size[tree.listed[0, place]]
        if top > capacity or not _may_fit(tree, part, offset, capacity):
            _take_back(tree, depth)
        elif tree.listed[1, tree.part[part, HEAD]] == NOWHERE:
            _finish_part(tree, depth, by_load)
        elif divided and _divides(tree, depth):
            _begin_part(tree, depth, by_load)
        else:
            _open(tree, depth + 1, part, offset, place)
    return int(now[STATUS])


@compiled(inline=True, counted=False)
def _divides(tree: Tree, depth: int) -> bool:
    """Whether a frame leaves several parts, if there is room to list them."""
    count = _divide(tree, depth)
    room = tree.listed.shape[1] - tree.now[LISTED]
    if count > 1 and len(tree.size) < room:
        return True
    tree.now[RUNS] = tree.frame[depth, FIRST_RUN]
    return False
