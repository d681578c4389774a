"""Messages between the sessions of processes that train together, over MPI."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

MOST_KEPT = 1000  # messages that are not asked for
_TAG = 31_415  # of messages between sessions; ChainerMN's have the user's


class Topic(NamedTuple):
    """What ranks meet for.

    Attributes:
        kind (str): In a word.
        about (tuple): What must be alike in all of them.
    """

    kind: str
    about: tuple[Hashable, ...] = ()


class Key(NamedTuple):
    """Names a message: of the k-th meeting of a session for a topic."""

    session: int
    topic: Topic
    number: int
    what: str

    def is_like(self, other: Key) -> bool:
        """Whether both say the same, of topics of one kind in one session."""
        return (self.session, self.topic.kind, self.what) == (
            other.session,
            other.topic.kind,
            other.what,
        )


class Mailbox:
    """What has come through one communicator, for whichever session it is.

    Others may have begun their next session while this rank is in an earlier one.

    Args:
        communicator: Of ChainerMN.

    Attributes:
        received (dict): Values by sender and key.
        sessions (int): How many this rank has opened.
    """

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator.mpi_comm
        self._sent: list[Any] = []  # requests under way
        self.received: dict[tuple[int, Key], Any] = {}
        self.sessions = 0

    def open_session(self) -> int:
        """Counts a session; returns its number."""
        self.sessions += 1
        return self.sessions

    def send(self, ranks: list[int], key: Key, value: Any) -> None:
        """Sends to each of them."""
        self._sent = [request for request in self._sent if not request.test()[0]]
        for rank in ranks:
            self._sent.append(self._comm.isend((key, value), dest=rank, tag=_TAG))

    def collect(self) -> set[int]:
        """Takes in what has come; returns its senders."""
        from mpi4py import MPI

        status = MPI.Status()
        senders: set[int] = set()
        while True:
            message = self._comm.improbe(tag=_TAG, status=status)
            if message is None:
                return senders
            source = status.Get_source()
            senders.add(source)
            key, value = message.recv()
            self.received[source, key] = value
            while len(self.received) > MOST_KEPT:
                del self.received[next(iter(self.received))]

    def close(self) -> None:
        """Ends what no rank has received."""
        sent, self._sent = self._sent, []
        for request in sent:
            if not request.test()[0]:
                request.Cancel()
                request.Free()


_mailboxes: weakref.WeakKeyDictionary[Any, Mailbox] = weakref.WeakKeyDictionary()


def mailbox_of(communicator: Any) -> Mailbox:
    """The one mailbox of a communicator in this process."""
    if communicator not in _mailboxes:
        _mailboxes[communicator] = Mailbox(communicator)
    return _mailboxes[communicator]
