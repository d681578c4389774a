"""Writes the pages of ``docs/reference`` that follow from the code.

    python docs/make_reference.py           # options, commands, python, repairs, api
    python docs/make_reference.py --check   # exits 1 if one of them is stale

Descriptions are those of the docstrings and of the command line's help.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import chainer_hybridmem as hybridmem
from chainer_hybridmem import commands, testing
from chainer_hybridmem.planning import planners
from chainer_hybridmem.planning.planners import registry
from chainer_hybridmem.training.chainer_access.compat import old_names, table
from chainer_hybridmem.training.session.setting.options import OPTIONS, USUAL, Options

FOLDER = pathlib.Path(__file__).resolve().parent / 'reference'
COLUMNS = 100
# Classes of what the public functions return, with their public members.
RETURNED = (
    'planning.records.profile.Profile',
    'planning.records.profile.Operation',
    'planning.records.profile.Storage',
    'planning.records.profile.Slot',
    'planning.records.profile.SlotKind',
    'planning.records.profile.Phase',
    'planning.records.profile.Category',
    'planning.records.profile.Recipe',
    'planning.records.plan.Plan',
    'planning.records.plan.MapPlan',
    'planning.records.plan.Action',
    'planning.records.plan.Replay',
    'planning.records.plan.Source',
    'planning.records.plan.Part',
    'planning.records.plan.Tier',
    'planning.records.timeline.Timeline',
    'planning.records.timeline.Interval',
    'planning.records.measured_timeline.Measured',
    'planning.records.measured_timeline.Sample',
    'planning.records.measured_timeline.MemoryEvent',
    'training.execution.verifier.Verdict',
    'training.session.iterations.overrun.Needs',
    'training.session.results.StepTimes',
    'extras.inference_session.InferenceSession',
    'forecasting.batch_estimate.Estimate',
    'forecasting.batches.LargestBatch',
    'forecasting.batches.Batch',
    'forecasting.batches.Refusal',
    'extras.memory_series.MemoryProfiler',
    'extras.memory_series.Sample',
)
# Comments: readers of the site have no use for it.
BY_HAND = 'python docs/make_reference.py writes this page from the code; edit that'
WRITTEN = f'<!-- {BY_HAND} -->'
WRITTEN_RST = f'.. {BY_HAND}'


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description='Write docs/reference.')
    parser.add_argument(
        '--check', action='store_true', help='write nothing; exit with 1 if stale'
    )
    options = parser.parse_args(arguments)
    status = 0
    for name, text in pages().items():
        path = FOLDER / name
        if not options.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f'{path} is stale; run python docs/make_reference.py')
            status = 1
    return status


def pages() -> dict[str, str]:
    """Returns the text of each page by its file name."""
    return {
        'options.md': '\n\n'.join(_options()) + '\n',
        'commands.md': '\n\n'.join(_commands()) + '\n',
        'python.md': '\n\n'.join(_python()) + '\n',
        'repairs.md': '\n\n'.join(_repairs()) + '\n',
        'api.rst': '\n\n'.join(_api()) + '\n',
    }


# -- options ------------------------------------------------------------------
def _options() -> Iterator[str]:
    yield '# Options'
    yield _wrapped(
        'Which options does a session take, and what do they do? '
        '`hybridmem.optimize(model, memory_limit, ...)` and the Trainer extension '
        '`hybridmem.HybridMemory(memory_limit, ...)` take the same ones.'
    )
    yield WRITTEN
    yield _wrapped(
        'Sizes are bytes, or text such as `16GiB` or `16G` (16 · 2^30) and `16GB` '
        '(16 · 10^9), no percentage. Bandwidths are bytes per second, or text such as '
        '`100MB/s`. A default that is not named is None, or False for a switch. An '
        'option that cannot be used raises `OptionError` before anything is trained.'
    )
    described = _arguments(inspect.getdoc(Options) or '')
    for place, (name, field) in enumerate(OPTIONS.items()):
        if place == 0:
            yield '## Options of a session'
        if place == USUAL:
            yield '## Options that few programs need'
        yield f'### `{name}`'
        yield _wrapped(f'{_default(field)}{_linked(described[name])}')
    yield '## Options of the planners'
    yield _wrapped(
        'They are further keyword arguments of `optimize`, `HybridMemory` and '
        '`make_plan`, and `--option KEY=VALUE` of `hybridmem plan`. '
        '[planners.md](planners.md) says what they do.'
    )
    told = described['planner_options'].partition('others are taken for those. ')[2]
    yield _wrapped(f'In a session: {_linked(told)}')
    lines = ['| planner | options and defaults |', '| --- | --- |']
    names = collections.defaultdict(list)
    for name in planners.PLANNERS:
        listed = ', '.join(
            f'`{parameter.name}={parameter.default!r}`'
            for parameter in _planner_options(name)
        )
        names[listed].append(f'`{name}`')
    lines += [
        f'| {", ".join(same)} | {listed} |' for listed, same in names.items() if listed
    ]
    yield '\n'.join(lines)
    yield 'The others have none.'


def _planner_options(name: str) -> list[inspect.Parameter]:
    signature = inspect.signature(planners.find_planner(name).function)
    return list(signature.parameters.values())[2:]


def _default(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return '*Required.* '
    if field.default in (None, False):
        return ''
    return f'*Default: `{field.default!r}`.* '


def _arguments(documentation: str) -> dict[str, str]:
    """Returns the description of each argument in a docstring.

    Args:
        documentation: With a section ``Args:`` as Google's style has it.
    """
    section = documentation.partition('Args:\n')[2].partition('\n\n')[0]
    found: dict[str, str] = {}
    name = ''
    for line in textwrap.dedent(section).splitlines():
        match = re.match(r'(\w+)(?: \([^)]*\))?: (.*)', line)
        if match:
            name = match.group(1)
            found[name] = match.group(2)
        elif name:
            found[name] += f' {line.strip()}'
    return found


# -- commands -----------------------------------------------------------------
def _commands() -> Iterator[str]:
    parser = commands.make_parser()
    yield '# Commands'
    yield _wrapped(
        'Which commands does `hybridmem` have, and which flags? '
        'The guide shows them at work.'
    )
    yield WRITTEN
    yield _wrapped(
        '`PROFILE` is a file, or `shipped:NAME` for one of the profiles that come with '
        'the package ([`compare`](#hybridmem-compare) names them). `8GiB` and `8G` are '
        '8 · 2^30 bytes, `8GB` are 8 · 10^9; a limit in percent is a share of the '
        'in-core peak.'
    )
    yield _wrapped(
        'Exit status: 0 done; 1 it cannot be done, and one line says why, or the '
        'answer is no; 2 the command line cannot be understood; 130 interrupted; 141 '
        'nobody reads the output.'
    )
    subs = _subparsers(parser)
    shared = _shared_flags(subs.values())
    for name, sub in subs.items():
        yield f'## `hybridmem {name}`'
        for paragraph in (sub.description or '').split('\n\n'):
            if paragraph.strip():
                yield _wrapped(_linked(paragraph))
        told = list(_flags(sub))
        for title, flags in _groups(sub):
            own = '\n'.join(flag for _, flag in flags if flag not in shared)
            if own and title is not None:
                yield f'*{title[:1].upper()}{title[1:]}:*'
            if own:
                yield own
        also = ', '.join(f'`{name}`' for name, flag in told if flag in shared)
        if also:
            yield _wrapped(f'[Also](#flags-of-several-commands): {also}.')
    yield '## Flags of several commands'
    yield '\n'.join(shared)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, Any]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise LookupError('the command line has no sub-commands')


def _shared_flags(parsers: Iterable[argparse.ArgumentParser]) -> list[str]:
    """Returns the flags and arguments that mean the same in several commands.

    Of several meanings of one name, that of more than half of its commands counts, or
    of more than two.
    """
    flags = [flag for parser in parsers for flag in _flags(parser)]
    meanings: dict[str, collections.Counter[str]] = {}
    for name, line in flags:
        meanings.setdefault(name, collections.Counter())[line] += 1
    return [
        line
        for found in meanings.values()
        for line, times in found.most_common(1)
        if times > 2 or 1 < times > found.total() / 2
    ]


def _groups(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str | None, list[tuple[str, str]]]]:
    """Returns flags by headings of ``--help``; what is usual comes first, without."""
    usual = parser._positionals, parser._optionals
    yield None, [flag for group in usual for flag in _flags(group)]
    for group in parser._action_groups:
        if group not in usual:
            yield group.title, list(_flags(group))


def _flags(container: Any) -> Iterator[tuple[str, str]]:
    """Returns name and line of each flag of a parser, or of a group of its flags."""
    for action in getattr(container, '_group_actions', container._actions):
        if isinstance(action, argparse._HelpAction):
            continue
        words = _spelled(action)
        needed = ' (required)' if action.required and action.option_strings else ''
        meaning = _linked(_help(action))
        text = f'{words}{needed}: {meaning}' if meaning else f'{words}{needed}'
        yield re.split('[ ,`]', words)[1], _wrapped(text, initial='- ', following='  ')


def _spelled(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else '')
    if isinstance(value, tuple):
        value = ' '.join(value)
    elif isinstance(action.nargs, int) and action.nargs > 1:
        value = ' '.join([value] * action.nargs)
    elif action.nargs in ('*', '+'):
        value += ' ...'
    if action.choices is not None and action.metavar is None:
        value = '{' + ','.join(map(str, action.choices)) + '}'
    if not action.option_strings:
        return f'`{value}`'
    spelled = ', '.join(action.option_strings)
    return f'`{spelled} {value}`' if value else f'`{spelled}`'


def _help(action: argparse.Action) -> str:
    text = (action.help or '').replace('%%', '%')
    return text.replace('%(default)s', str(action.default))


# -- Python -------------------------------------------------------------------
def _python() -> Iterator[str]:
    yield '# Python interface'
    yield _wrapped(
        'Which names does `import chainer_hybridmem as hybridmem` offer? '
        '`help(hybridmem.NAME)` has arguments, results and errors of each, as has the '
        'page [every name in full](api.rst) of the documentation site.'
    )
    yield WRITTEN
    objects = {name: getattr(hybridmem, name) for name in hybridmem.__all__}
    errors = {name for name, item in objects.items() if _is_error(item)}
    for title, chosen in (
        ('Functions and classes', sorted(set(objects) - errors)),
        ('Errors', sorted(errors)),
    ):
        yield f'## {title}'
        yield '\n'.join(_item(name, objects[name]) for name in chosen)
    yield '## A session'
    yield _wrapped(
        '`optimize()` returns a `Session`; the extension has one as `session` once '
        'training has started.'
    )
    yield '\n'.join(
        _item(name, item)
        for name, item in sorted(vars(hybridmem.Session).items())
        if not name.startswith('_') and inspect.getdoc(item) and _is_callable(item)
    )


# -- repairs ------------------------------------------------------------------
def _repairs() -> Iterator[str]:
    yield '# Repairs'
    yield _wrapped(
        'What is wrong with Chainer 7.8.1 on current Python, NumPy and CuPy, and what '
        'is done about it? `import chainer_hybridmem`, `hybridmem run` and `hybridmem '
        'repair --enable` do all of this, and nothing where it is not needed: with '
        'Python 3.11 or older and NumPy 1, Chainer works without it. Its examples have '
        'trained under `hybridmem run` with Python 3.10 to 3.13 and NumPy 1.26 to 2.5.'
    )
    yield WRITTEN
    lines = ['| what | since | without it |', '| --- | --- | --- |']
    lines += [f'| {one.what} | {one.since} | {one.reason} |' for one in table.REPAIRS]
    yield '\n'.join(lines)
    yield '## Old names'
    yield _wrapped(
        'Unmaintained programs may use names that NumPy, `collections` and '
        '`inspect` have removed. `hybridmem run --old-names` puts them back for the '
        'whole process, and nothing else does.'
    )
    lines = ['| gone with | names |', '| --- | --- |']
    for group in old_names.TABLE:
        listed = ', '.join(f'`{group.module}.{name}`' for name in group.instead)
        lines.append(f'| {group.since} | {listed} |')
    yield '\n'.join(lines)


# -- API, for Sphinx ----------------------------------------------------------
def _api() -> Iterator[str]:
    yield 'Every name in full\n=================='
    yield _wrapped(
        'What do the names of ``import chainer_hybridmem as hybridmem`` take, return '
        'and raise, and what can be done with what they return?'
    )
    yield WRITTEN_RST
    objects = {name: getattr(hybridmem, name) for name in hybridmem.__all__}
    errors = sorted(name for name, item in objects.items() if _is_error(item))
    classes = sorted(
        name
        for name, item in objects.items()
        if isinstance(item, type) and name not in errors
    )
    functions = sorted(set(objects) - set(errors) - set(classes))
    yield '.. currentmodule:: chainer_hybridmem'
    yield _heading('Functions')
    yield from (f'.. autofunction:: {name}' for name in functions)
    yield _heading('Sessions')
    yield from (f'.. autoclass:: {name}' for name in classes)
    yield _heading('What functions return')
    yield from (f'.. autoclass:: chainer_hybridmem.{name}' for name in RETURNED)
    yield _heading('The suite for planners of other packages')
    yield from (
        f'.. autoclass:: chainer_hybridmem.testing.{name}\n   :no-members:'
        for name in testing.__all__
    )
    yield _heading('Errors')
    yield from (f'.. autoclass:: {name}\n   :show-inheritance:' for name in errors)
    yield _heading('Planners')
    yield _wrapped(
        'The rule of each, what is interpreted of its paper, and what differs. '
        '``docs/reference/planners.md`` says which one to take.'
    )
    for file in registry.FILES:
        yield _heading(', '.join(planner.name for planner in file.PLANNERS), '~')
        yield f'.. automodule:: {file.__name__}\n   :no-members:'


def _heading(text: str, line: str = '-') -> str:
    return f'{text}\n{line * len(text)}'


def _is_error(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, BaseException)


def _is_callable(item: Any) -> bool:
    """Whether a member is for users: hooks of Chainer are not."""
    name = getattr(item, '__name__', '')
    return isinstance(item, property) or (
        inspect.isfunction(item)
        and not name.endswith('process')
        and name not in ('added', 'deleted')
    )


def _item(name: str, item: Any) -> str:
    first = (inspect.getdoc(item) or '').partition('\n\n')[0]
    return _wrapped(f'`{name}`: {_linked(first)}', initial='- ', following='  ')


# -- text ---------------------------------------------------------------------
def _linked(text: str) -> str:
    """Returns text with Markdown instead of reStructuredText, and with links."""
    text = re.sub(r':\w+:`[~.]*([^`]+)`', r'`\1`', text).replace('``', '`')
    return re.sub(
        r'docs/(\w+/)?(\w+\.md)',
        lambda m: f'[{m.group(2)}](../{m.group(1) or ""}{m.group(2)})',
        text,
    )


def _wrapped(text: str, initial: str = '', following: str = '') -> str:
    return textwrap.fill(
        ' '.join(text.split()),
        COLUMNS,
        initial_indent=initial,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == '__main__':
    sys.exit(main())
