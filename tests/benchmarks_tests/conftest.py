"""Makes the scripts importable."""

from __future__ import annotations

import pathlib
import sys

_BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / 'benchmarks'
sys.path += [str(_BENCHMARKS), str(_BENCHMARKS / 'gpu')]
