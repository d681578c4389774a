"""The profiles that come with the package, as a table."""

from __future__ import annotations

from typing import Any

from chainer_hybridmem.profiles import shipped_profiles
from chainer_hybridmem.records import library
from chainer_hybridmem.reporting.tables import UNKNOWN, table
from chainer_hybridmem.units import format_bytes, format_seconds

HEADERS = (
    'profile',
    'device',
    'date',
    'operations',
    'feature maps',
    'in-core peak',
    's / iteration, in-core',
)


def figures() -> list[dict[str, Any]]:
    """One row of plain values per profile."""
    return [_figures(name) for name in shipped_profiles()]


def _figures(name: str) -> dict[str, Any]:
    from chainer_hybridmem.simulation import make_problem

    problem = make_problem(library.load_profile(name))
    return {
        'profile': name,
        'device': problem.profile.device,
        'operations': len(problem.profile.operations),
        'feature_maps': len(problem.maps),
        'in_core_peak_bytes': problem.in_core_peak_bytes,
        'in_core_seconds': problem.in_core_seconds,
    }


def listing(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    return table(HEADERS, [_cells(row) for row in rows], left=3)


def _cells(row: dict[str, Any]) -> list[str]:
    device = row['device']
    return [
        row['profile'],
        device.get('name', UNKNOWN),
        device.get('date', UNKNOWN),
        str(row['operations']),
        str(row['feature_maps']),
        format_bytes(row['in_core_peak_bytes']),
        format_seconds(row['in_core_seconds']),
    ]
