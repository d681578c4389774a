"""Colours of lines are told apart, on white and on black."""

from __future__ import annotations

import itertools

import numpy as np

from chainer_hybridmem.planning.planners import names
from chainer_hybridmem.reporting.page.composition import GROUPS
from chainer_hybridmem.reporting.palette import COLOURS, GROUP_COLOURS, LINE_COLOURS

FROM_RGB = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def oklab(colour: str) -> np.ndarray:
    """Björn Ottosson, "A perceptual color space for image processing", 2020."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return TO_LAB @ np.cbrt(FROM_RGB @ linear)


def test_every_planner_has_a_colour_of_its_own():
    assert len(LINE_COLOURS) >= len(names()) >= 20
    places = [oklab(c) for c in (*LINE_COLOURS, '#ffffff', '#000000')]
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(places, 2)]
    assert min(distances) > 0.12  # about six times what an eye can just see


def test_every_group_of_memory_has_a_colour_of_its_own():
    assert set(GROUP_COLOURS) == set(GROUPS)
    assert len({*GROUP_COLOURS.values()}) == len(GROUP_COLOURS)
    assert len({*COLOURS.values()}) == len(COLOURS)
