"""Where sub-commands write: tables on standard output, figures as JSON, files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from chainer_hybridmem.errors import FormatError
from chainer_hybridmem.planning.records import library
from chainer_hybridmem.terminal import printable

STDOUT = '-'


def check_output(path: str | None) -> None:
    """Refuses a file that could not be written, before any work is done.

    Raises:
        FormatError: If its folder is missing or not writable, or if something that
            is not a file has its name.
    """
    if path is None or path == STDOUT:
        return
    if not path:
        raise FormatError('A file without a name cannot be written; name one.')
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        reason = f'there is no folder {folder}'
    elif os.path.lexists(path) and not os.path.isfile(path):
        reason = 'something that is not a file has this name'
    elif not os.access(folder, os.W_OK):
        reason = f'folder {folder} is not writable'
    else:
        return
    raise FormatError(f'{path} cannot be written: {reason}. Name another file.')


def check_outputs(
    output: str | None,
    json_path: str | None = None,
    inputs: Sequence[str | None] = (),
) -> None:
    """Refuses the files of a command that would overwrite what it reads or writes.

    Args:
        output: ``--output``.
        json_path: ``--json``.
        inputs: Files that the command reads; None for none.

    Raises:
        FormatError: If one could not be written or is one of the others.
    """
    if output == STDOUT:
        raise FormatError(
            "'-' is standard output, where the figures are printed; name a file."
        )
    read = [os.path.realpath(path) for path in inputs if path is not None]
    taken = dict.fromkeys(read, 'it is what the command reads')
    for path in (output, json_path):
        check_output(path)
        if path is None or path == STDOUT:
            continue
        real = os.path.realpath(path)
        if real in taken:
            raise FormatError(
                f'{path} cannot be written: {taken[real]}. Name another file.'
            )
        taken[real] = 'another output has this name'


def publish(table: str, figures: Any, json_path: str | None) -> None:
    """Prints a table, and writes its figures where ``--json`` says.

    Args:
        table: For people.
        figures: Plain values for programs.
        json_path: ``--json``; ``'-'`` prints the figures instead of the table.
    """
    if json_path == STDOUT:
        print(as_json(figures), end='')
        return
    print(printable(table, lines=True))
    if json_path is not None:
        library.write_text(json_path, as_json(figures))


def as_json(value: Any) -> str:
    """JSON text that people can read too."""
    return json.dumps(value, indent=2) + '\n'
