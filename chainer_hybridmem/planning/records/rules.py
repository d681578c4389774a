"""What users say about feature maps by name, as constraints on every plan.

A rule has a pattern (``*``, ``?``, ``[...]``) and says what may happen to the feature
maps that it names:

====================  ===========================================================
rule                  the feature maps named
====================  ===========================================================
``keep``              are kept
``swap``              are swapped
``recompute``         are recomputed
``no keep``           are swapped or recomputed
``no swap``           are kept or recomputed
``no recompute``      are kept or swapped, and no function named is replayed, for
                      other maps neither
``at most 2GiB``      that are kept have so many bytes in all
====================  ===========================================================

A pattern is compared with the path of the link and the function that make a map
(``/decoder/l1/LinearFunction``), with the path alone, with the function alone, and
with the number of the operation behind it (``/ReLU@5``); the first slash may be left
out. All rules that name a map hold for it.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from chainer_hybridmem.errors import OptionError, nearest
from chainer_hybridmem.planning.records.plan import Action, MapPlan
from chainer_hybridmem.planning.records.profile import Operation, Phase, Profile, Recipe
from chainer_hybridmem.units import parse_bytes

AT_MOST = 'at most'
EVERYTHING = frozenset(Action)
NO_RECOMPUTE = 'no recompute'
_ACTIONS = {
    **{action.value: frozenset({action}) for action in Action},
    **{f'no {action.value}': EVERYTHING - {action} for action in Action},
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """What may happen to the feature maps that a pattern names.

    Attributes:
        pattern (str): Names them.
        says (str): The rule in words, such as ``'no swap'``.
        actions (frozenset of Action): Those that it allows.
        most_bytes (int or None): Most bytes of kept ones; None is without a limit.
    """

    pattern: str
    says: str
    actions: frozenset[Action] = EVERYTHING
    most_bytes: int | None = None

    def __str__(self) -> str:
        return f'{self.pattern}: {self.says}'

    @property
    def pair(self) -> tuple[str, str]:
        """Pattern and rule as text, as plans have them."""
        return self.pattern, self.says

    @property
    def forbids_replays(self) -> bool:
        """Whether the functions named are not run again."""
        return self.says == NO_RECOMPUTE

    def names(self, label: str, operation: int) -> bool:
        """Whether it names what an operation with this label makes."""
        return any(
            fnmatch.fnmatchcase(name, self.pattern)
            for name in names_of(label, operation)
        )


Rules = tuple[Rule, ...]


@dataclasses.dataclass(frozen=True)
class RuleCost:
    """What one rule costs beside the others.

    Attributes:
        pattern (str): Names its feature maps.
        says (str): What it says about them.
        maps (int): How many feature maps it names.
        nbytes (int): Their size.
        seconds (float or None): Predicted time of an iteration with all rules, minus
            that of a plan searched without this one; below zero where that search
            finds a slower plan. None if it finds none.
        share (float): That time over the time with all rules.
    """

    pattern: str
    says: str
    maps: int
    nbytes: int
    seconds: float | None
    share: float


def names_of(label: str, operation: int) -> list[str]:
    """Everything that a pattern may call what an operation makes."""
    path, _, function = label.rpartition('/')
    names = [label, path, f'{label}@{operation}']
    names += [name[1:] for name in names if name.startswith('/')]
    return [name for name in (*names, function) if name]


def check_rules(rules: Any) -> Rules:
    """Rules of a mapping from patterns to what they say.

    Args:
        rules: A mapping; the values are texts, or lists of texts. None is an empty
            one; pairs of pattern and text do as well.

    Raises:
        OptionError: If it is neither, or a text is no rule.
    """
    if rules is None:
        return ()
    if isinstance(rules, Mapping):
        pairs: Iterable[Any] = rules.items()
    elif isinstance(rules, list | tuple):
        pairs = [rule.pair if isinstance(rule, Rule) else rule for rule in rules]
    else:
        raise OptionError(
            f'rules is {rules!r}; a mapping from patterns to rules is needed, such as '
            "{'*/conv1/*': 'keep'}."
        )
    found: list[Rule] = []
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise OptionError(f'rules has {pair!r}; a pattern and a rule are needed.')
        pattern, said = pair
        for text in said if isinstance(said, list | tuple) else [said]:
            found.append(_check_rule(pattern, text))
    return tuple(dict.fromkeys(found))


def _check_rule(pattern: Any, text: Any) -> Rule:
    if not isinstance(pattern, str) or not pattern.strip():
        raise OptionError(
            f'A rule is for {pattern!r}; a pattern for names of layers is needed, such '
            "as '*/conv1/*' or 'LSTM'."
        )
    says = ' '.join(text.split()) if isinstance(text, str) else ''
    if says in _ACTIONS:
        return Rule(pattern, says, _ACTIONS[says])
    if says == AT_MOST or says.startswith(f'{AT_MOST} '):
        size = says.removeprefix(AT_MOST).strip()
        return Rule(pattern, says, most_bytes=_most_bytes(pattern, says, size))
    forms = [*_ACTIONS, f'{AT_MOST} SIZE']
    hint = nearest(says.lower(), forms)
    if says.lower().startswith(f'{AT_MOST} '):
        hint = f' Did you mean {AT_MOST + says[len(AT_MOST) :]!r}?'
    raise OptionError(
        f'The rule for {pattern!r} is {text!r}; one of {", ".join(forms)} is needed.'
        f'{hint}'
    )


def _most_bytes(pattern: str, says: str, size: str) -> int:
    try:
        return parse_bytes(size, least=0)
    except OptionError:
        pass
    raise OptionError(
        f'The rule for {pattern!r} is {says!r}, but {size!r} is not a size; write a '
        f"number with a unit, such as 'at most 2GiB', or 'at most 0'."
    )


def moves_maps(rule: Rule) -> bool:
    """Whether it asks for maps to leave that would fit."""
    return Action.KEEP not in rule.actions or rule.most_bytes is not None


def pairs_of(rules: Rules) -> tuple[tuple[str, str], ...]:
    """Writes rules as pairs of pattern and what is said, as users do."""
    return tuple(rule.pair for rule in rules)


def check_names(rules: Rules, profile: Profile) -> None:
    """Checks that every rule names a function of the iteration.

    Raises:
        OptionError: With the nearest names.
    """
    operations = _forward(profile)
    for rule in rules:
        if any(rule.names(op.label, op.index) for op in operations):
            continue
        raise OptionError(
            f'No layer or function of this iteration is called {rule.pattern!r}, which '
            f'a rule says {rule.says!r} about. {_near(rule.pattern, operations)}'
        )


def check_spelling(rules: Rules, links: Iterable[str], functions: set[str]) -> None:
    """Refuses what must be a slip, before any function has run.

    A name that nothing here resembles may be that of a function that is made later.

    Args:
        rules: What the user says.
        links: Paths of the model's links, such as ``'/decoder/l1'``.
        functions: Names of the kinds of functions there are.

    Raises:
        OptionError: With the nearest names.
    """
    paths = {name for path in links for name in names_of(f'{path}/', 0)}
    for rule in rules:
        pattern = rule.pattern.partition('@')[0]
        matches = re.compile(fnmatch.translate(pattern)).match
        places = ('', *(path.rstrip('/') for path in paths))
        inside = (f'{place}/{name}' for place in places for name in functions)
        if any(map(matches, itertools.chain(paths, functions, inside))):
            continue
        layers = {path.strip('/') for path in paths if '@' not in path}
        close = _closest(pattern, layers, 0.75)
        close += _closest(pattern.rpartition('/')[2], functions, 0.75)
        if close:
            raise OptionError(
                f'No layer of the model, and no function, is called {rule.pattern!r}, '
                f'which a rule says {rule.says!r} about. Nearest names: '
                f'{", ".join(close)}.'
            )


def _near(pattern: str, operations: list[Operation]) -> str:
    labels = [op.label for op in operations]
    known = {name for label in labels for name in names_of(label, 0) if '@' not in name}
    close = _closest(pattern, known, 0.4)
    if close:
        return f'Nearest names: {", ".join(close)}.'
    some = ', '.join(sorted(set(labels))[:3])
    return f'Some names there are: {some}.'


def _closest(pattern: str, names: Iterable[str], least: float) -> list[str]:
    """At most three names that are at least so similar, from 0 to 1."""
    lower = {name.lower(): name for name in sorted(names)}
    word = pattern.strip('*/').lower()
    return [lower[name] for name in difflib.get_close_matches(word, lower, 3, least)]


def _forward(profile: Profile) -> list[Operation]:
    return [op for op in profile.operations if op.phase is Phase.FORWARD]


def silent_functions(rules: Rules, profile: Profile) -> frozenset[int]:
    """Forward operations that are not replayed because a rule says so."""
    rules = tuple(rule for rule in rules if rule.forbids_replays)
    return frozenset(
        op.index
        for op in _forward(profile)
        if any(rule.names(op.label, op.index) for rule in rules)
    )


def runs_any(recipe: Recipe, operations: frozenset[int]) -> bool:
    """Whether a replay stands for one of these operations."""
    return bool(operations.intersection((recipe.operation, *recipe.covers)))


def named_maps(rule: Rule, profile: Profile, maps: Iterable[MapPlan]) -> list[MapPlan]:
    """Those of a plan's maps that a rule is about: feature maps that may leave at all.

    What backward begins with is kept, whatever rules say.
    """
    begins = profile.first_backward
    return [
        entry
        for entry in maps
        if (storage := profile.storages[entry.storage]).producer >= 0
        and storage.releasable_from <= begins
        and rule.names(storage.label, storage.producer)
    ]
