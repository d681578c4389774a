"""Ctrl-C at lines of the package, each in a process of its own.

``python -m tests.fuzz.interruptions --minutes 10`` draws lines of sessions that begin,
iterate and end, and of measurements; ``--list`` names what is interrupted, and
``--subject`` chooses of it. A line is interrupted the first time it runs, in a forked
child, so that what one leaves behind does not meet the next. Later times are left out:
the line of a ``with`` statement shows up once more as it ends, where Python looks for
no signal.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from faults_tests.test_interrupted_measurements import (
    MEASUREMENTS,
    interrupt_measurement,
)
from faults_tests.test_interruptions import (
    PLANS,
    Interruption,
    Place,
    begin_and_end,
    interrupt_iteration,
    places_of,
)
from support import faulty

LONGEST_SECONDS = 120  # of a child
Interrupt = Callable[[Interruption], Any]


class Subject(NamedTuple):
    """What is interrupted.

    Attributes:
        name (str): It is chosen by.
        interrupt (callable): Lets an interruption happen, and raises if anything is
            wrong afterwards.
    """

    name: str
    interrupt: Interrupt


def list_subjects() -> list[Subject]:
    """All that can be interrupted."""
    subjects = [
        Subject('begin', lambda i: begin_and_end(i, Interruption(), True)),
        Subject('end', lambda i: begin_and_end(Interruption(), i, True)),
        Subject('end inside', lambda i: begin_and_end(Interruption(), i, False)),
    ]
    for measure in MEASUREMENTS:
        interrupt = functools.partial(interrupt_measurement, measure)
        subjects.append(Subject(measure.__name__, interrupt))
    for stage in faulty.STAGES:
        for plan in PLANS:
            for way in (faulty.leave_session, faulty.stay_in_session):
                name = f'{stage}, {plan}, {way.__name__}'
                interrupt = functools.partial(interrupt_iteration, way, stage, plan)
                subjects.append(Subject(name, interrupt))
    return subjects


def find_fault(subject: Subject, place: Place) -> str:
    """Interrupts it at a line, in a child; what is wrong, or nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.alarm(LONGEST_SECONDS)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            subject.interrupt(Interruption(place))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f'{type(error).__name__}: {error} ({where.name}, {where.lineno})'
            os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, errors='replace') as told:
        text = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        return f'the process ended with {status}'
    return text


def sweep(subject: Subject, seed: int, until: float, at_most: int) -> list[str]:
    """Interrupts lines in a drawn order, as long as there is time; the faults."""
    subject.interrupt(Interruption())  # makes what others use again
    places = list(places_of(subject.interrupt))
    random.Random(seed).shuffle(places)
    faults, tried = [], 0
    for place in places[:at_most]:
        if time.monotonic() > until:
            break
        tried += 1
        text = find_fault(subject, place)
        if text:
            faults.append(f'{subject.name}: {place[0]}:{place[1]}: {text}')
            print(faults[-1], flush=True)
    print(
        f'{subject.name}: {tried} of {len(places)} lines, {len(faults)} faults',
        flush=True,
    )
    return faults


def main() -> int:
    """Sweeps subjects until the time is over; 1 if there is a fault."""
    parser = argparse.ArgumentParser(
        prog='python -m tests.fuzz.interruptions', description=__doc__
    )
    parser.add_argument('--seed', type=int, default=0, help='of the order')
    parser.add_argument('--minutes', type=float, default=10.0)
    parser.add_argument('--lines', type=int, default=1 << 20, help='at most, of each')
    parser.add_argument('--subject', help='only those whose names contain this')
    parser.add_argument('--list', action='store_true', help='names the subjects')
    arguments = parser.parse_args()
    subjects = [s for s in list_subjects() if (arguments.subject or '') in s.name]
    if arguments.list or not subjects:
        print('\n'.join(s.name for s in subjects or list_subjects()))
        return 0 if subjects else 2
    faulty.in_core()
    end = time.monotonic() + 60 * arguments.minutes
    faults = []
    for number, subject in enumerate(subjects):
        now = time.monotonic()
        share = max(end - now, 0.0) / (len(subjects) - number)
        faults += sweep(subject, arguments.seed, now + share, arguments.lines)
    return 1 if faults else 0


if __name__ == '__main__':
    sys.exit(main())
