"""Colours of pictures, plots and pages.

Those of lines were chosen one after the other, each as far as possible from all before
it and from white and black (distance in Oklab), within a range of lightness that shows
on both.
"""

from __future__ import annotations

COLOURS = {
    'forward': '#4c9f70',
    'backward': '#3b7dd8',
    'all-reduce': '#2a9d9d',
    'update': '#8d8d8d',
    'recompute': '#e6a117',
    'swap-out': '#b25fc4',
    'swap-in': '#7d53de',
    'stall': '#d64545',
}
"""Of what runs, by its kind."""

GROUP_COLOURS = {
    'keep': '#a9d5b5',
    'swap': '#cdb4ee',
    'recompute': '#f5d38a',
    'keep for replays': '#efc3da',
    'replay': '#e6a117',
    'workspace': '#b59a83',
    'other map': '#d3d8a6',
    'gradient': '#e9a6a0',
    'input': '#9cc9da',
    'parameter': '#8ba6cf',
    'optimizer state': '#b3c2dc',
    'rest': '#c8cdd4',
}
"""Of memory, by what is in it; the first four by what happens to feature maps."""

LINE_COLOURS = (
    *('#3b7dd8', '#e6a117', '#4c9f70', '#d64545', '#7d53de', '#ff87ff', '#485048'),
    *('#00df00', '#38cfff', '#8f0070', '#0000ef', '#df00bf', '#b78fa7', '#8f6800'),
    *('#8f2000', '#007800', '#8fcf8f', '#30489f', '#876080', '#9f87ff', '#ff609f'),
    *('#007887', '#b700ff', '#7000af'),
)
"""Of lines that are told apart, such as planners."""
