"""Tables of the committed results: one function for each kind of result file."""

from __future__ import annotations

from benchmarks.tables import (
    batches,
    checks,
    choice,
    costs,
    gpu,
    memory,
    packages,
    planning,
    ranks,
    training,
)
from benchmarks.tables.form import Section, Summary
from benchmarks.tables.summaries import SUMMARIES

# The pages of all tables in full, by the name of their file, with their titles.
PAGES: dict[str, tuple[str, tuple[Section, ...]]] = {
    'tables_training': ('Training under a limit', training.SECTIONS),
    'tables_gpu': ('On a real GPU', gpu.SECTIONS),
    'tables_planning': (
        'Plans and planning',
        (*planning.SECTIONS, *choice.SECTIONS),
    ),
    'tables_ranks': ('Several processes', ranks.SECTIONS),
    'tables_batches': ('Batches and devices', batches.SECTIONS),
    'tables_memory': ('Memory', memory.SECTIONS),
    'tables_checks': (
        'Bits and programs',
        (*checks.SECTIONS, *packages.SECTIONS),
    ),
    'tables_costs': ('What single parts cost', costs.SECTIONS),
}

# Tables on pages that something else writes, with their address from ``docs``.
ELSEWHERE = {'Every instance of the arena': '../benchmarks/results/arena.md'}

__all__ = ['ELSEWHERE', 'PAGES', 'SUMMARIES', 'Section', 'Summary']
