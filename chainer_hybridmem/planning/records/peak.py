"""The highest load of a run and what it was made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from chainer_hybridmem.units import format_apart, format_bytes

MOST_LINES = 8
OUTSIDE = '(outside of links)'
IN_SESSION = '(in a session)'
UNKNOWN = '(others)', 'made before the iteration'
Part = tuple[str, str]  # layer, and what it is


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes in use at the worst moment.

    Attributes:
        nbytes (int): All of them.
        parts (dict): Bytes by layer (path of a link) and what they are, such as
            ``'gradients'`` or the name of the function that made them.
    """

    nbytes: int = 0
    parts: Mapping[Part, int] = dataclasses.field(default_factory=dict)

    def functions(self) -> dict[str, dict[str, int]]:
        """Bytes by layer and what they are, sorted by name."""
        found: dict[str, dict[str, int]] = {}
        for (layer, what), nbytes in sorted(self.parts.items()):
            found.setdefault(layer, {})[what] = nbytes
        return found

    def describe(self, most: int = MOST_LINES) -> list[str]:
        """Lines about the largest parts.

        Args:
            most: Of them; one more line has the sum of the others.
        """
        ranked = sorted(self.parts.items(), key=lambda part: (-part[1], part[0]))
        lines = [
            f'{format_bytes(nbytes):>12}  {layer}: {what}'
            for (layer, what), nbytes in ranked[:most]
        ]
        if rest := ranked[most:]:
            total = sum(nbytes for _, nbytes in rest)
            lines.append(f'{format_bytes(total):>12}  {len(rest)} others')
        return lines

    def describe_growth(
        self, before: Mapping[str, Mapping[str, int]], most: int = 3
    ) -> list[str]:
        """Lines about the layers that hold more than they did, and what in them most.

        Args:
            before: Bytes by layer and what they are, as they were.
            most: Of the lines.
        """
        rows = []
        for layer, now in self.functions().items():
            then = before.get(layer, {})
            more, what = max((n - then.get(what, 0), what) for what, n in now.items())
            rows.append((layer, sum(then.values()), sum(now.values()), what, more))
        rows.sort(key=lambda row: (row[1] - row[2], row[0]))
        lines = []
        for layer, old, new, what, more in rows[:most]:
            if new > old:
                texts = format_apart(old, new)
                lines.append(
                    f'{layer} grew by {format_bytes(new - old)} ({what}: '
                    f'{format_bytes(more)}): {texts[0]} before, {texts[1]} now'
                )
        return lines


class Load:
    """Bytes in use, by what they are, and the same at the worst moment.

    Attributes:
        peak (Peak): So far.
    """

    def __init__(self) -> None:
        self.peak = Peak()
        self._used = 0
        self._live: dict[int, tuple[int, Part]] = {}
        self._parts: dict[Part, int] = {}

    def add(self, events: list[tuple[int, int]], part: Part) -> None:
        """Counts mallocs and frees in their order; what is made belongs to a part."""
        load, highest, worst = self._used, self.peak.nbytes, -1
        for position, (ident, nbytes) in enumerate(events):
            load += nbytes if ident > 0 else -nbytes
            if load > highest:
                highest, worst = load, position
        for position, (ident, nbytes) in enumerate(events):
            if ident > 0:
                self._live[ident] = nbytes, part
                self._grow(part, nbytes)
            else:
                nbytes, made_by = self._live.pop(-ident, (nbytes, part))
                self._grow(made_by, -nbytes)
            if position == worst:
                self.peak = Peak(highest, dict(self._parts))
        self._used = load

    def raise_to(self, nbytes: int, part: Part) -> None:
        """Another one has counted so many bytes, all of them."""
        if nbytes > self.peak.nbytes:
            self.peak = Peak(nbytes, {part: nbytes})

    def rename(self, ident: int, part: Part) -> None:
        """What is alive with an id belongs to another part."""
        found = self._live.get(ident)
        if found is not None and found[1] != part:
            nbytes, former = found
            self._live[ident] = nbytes, part
            self._grow(former, -nbytes)
            self._grow(part, nbytes)

    def _grow(self, part: Part, nbytes: int) -> None:
        total = self._parts.get(part, 0) + nbytes
        if total:
            self._parts[part] = total
        else:
            self._parts.pop(part, None)
