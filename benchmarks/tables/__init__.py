"""Tables of the committed results: one function for each kind of result file."""

from __future__ import annotations

from benchmarks.tables import batches, checks, costs, memory, planning, ranks, training
from benchmarks.tables.form import Section

SECTIONS: tuple[Section, ...] = (
    *training.SECTIONS,
    *planning.SECTIONS,
    *ranks.SECTIONS,
    *batches.SECTIONS,
    *memory.SECTIONS,
    *checks.SECTIONS,
    *costs.SECTIONS,
)
