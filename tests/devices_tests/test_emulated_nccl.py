"""The emulator's NCCL: two processes, every call, what it refuses, ranks that end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        'EMU_LIBRARY' not in os.environ, reason='needs the emulator: make test-cuda'
    ),
]

BEGIN = """
import os
import sys
import time
import numpy as np
import cupy
from cupy.cuda import nccl

rank = int(os.environ['RANK'])
cupy.cuda.Device(rank).use()
unique = nccl.get_unique_id()  # bytes, or a tuple of numbers before CuPy 14

def open_one(name='first'):
    given = (os.environ['UNIQUE'] + name).encode().ljust(128, b'\\0')
    given = given if isinstance(unique, bytes) else tuple(given)
    return nccl.NcclCommunicator(2, given, rank)

def refused(call, *arguments):
    try:
        call(*arguments)
    except nccl.NcclError as error:
        return str(error)
    raise AssertionError('it was accepted')

comm = open_one()
stream = cupy.cuda.Stream(non_blocking=True)
x = cupy.arange(6, dtype='f') + 10 * rank
y = cupy.zeros(12, 'f')
cupy.cuda.Device().synchronize()
SUM, FLOAT = nccl.NCCL_SUM, nccl.NCCL_FLOAT32
"""


def run(program, **environment):
    """What two ranks print, and how each ends."""
    unique = f'emulated-nccl-{os.getpid()}-{time.monotonic_ns()}'
    body = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    ranks = [
        subprocess.Popen(
            [sys.executable, '-c', body],
            env={
                **os.environ,
                'EMU_NCCL_SECONDS': '60',
                **environment,
                'UNIQUE': unique,
                'RANK': str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], '\n'.join(said)


@pytest.mark.parametrize('mode', ['random', 'lazy', 'eager'])
def test_every_call_gives_what_it_should(mode):
    code, said = run(
        """
        first, second = np.arange(6, dtype='f'), np.arange(6, dtype='f') + 10
        def result(call, *arguments, size=6):
            y.fill(-1)
            cupy.cuda.Stream.null.synchronize()
            call(*arguments, stream.ptr)
            return y[:size].get(stream=stream)
        here, there = x.data.ptr, y.data.ptr
        both = first + second
        assert (comm.size(), comm.rank_id(), comm.device_id()) == (2, rank, rank)
        for kind in 'bBiIlLefd':
            a = cupy.arange(5).astype(kind) + rank
            cupy.cuda.Stream.null.synchronize()
            number = 'bBiIlLefd'.index(kind)
            for op, expected in enumerate([
                np.arange(5) * 2 + 1, np.arange(5) * np.arange(1, 6),
                np.arange(1, 6), np.arange(5),
            ]):
                out = cupy.empty_like(a)
                cupy.cuda.Stream.null.synchronize()
                comm.allReduce(
                    a.data.ptr, out.data.ptr, 5, number, op, stream.ptr
                )
                assert (out.get(stream=stream) == expected).all(), (kind, op)
        assert (result(comm.allReduce, here, there, 6, FLOAT, SUM) == both).all()
        got = result(comm.reduce, here, there, 6, FLOAT, SUM, 1)
        assert (got == (both if rank else -1)).all()
        assert (result(comm.broadcast, here, there, 6, FLOAT, 1) == second).all()
        got = result(comm.reduceScatter, here, there, 3, FLOAT, SUM, size=3)
        assert (got == both[3 * rank:][:3]).all()
        got = result(comm.allGather, here, there, 6, FLOAT, size=12)
        assert (got == np.concatenate([first, second])).all()
        nccl.groupStart()
        comm.send(here, 6, FLOAT, 1 - rank, stream.ptr)
        comm.recv(there, 6, FLOAT, 1 - rank, stream.ptr)
        nccl.groupEnd()
        assert (y[:6].get(stream=stream) == (first if rank else second)).all()
        comm.bcast(here, 6, FLOAT, 0, stream.ptr)
        assert (x.get(stream=stream) == first).all()
        comm.check_async_error()
        comm.destroy()
        print('well')
        """,
        EMU_MODE=mode,
    )
    assert code == [0, 0] and said.count('well') == 2, said


def test_a_rank_goes_on_while_its_program_waits_for_another(tmp_path):
    """As a GPU does; the call is issued, and the program waits for a message."""
    code, said = run(
        """
        comm.allReduce(x.data.ptr, y.data.ptr, 6, FLOAT, SUM, stream.ptr)
        if rank == 0:
            stream.synchronize()
            open(os.environ['WORD'], 'w').close()
        while not os.path.exists(os.environ['WORD']):
            time.sleep(0.01)
        assert float(y[:6].get(stream=stream).sum()) == 90
        print('well')
        """,
        EMU_MODE='lazy',
        WORD=str(tmp_path / 'over'),
    )
    assert code == [0, 0] and said.count('well') == 2, said


def test_what_is_refused():
    code, said = run(
        """
        other, here, there = np.zeros(6, 'f'), x.data.ptr, y.data.ptr
        gone = cupy.cuda.Memory(512)
        address = gone.ptr
        del gone
        for arguments in [
            (other.ctypes.data, there, 6, FLOAT, SUM),
            (address, there, 6, FLOAT, SUM),
            (here, there, 10**6, FLOAT, SUM),
            (here, there, 6, 77, SUM),
            (here, there, 6, FLOAT, 77),
        ]:
            assert 'INVALID_ARG' in refused(comm.allReduce, *arguments, stream.ptr)
        assert 'INVALID_ARG' in refused(
            comm.bcast, here, 6, FLOAT, 2, stream.ptr
        )
        assert 'INVALID_USAGE' in refused(nccl.groupEnd)
        comm.destroy()
        assert 'INVALID_ARG' in refused(
            comm.allReduce, here, there, 6, FLOAT, SUM, stream.ptr
        )
        cupy.cuda.Device(0).use()
        assert 'INVALID_USAGE' in refused(open_one, 'second')
        print('well')
        """
    )
    assert code == [0, 0] and said.count('well') == 2, said
    for why in ('of the host, or freed', 'was destroyed', 'each needs its own'):
        assert why in said


@pytest.mark.parametrize(
    ('program', 'why'),
    [
        (
            """
            comm.allReduce(
                x.data.ptr, y.data.ptr, 6 - rank, FLOAT, SUM, stream.ptr
            )
            stream.synchronize()
            """,
            'calls AllReduce of 5',
        ),
        (
            """
            if rank == 0:
                comm.allReduce(x.data.ptr, y.data.ptr, 6, FLOAT, SUM, stream.ptr)
                stream.synchronize()
            time.sleep(6)
            """,
            'waits for rank 1, which does not come',
        ),
        (
            """
            if rank == 1:
                time.sleep(1)
                os._exit(0)
            comm.allReduce(x.data.ptr, y.data.ptr, 6, FLOAT, SUM, stream.ptr)
            stream.synchronize()
            """,
            'waits for rank 1, whose process has ended',
        ),
    ],
    ids=['other counts', 'no call', 'ended'],
)
def test_no_rank_waits_for_ever(program, why):
    code, said = run(program, EMU_NCCL_SECONDS='4')
    assert any(code) and why in said, said


def test_a_call_after_the_end_of_a_rank_is_an_error():
    code, said = run(
        """
        if rank == 1:
            os._exit(0)
        time.sleep(1)
        assert 'REMOTE_ERROR' in refused(comm.check_async_error)
        assert 'REMOTE_ERROR' in refused(
            comm.allReduce, x.data.ptr, y.data.ptr, 6, FLOAT, SUM, stream.ptr
        )
        """
    )
    assert code == [0, 0], said


def test_memory_that_is_used_again_too_early_is_a_race():
    program = """
        comm.allReduce(x.data.ptr, y.data.ptr, 6, FLOAT, SUM, stream.ptr)
        if {waits}:
            cupy.cuda.Stream.null.wait_event(stream.record())
        x.fill(0)
        cupy.cuda.Device().synchronize()
        sys.path[:0] = os.environ['TESTS'].split(os.pathsep)
        from cuda_emulator import control
        print('races', control.counters()['race'] > 0)
        """
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for waits in (True, False):
        code, said = run(program.format(waits=waits), EMU_RACES='1', TESTS=tests)
        assert code == [0, 0] and said.count(f'races {not waits}') == 2, said
