"""Moves the news of ``docs/news`` into the newest section of ``CHANGELOG.md``.

python docs/make_changelog.py           # moves them; the files are gone then
python docs/make_changelog.py --check   # exits 1 if one of them cannot be used
"""

from __future__ import annotations

import argparse
import pathlib
import re
import textwrap
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
KINDS = ('added', 'fixed', 'changed', 'removed')  # in the order of the sections
COLUMNS = 100
NAME = re.compile(rf'[a-z0-9-]+\.(?:{"|".join(KINDS)})')


def main(arguments: Sequence[str] | None = None, root: pathlib.Path = ROOT) -> int:
    """Moves or checks the news; returns the exit status."""
    parser = argparse.ArgumentParser(description='Move docs/news into CHANGELOG.md.')
    parser.add_argument('--check', action='store_true', help='move nothing')
    options = parser.parse_args(arguments)
    paths = news_of(root)
    wrong = [f'{path.name}: {why}' for path in paths if (why := problem(path))]
    if wrong:
        print('\n'.join(wrong))
        return 1
    if not options.check:
        changelog = root / 'CHANGELOG.md'
        entries = [(path.suffix[1:], path.read_text()) for path in paths]
        changelog.write_text(with_entries(changelog.read_text(), entries))
        for path in paths:
            path.unlink()
    return 0


def news_of(root: pathlib.Path) -> list[pathlib.Path]:
    """The files with news, by name."""
    return sorted(p for p in (root / 'docs' / 'news').iterdir() if p.name[0] != '.')


def problem(path: pathlib.Path) -> str:
    """Why a file cannot be used; empty if it can."""
    if not NAME.fullmatch(path.name):
        return f'its name must be NAME.KIND, with one of {", ".join(KINDS)}'
    text = path.read_text().strip()
    if not text:
        return 'it is empty'
    if '\n\n' in text or (text.startswith(('-', '*', '#')) and text[:2] != '**'):
        return 'it must be the text of one bullet, without the bullet'
    return '' if text.endswith('.') else 'it must end with a full stop'


def with_entries(changelog: str, entries: Sequence[tuple[str, str]]) -> str:
    """The text of a changelog with entries more at the ends of their sections.

    Args:
        changelog: Its newest release is the first one.
        entries: Kind and text of each.
    """
    head, newest, rest = re.split(r'^(?=## )', changelog, maxsplit=2, flags=re.M)
    title, *parts = re.split(r'^### ', newest, flags=re.M)
    sections = {}
    for part in parts:
        name, _, body = part.partition('\n')
        sections[name.lower()] = body.strip()
    for kind, text in entries:
        bullet = textwrap.fill(
            ' '.join(text.split()),
            COLUMNS,
            initial_indent='- ',
            subsequent_indent='  ',
            break_long_words=False,
            break_on_hyphens=False,
        )
        sections[kind] = f'{sections.get(kind, "")}\n{bullet}'.strip()
    order = [*KINDS, *(name for name in sections if name not in KINDS)]
    made = ''.join(
        f'### {name.capitalize()}\n\n{sections[name]}\n\n'
        for name in order
        if name in sections
    )
    return f'{head}{title}{made}{rest}'


if __name__ == '__main__':
    raise SystemExit(main())
