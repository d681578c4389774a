"""Programs whose iterations change, or use the graph in unusual ways.

Each program trains from a fixed seed inside ``run.training(model)`` and hands
everything that must be equal to ``run.record`` after every update. A run with a limit
trains under a session, one without is plain Chainer. ``running`` runs a program,
``registry`` declares it, ``classifier`` and ``loop`` are what most of them share; each
other module is one theme.
"""

from __future__ import annotations

import importlib

from .registry import SCENARIOS, Scenario
from .running import Run, digest

__all__ = ['SCENARIOS', 'THEMES', 'Run', 'Scenario', 'digest']

# In this order: test_scenarios.py hands out hostile options by position.
THEMES = (
    'batches',
    'sequences',
    'losses',
    'changing_networks',
    'held_arrays',
    'abandoned_iterations',
    'shared_links',
    'functions',
    'types_and_shapes',
    'training_loops',
)

for theme in THEMES:
    importlib.import_module(f'.{theme}', __name__)
