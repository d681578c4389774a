"""Writes what commands print into the pages that show it, and draws their picture.

    python docs/make_console.py                      # all pages, and the picture
    python docs/make_console.py docs/guide/estimate.md ...    # minutes for each page

The picture shows the plan that ``hybridmem estimate`` of the README predicts. A figure
of README, guide or reference is in a block that a test runs and compares
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
ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / 'docs' / 'pictures' / 'resnet50.png'
DRAWN = """\
hybridmem estimate --arch resnet50 --batchsize 640 --gpu v100-16gb-pcie3 -o p.json
hybridmem plan p.json --memory-limit 16GB -o plan.json
hybridmem show p.json plan.json -o {}
"""


def main(names: list[str]) -> int:
    """Rewrites the blocks of some pages, or all figures; returns the exit status."""
    for page in map(pathlib.Path, names or _find_pages()):
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(BLOCK.sub(lambda found: _rewrite(found, folder), text))
    if not names:
        with tempfile.TemporaryDirectory() as folder:
            _run(DRAWN.format(PICTURE), folder)
    return 0


def _find_pages() -> list[pathlib.Path]:
    pages = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
    return [page for page in pages if BLOCK.search(page.read_text())]


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
