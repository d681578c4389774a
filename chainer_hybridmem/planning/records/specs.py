"""Texts such as ``'float32[2,3,224,224]'`` of :attr:`Operation.specs`."""

from __future__ import annotations

import math
import re
from typing import Any

_SPEC = re.compile(r'(\w+)\[([0-9,]*)\]')
_WIDTH = re.compile(r'(?:float|int|uint|complex)([0-9]+)')


def spec_of(array: Any) -> str:
    """The spec of an array."""
    return f'{array.dtype.name}[{",".join(map(str, array.shape))}]'


def parse_spec(spec: str) -> tuple[str, tuple[int, ...]]:
    """Splits a spec into type and shape; other text has type ``''`` and no shape."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        return '', ()
    dimensions = match.group(2).split(',') if match.group(2) else []
    return match.group(1), tuple(int(d) for d in dimensions if d)


def spec_bytes(spec: str) -> int:
    """Bytes of an array with this spec; 0 for other text."""
    dtype, shape = parse_spec(spec)
    if not dtype:
        return 0
    width = _WIDTH.fullmatch(dtype)
    return math.prod(shape) * (int(width.group(1)) // 8 if width else 1)
