"""The rules of a session, as far as they concern one kind of iteration."""

from __future__ import annotations

import fnmatch

import chainer

from chainer_hybridmem.records.profile import Phase, Profile
from chainer_hybridmem.records.rules import Rules, check_names, check_rules, names_of


class SessionRules:
    """Tells which rules an iteration's plan obeys.

    An iteration need not run every layer of the model: a rule about the generator says
    nothing about the discriminator's iterations. A rule is unknown if its pattern names
    no function that any planned iteration has run, and no layer that has not run yet.

    Args:
        rules (tuple of pairs): As in :class:`.options.Options`.
        model (Link): Its links have names.
    """

    def __init__(self, rules: tuple[tuple[str, str], ...], model: chainer.Link) -> None:
        self._rules = check_rules(rules)
        self._paths = {path for path, _ in model.namedlinks() if path != '/'}
        self._met: set[str] = set()  # patterns that have named something

    def choose(self, profile: Profile) -> Rules:
        """Those rules that name a function of an iteration.

        Raises:
            OptionError: If one names nothing here, and nothing anywhere else.
        """
        labels = [
            (op.label, op.index)
            for op in profile.operations
            if op.phase is Phase.FORWARD
        ]
        chosen = tuple(
            rule
            for rule in self._rules
            if any(rule.names(label, index) for label, index in labels)
        )
        self._met.update(rule.pattern for rule in chosen)
        run = {label.rpartition('/')[0] for label, _ in labels}
        absent = {
            name
            for path in self._paths
            if not any(f'{known}/'.startswith(f'{path}/') for known in run)
            for name in names_of(f'{path}/', 0)
        }
        for rule in self._rules:
            patterns = (rule.pattern, rule.pattern.rpartition('/')[0])
            elsewhere = any(
                fnmatch.fnmatchcase(name, pattern)
                for name in absent
                for pattern in patterns
                if pattern
            )
            if rule.pattern not in self._met and not elsewhere:
                check_names((rule,), profile)
        return chosen
