"""Profiles as versioned JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from chainer_hybridmem import files
from chainer_hybridmem.records.profile import (
    Link,
    Operation,
    Profile,
    Recipe,
    Split,
    Storage,
)
from chainer_hybridmem.records.profile_checks import check_profile

FORMAT = 'chainer_hybridmem/profile'
VERSION = 1


def serialise_profile(profile: Profile) -> str:
    """The JSON text of a profile."""
    disk = profile.disk_link
    body = {
        'initial_bytes': profile.initial_bytes,
        'graph_end_event': profile.graph_end_event,
        'link': dataclasses.asdict(profile.link),
        'disk_link': None if disk is None else dataclasses.asdict(disk),
        'device': profile.device,
        'operations': [files.row(op) for op in profile.operations],
        'storages': [files.row(s) for s in profile.storages],
        'recipes': [files.row(r) for r in profile.recipes],
        'splits': [files.row(split) for split in profile.splits],
        'functions_in_parts': [list(place) for place in profile.functions_in_parts],
        'events': list(profile.events),
    }
    return json.dumps({'format': FORMAT, 'version': VERSION, **body})


def parse_profile(text: str) -> Profile:
    """Reads what :func:`serialise_profile` has written.

    Raises:
        FormatError: If the text is no such file, or the profile contradicts itself.
    """
    body = files.parse(text, FORMAT, VERSION)
    with files.reading('profile'):
        disk = body['disk_link']
        profile = Profile(
            operations=tuple(files.unrow(Operation, row) for row in body['operations']),
            storages=tuple(files.unrow(Storage, row) for row in body['storages']),
            events=tuple(int(event) for event in body['events']),
            recipes=tuple(files.unrow(Recipe, row) for row in body['recipes']),
            initial_bytes=int(body['initial_bytes']),
            graph_end_event=int(body['graph_end_event']),
            link=_read_link(body['link']),
            device=dict(body['device']),
            disk_link=None if disk is None else _read_link(disk),
            splits=tuple(files.unrow(Split, row) for row in body['splits']),
            # Files from before it existed lack it.
            functions_in_parts=tuple(
                (int(operation), int(function))
                for operation, function in body.get('functions_in_parts', ())
            ),
        )
    check_profile(profile)
    return profile


def _read_link(body: Any) -> Link:
    names = [field.name for field in dataclasses.fields(Link)]
    for name in names:
        if not isinstance(body, dict) or name not in {'ranks': 1, **body}:
            raise files.broken('profile', f'its link lacks {name}')
    for name in body:
        if name not in names:
            raise files.broken('profile', f'its link has an unknown figure {name!r}')
    # Files from before links were shared lack it. What is no number is refused later.
    ranks = body.get('ranks', 1)
    figures = {name: float(body[name]) for name in names if name != 'ranks'}
    return Link(**figures, ranks=ranks)
