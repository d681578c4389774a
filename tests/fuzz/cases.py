"""What one case is, and how it is drawn from its seed."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from chainer_hybridmem.planning import planners
from chainer_hybridmem.training.execution.table import MOST_UNASKED

# isort: split
from support.drawn_plans import RANDOM

from .layers import KINDS

# Searches are short: it is execution that is tried.
QUICK: dict[str, dict[str, Any]] = {
    'swap-opt': {'node_budget': 60},
    'pooch': {'node_budget': 60},
    'autoswap-bo': {'evaluations': 3, 'smallest_bytes': 0},
    'autoswap-doa': {'smallest_bytes': 0},
    'autoswap-aoa': {'smallest_bytes': 0},
    'autoswap-wdoa': {'smallest_bytes': 0},
    'autoswap-swdoa': {'smallest_bytes': 0},
    'exact': {'time_budget': 0.1},
    'hybrid': {'steps': 300},
}
UNNAMED = 'none named'  # unknown iterations are not recorded then
RARE = ('exact', 'autoswap-bo')  # slow ones
STEPS = (
    'plain', 'accumulate', 'two losses', 'sum', 'retain grad', 'grad', 'penalty',
    'abandoned', 'interleaved', 'again', 'no update', 'function', 'error', 'cycle',
    'adversarial', 'teacher',
)  # fmt: skip
DEEP = ('penalty', 'grad')  # those that need gradients of gradients
EVENTS = ('replan', 'trace', 'retime', 'finish', 'report')
OPTIMIZERS = ('SGD', 'MomentumSGD', 'Adam', 'RMSprop', 'AdaGrad', 'NesterovAG')
MOST_BATCH = 8
SHARES = 0.0, 0.5, 1.0
HOARDS = 0, 0, 1, 4, 16  # KiB
UNASKED = MOST_UNASKED, 1e9
RULES = (
    *('keep', 'swap', 'recompute', 'no keep', 'no swap', 'no recompute'),
    *('at most 0', 'at most 2kB'),
)


@dataclasses.dataclass
class Step:
    """One iteration.

    Attributes:
        kind: One of ``STEPS``.
        batch: Number of examples.
        seed: Of what is drawn in it.
        evaluate: ``''``, ``'between'`` forward and backward or ``'after'`` the update.
        keep: Whether the loss lives until the next iteration.
        event: What is asked of the session before it; see ``EVENTS``.
        hoard: KiB that the program takes before backward and holds until the end.
    """

    kind: str
    batch: int
    seed: int
    evaluate: str = ''
    keep: bool = False
    event: str = ''
    hoard: int = 0


@dataclasses.dataclass
class Case:
    """One network, how it is trained, and the session it is trained in.

    Attributes:
        seed: What it was drawn from.
        dtype: Chainer's dtype.
        layers: Kind, options and how far back each input lies, per layer.
        steps: The iterations; the last one runs when the session is over.
        training: Optimizer and its hooks.
        session: Options of the session, and of its surroundings.
    """

    seed: int
    dtype: str
    layers: list[tuple[str, dict[str, Any], list[int]]]
    steps: list[Step]
    training: dict[str, Any]
    session: dict[str, Any]

    def to_json(self) -> str:
        """One line of text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Case:
        """What :meth:`to_json` wrote."""
        values = json.loads(text)
        values['steps'] = [Step(**step) for step in values['steps']]
        return Case(**values)


def draw(seed: int) -> Case:
    """The case of a seed: the same in every process."""
    rng = random.Random(seed)
    steps = _steps(rng)
    _hoard(random.Random(~seed), steps)
    deep = any(step.kind in DEEP for step in steps)
    names = [name for name, kind in KINDS.items() if kind.twice or not deep]
    layers = []
    for _ in range(rng.choice((1, 2, 3, 3, 4, 5, 6, 8))):
        name = rng.choice(names)
        back = [_back(rng) for _ in range(KINDS[name].inputs)]
        layers.append((name, KINDS[name].draw(rng), back))
    dtypes = ('float32',) * 6 + ('float64', 'float64', 'float16', 'mixed16')
    dtype = rng.choice(dtypes)
    return Case(
        seed=seed,
        dtype=dtype,
        layers=layers,
        steps=steps,
        training=_training(rng, dtype),
        session=_session(rng),
    )


def _back(rng: random.Random) -> int:
    return rng.choice((1, 1, 1, 1, 1, 2, 2, 3, 4, 6))


def _steps(rng: random.Random) -> list[Step]:
    usual = rng.choice((*['plain'] * 6, *STEPS))
    count = rng.choice((6, 6, 7, 7, 8))
    steps = []
    changing = rng.choice((0.0, 0.0, 0.0, 0.2, 0.5))
    evaluate = rng.choice(('', '', '', 'after', 'between'))
    keep = rng.random() < 0.2
    kinds = [kind for kind in STEPS if kind not in DEEP or usual in DEEP]
    batch = rng.randint(4, MOST_BATCH)
    eventful = rng.random() < 0.25
    for i in range(count):
        kind = rng.choice(kinds) if rng.random() < changing else usual
        other = i > 3 and rng.random() < changing
        steps.append(
            Step(
                kind=kind,
                batch=rng.randint(1, MOST_BATCH) if other else batch,
                seed=rng.randrange(1 << 30),
                evaluate=evaluate,
                keep=keep,
                event=rng.choice(EVENTS) if eventful and rng.random() < 0.3 else '',
            )
        )
    # What has come once comes again: by then iterations change between several plans.
    return steps * 2 if random.Random(steps[0].seed).random() < 0.2 else steps


def _hoard(rng: random.Random, steps: list[Step]) -> None:
    """Makes memory short in some iterations, which plans do not know of."""
    if rng.random() < 0.2:
        for step in steps[3:]:
            step.hoard = rng.choice(HOARDS)


def _training(rng: random.Random, dtype: str) -> dict[str, Any]:
    half = dtype in ('float16', 'mixed16')  # some have an epsilon too small for it
    return {
        'optimizer': rng.choice(OPTIMIZERS[:2] if half else OPTIMIZERS),
        'decay': rng.random() < 0.2,
        'clip': rng.random() < 0.2,
        'frozen': rng.random() < 0.15,
        'initialised': rng.random() < 0.5,
        'inside': rng.random() < 0.5,
        'test_backward': rng.random() < 0.1,
        'replaced': rng.random() < 0.15,  # parameters, while their links run
        'cycle': rng.randint(2, 4),  # iterations over which graphs live
    }


def _planner(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.3:
        weights = [rng.random() ** 2 for _ in range(3)]
        seed = rng.randrange(1 << 30)
        chance = random.Random(seed)  # so that what follows stays what it was
        late, sources = chance.choice(SHARES), chance.choice(SHARES)
        weights[2] += sources  # else no replay reads them
        return RANDOM, {
            'seed_of_plan': seed,
            'weights': [w / sum(weights) for w in weights],
            'early': rng.random() < 0.5,
            'barrier': rng.random() < 0.5,
            'relax': rng.random() < 0.3,
            'late': late,
            'sources': sources,
        }
    names = [n for n in planners.PLANNERS if n not in RARE or rng.random() < 0.15]
    name = rng.choice(names)
    options = dict(QUICK.get(name, {}))
    if name == 'manual':
        options['actions'] = {'*': rng.choice(('keep', 'swap'))}
    return name, options


def _session(rng: random.Random) -> dict[str, Any]:
    planner, options = (UNNAMED, {}) if rng.random() < 0.25 else _planner(rng)
    other, other_options = _planner(rng)
    share = rng.choice((rng.uniform(0.4, 1), rng.uniform(0.6, 1), 1.1))
    if options.get('sources') and share < 1:
        share = (share + 1) / 2  # they take memory
    return {
        'planner': planner,
        'options': options,
        'replan': [other, other_options],
        'share': share,
        'arena': rng.random() < 0.5,
        'cross_iteration': rng.choice((False, False, 'states', 'all')),
        'file': rng.random() < 0.2,
        'link_bandwidth': rng.choice((None, None, None, 3e7, 1e9)),
        'speed': 10 ** rng.uniform(5, 10),
        'minimum_bytes': rng.choice((1, 64, 256, 1024, 4096)),
        'timing_runs': rng.choice((1, 2, 3)),
        'copies': rng.choice(('threads', 0.0, 0.0, 0.3, 0.3, 0.7, 1.0)),
        'clock': rng.randrange(1 << 30),
        'rules': _rules(rng),
        'sums': rng.choice(SHARES),
        'unasked': rng.choice(UNASKED),
    }


def _rules(rng: random.Random) -> dict[str, str]:
    """About all functions, or some of the first ones; mostly there are none."""
    if rng.random() < 0.7:
        return {}
    patterns = ('*', '*@[0-2]', '*@[02468]', '*@?')
    return {rng.choice(patterns): rng.choice(RULES) for _ in range(rng.randint(1, 2))}
