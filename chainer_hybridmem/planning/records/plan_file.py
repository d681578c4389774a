"""Plans as versioned JSON."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem import files
from chainer_hybridmem.planning.records.plan import Plan
from chainer_hybridmem.planning.records.rules import check_rules, pairs_of

FORMAT = 'chainer_hybridmem/plan'
VERSION = 1


def serialise_plan(plan: Plan) -> str:
    """The JSON text of a plan."""
    return files.serialise(plan, FORMAT, VERSION)


def parse_plan(text: str) -> Plan:
    """Reads what :func:`serialise_plan` has written.

    Raises:
        FormatError: If the text is no such file, or a figure is out of range.
    """
    plan = files.read_record(Plan, text, FORMAT, VERSION)
    for name, value in vars(plan).items():
        if isinstance(value, int | float) and not 0 <= value < 2**62:
            raise files.broken('plan', f'{name} is {value}')
    with files.reading('plan'):
        return dataclasses.replace(plan, rules=pairs_of(check_rules(plan.rules)))
