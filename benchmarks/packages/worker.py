"""Runs a job as ``hybridmem run`` does, and notes what a user would see of it.

    python -m benchmarks.packages.worker OUTPUT [OPTION of hybridmem run ...] JOB ARGS

OUTPUT gets JSON: CPU seconds after each update, a digest of all parameters, what is
permanent, the figures of each session, and the exit status.

Where ``TURNS`` names two pipes, processes take their updates in turns: each waits for a
byte from the first one, and writes it into the second one after its update.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import time
from typing import Any

from chainer_hybridmem import commands
from chainer_hybridmem.training.chainer_access import compat

seen: dict[str, Any] = {'cpu_seconds': [], 'sessions': []}
optimizers: list[Any] = []
turns = [int(pipe) for pipe in os.environ.get('TURNS', '').split(',') if pipe]


def await_turn() -> None:
    """Returns when the others have taken theirs; at once if they have ended."""
    if turns:
        os.read(turns[0], 1)


def end_turn() -> None:
    """Lets the next one take its turn, if it has not ended."""
    if turns:
        with contextlib.suppress(BrokenPipeError):
            os.write(turns[1], b'.')


def watch() -> None:
    """Chainer has been imported: updates, optimizers and sessions are noted.

    What is drawn is the same in each run.
    """
    import chainer
    import numpy

    from chainer_hybridmem.training.session.session import Session

    random.seed(0)
    numpy.random.seed(0)
    update, setup = chainer.GradientMethod.update, chainer.Optimizer.setup
    leave = Session.__exit__

    def update_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        seen['cpu_seconds'].append(time.process_time())
        end_turn()
        await_turn()

    def setup_and_note(self: Any, link: Any) -> Any:
        optimizers.append(self)
        return setup(self, link)

    def leave_and_note(self: Any, *error: Any) -> None:
        try:
            leave(self, *error)
        finally:
            figures = self.statistics()
            names = ('iterations', 'guided_iterations', 'peak_bytes', 'limit_bytes')
            seen['sessions'].append({name: figures[name] for name in names})

    chainer.GradientMethod.update = update_and_note
    chainer.Optimizer.setup = setup_and_note
    Session.__exit__ = leave_and_note
    await_turn()


def note_models() -> None:
    """The bits of all parameters, and the bytes of what never leaves."""
    from chainer_hybridmem.training.chainer_access.owners import permanent_arrays

    digest, permanent = hashlib.sha256(), {}
    for optimizer in optimizers:
        for name, parameter in sorted(optimizer.target.namedparams()):
            if parameter.array is not None:  # a forward has given it a size
                digest.update(name.encode())
                digest.update(parameter.array.tobytes())
        for _, array in permanent_arrays(optimizer.target):
            permanent[id(array)] = array.nbytes
    seen['digest'] = digest.hexdigest()
    seen['permanent_bytes'] = sum(permanent.values())


def main() -> int:
    output, *arguments = sys.argv[1:]
    compat.after_import(watch)
    seen['begin_seconds'] = time.process_time()
    try:
        status = commands.main(['run', *arguments])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else bool(error.code)
    if optimizers:
        note_models()
    with open(output, 'w', encoding='utf-8') as file:
        json.dump({**seen, 'status': status}, file)
    return status


if __name__ == '__main__':
    raise SystemExit(main())
