"""Programs in processes that find Chainer and the package imported.

Python takes a second of a processor to import them, and most programs of tests need
less than half a second for the rest: so these are forks of one process that has. A test
of imports, hash seeds, or variables that are read at the start has a Python of its own.
"""

from __future__ import annotations

import functools
import json
import multiprocessing.process
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_BYTES = 1 << 17  # of a command line and its environment


class Fork:
    """A program that runs, with what a test needs of ``subprocess.Popen``.

    Args:
        words: Of its command line behind the name of Python: ``-c`` or ``-m``, or a
            file, and arguments.
        cwd: Its folder.
        env: All of its environment.
        stderr: Where it writes errors; None: where this process does.
    """

    def __init__(
        self,
        *words: str,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        told = json.dumps([words, str(cwd or os.getcwd()), dict(env or os.environ)])
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours, theirs = os.pipe()
        given = [theirs_in, theirs_out, 2 if stderr is None else stderr, theirs]
        socket.send_fds(_server(), [told.encode()], given)
        for number in (theirs_in, theirs_out, theirs):
            os.close(number)
        self.stdin, self.stdout = os.fdopen(ours_in, 'w'), os.fdopen(ours_out)
        self._told = os.fdopen(ours)
        self.pid = int(self._told.readline())

    def send_signal(self, number: int) -> None:
        """Sends a signal, as a terminal does."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit status, negative if a signal has ended it."""
        self.stdin.close()
        status = int(self._told.readline())
        self._told.close()
        return status

    def kill(self) -> None:
        """Ends it unless it has ended."""
        if not self._told.closed:
            self.send_signal(signal.SIGKILL)
            self.wait()
        self.stdout.close()


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as ``subprocess.run`` does with ``capture_output``."""
    with open(os.memfd_create('errors'), 'w+') as errors:
        fork = Fork(*words, stderr=errors.fileno(), **options)
        out = fork.stdout.read()
        status = fork.wait()
        fork.stdout.close()
        errors.seek(0)
        return subprocess.CompletedProcess(words, status, out, errors.read())


@functools.cache
def _server() -> socket.socket:
    """The other end is a process that forks for each message, and ends with this."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(ROOT), str(ROOT / 'tests')])
    subprocess.Popen(
        [sys.executable, '-W', 'ignore', __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, 'PYTHONPATH': path},
    )
    theirs.close()
    return ours


# ``hybridmem`` of a shell; to Python the lines of the shell are a text.
COMMAND = """#!/bin/sh
'''exec' '{python}' -IS "$0" "$@"
' '''
import json, os, socket, sys
told = [['-m', 'chainer_hybridmem', *sys.argv[1:]], os.getcwd(), dict(os.environ)]
ours, theirs = os.pipe()
server = socket.socket(fileno={server})
socket.send_fds(server, [json.dumps(told).encode()], [0, 1, 2, theirs])
os.close(theirs)
pid, status = map(int, os.fdopen(ours))
sys.exit(status % 256)
"""


def command_in(folder: pathlib.Path) -> int:
    """Puts ``hybridmem`` into a folder of the path; a shell is passed what it returns.

    What it starts is a fork.
    """
    server, command = _server().fileno(), folder / 'hybridmem'
    command.write_text(COMMAND.format(python=sys.executable, server=server))
    command.chmod(0o755)
    return server


# -- in the process that forks -------------------------------------------------
def serve(requests: socket.socket) -> list[str]:
    """Returns in each fork, whose command line it returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait need no waiting for
    while True:
        told, given, _, _ = socket.recv_fds(requests, MOST_BYTES, 4)
        if not told:
            os._exit(0)
        if not os.fork():
            requests.close()
            return become(json.loads(told), given)
        for number in given:
            os.close(number)


def become(told: tuple[list[str], str, dict[str, str]], given: list[int]) -> list[str]:
    """Returns in a fork, while this process waits for its end and tells of it."""
    words, folder, environment = told
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for number in given[:3]:
            os.close(number)
        os.write(given[3], f'{pid}\n'.encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(given[3], f'{status}\n'.encode())
        os._exit(0)
    os.close(given[3])
    for number, kept in enumerate(given[:3]):
        os.dup2(kept, number)
        os.close(kept)
    # Python's own remember whether the server's could be wound.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, 'w')
    sys.stderr = os.fdopen(2, 'w', buffering=1, errors='backslashreplace')
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.chdir(folder)
    vars(multiprocessing.process)['ORIGINAL_DIR'] = folder
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = environment.get('PYTHONPATH', '').split(os.pathsep)
    sys.path[:] = [*filter(None, found), *(p for p in sys.path if p not in PATHS)]
    sys.orig_argv[:] = [sys.executable, *words]
    return words


PATHS = os.path.dirname(__file__), str(ROOT), str(ROOT / 'tests')

if __name__ == '__main__':
    from support.quick_search import QUICK, quick_search

    from chainer_hybridmem.training.chainer_access import compat

    compat.import_chainer()
    for name in ('commands.run', 'running.follower', 'training.session.session'):
        __import__(f'chainer_hybridmem.{name}')
    first, *rest = serve(socket.socket(fileno=int(sys.argv[1])))
    if QUICK in os.environ:
        quick_search().__enter__()
    if first == '-m':
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])
    elif first == '-c':
        sys.argv[:] = [first, *rest[1:]]
        sys.path.insert(0, '')
        exec(compile(rest[0], '<string>', 'exec'), {'__name__': '__main__'})
    else:
        sys.argv[:] = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        text = pathlib.Path(first).read_text()
        exec(compile(text, first, 'exec'), {'__name__': '__main__'})
