"""Writes what the commands of console blocks print into the pages that show it.

    python docs/make_console.py docs/guide/estimate.md ...    # minutes for each page

A figure of README, guide or reference is in a block that a test runs and compares
(``tests/documents_tests/test_document_examples.py``), or is rendered from a result
file (``python -m benchmarks render``). Lines with ``...`` stay as they are.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

BLOCK = re.compile(r'(^```console[^\n]*\n)(.*?)(^```$)', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r'^\$ ((?:[^\n]*\\\n)*[^\n]*\n)', re.MULTILINE)
ANY = '...'


def main(names: list[str]) -> int:
    """Rewrites the blocks of some pages; returns the exit status."""
    if not names:
        print(__doc__)
        return 2
    for page in map(pathlib.Path, names):
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(BLOCK.sub(lambda found: _rewrite(found, folder), text))
    return 0


def _rewrite(found: re.Match[str], folder: str) -> str:
    head, body, end = found.groups()
    parts = COMMAND.split(body)
    for i in range(1, len(parts), 2):
        printed = _run(parts[i], folder)
        parts[i] = f'$ {parts[i]}'
        if parts[i + 1].strip():
            parts[i + 1] = _merge(parts[i + 1], printed)
    return head + ''.join(parts) + end


def _run(command: str, folder: str) -> str:
    print(f'$ {command}', end='', flush=True)
    done = subprocess.run(
        ['bash', '-ec', command],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _merge(shown: str, printed: str) -> str:
    """What is printed, but as far as lines of the block are for other ones, these."""
    lines = [line.rstrip() for line in printed.splitlines()]
    if ANY not in shown:
        return '\n'.join(lines) + '\n'
    kept: list[str] = []
    for line in shown.splitlines():
        if not line.strip() or ANY in line:
            kept.append(line)
            continue
        first = line.split()[0]
        same = [other for other in lines if other.split()[:1] == [first]]
        kept.append(same[0] if same else line)
    return '\n'.join(kept) + '\n'


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
