"""The in-core peak, for people."""

from __future__ import annotations

from chainer_hybridmem.units import format_bytes

IN_CORE_PEAK = 'in-core peak'
IN_CORE_PEAK_IN_PARTS = 'in-core peak, functions in parts'


def in_core_row(plain_bytes: int | None, in_parts_bytes: int | None) -> tuple[str, str]:
    """A name and a value: plain Chainer's peak, or the one that is known instead.

    Args:
        plain_bytes: Of plain Chainer; None if the recording ran functions in parts.
        in_parts_bytes: With functions in parts as recorded; None before a recording.
    """
    if plain_bytes is None and in_parts_bytes is not None:
        return IN_CORE_PEAK_IN_PARTS, format_bytes(in_parts_bytes)
    return IN_CORE_PEAK, 'unknown' if plain_bytes is None else format_bytes(plain_bytes)
