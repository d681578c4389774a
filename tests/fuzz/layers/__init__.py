"""The layers that networks are drawn from, by theme.

A layer takes one or two variables of any shape whose first axis is the batch, and
brings them into the form it needs; so every list of layers is a network, and a list
from which some have been dropped still is one.
"""

from __future__ import annotations

import importlib

import chainer_hybridmem  # noqa: F401  before chainer, which it makes importable

# isort: split
from .forms import bring
from .layer import KINDS, Layer
from .reaching import overwrite, reach

__all__ = ['KINDS', 'THEMES', 'Layer', 'bring', 'overwrite', 'reach']

# In this order: a seed draws kinds by their position.
THEMES = (
    'convolutions',
    'dense',
    'normalisation',
    'activations',
    'own_functions',
    'randomness',
    'pooling',
    'shapes',
    'pairs',
    'graphs',
    'effects',
    'static',
    'backwards',
)

for theme in THEMES:
    importlib.import_module(f'.{theme}', __name__)
