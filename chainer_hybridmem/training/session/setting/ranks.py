"""The processes that train together on one node, and what they agree about.

Note: [no rank waits for ever]
    Messages go from process to process, never through collective calls, so that one
    that does not come keeps none of them. Each meeting has a name; a rank that has
    another network, another limit or an iteration of its own has other names, and the
    others go on without it after a few seconds.

Note: [one plans]
    Ranks that follow the same plan in lockstep share a link in equal parts, which is
    what the simulator counts on. Measured times differ from rank to rank, so each would
    plan something else: the first rank of a node plans for all.

Note: [in order]
    What the first rank changes comes to the others while they compute, several changes
    at once if one of them is slow. Each has a number and is taken in turn: a change
    that fails, after one that does not, leaves that one in force. What all come to
    change at the end of an iteration has the number of the iteration: a rank that has
    taken it before it asks for it does not wait for another one. And the first rank
    says when it changes nothing more in an iteration: a rank that asks because it has
    not heard yet of another plan gets that one, and one that asks by itself does not
    wait.
"""

from __future__ import annotations

import atexit
import socket
import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError, SessionError

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
        atexit.register(self._empty)

    def _empty(self) -> None:
        """Takes in what nobody asks for: MPI does not end with unread messages.

        MPICH ends all processes then, as if they had failed.
        """
        from mpi4py import MPI

        if not MPI.Is_finalized() and self._comm != MPI.COMM_NULL:
            self.collect()

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


PATIENCE_SECONDS = 10.0  # for a rank that should come to the same meeting
OPENING_SECONDS = 60.0  # for one that should call optimize()
PLANNING_SECONDS = 600.0  # for one that has said that it plans
POLL_SECONDS = 0.0005
HEARD_SECONDS = 0.5  # for an error's words to reach the terminal


class Decision(NamedTuple):
    """What the first rank has decided.

    Attributes:
        value: The decision.
        followed (bool): Whether it comes from another rank.
    """

    value: Any
    followed: bool


class _Changes:
    """What the first rank changes about a topic, made or taken so far.

    Attributes:
        number (int): Of the last change that was made, or taken.
        iteration (int): Iterations that have ended.
        answers (list): What all have come to in this one.
        asked (int): How many of these this rank has asked for.
    """

    def __init__(self) -> None:
        self.number = self.iteration = self.asked = 0
        self.answers: list[Any] = []
        self._newest: Any = None

    def end_iteration(self) -> None:
        """What was asked for before is over."""
        self.iteration += 1
        self.asked = 0
        self.answers.clear()

    def take(self, iteration: int | None, value: Any) -> None:
        """Takes the next one in turn.

        Args:
            iteration: At whose end all come to it; None if only the first rank does.
            value: The change; None if it has failed.
        """
        self.number += 1
        if value is not None:
            self._newest = value
        if iteration == self.iteration:
            self.answers.append(value)

    def take_newest(self) -> Any:
        """The newest change in force, once."""
        newest, self._newest = self._newest, None
        return newest

    def take_answer(self) -> Any:
        """The next of what all have come to; None if it has failed."""
        answer = self.answers[self.asked]
        self.asked += 1
        if answer is self._newest:
            self._newest = None
        return answer


def check_communicator(communicator: Any) -> None:
    """Checks that processes can be asked through it.

    Raises:
        OptionError: If it is no communicator of ChainerMN over MPI.
    """
    needed = ('mpi_comm', 'rank', 'size', 'intra_size')
    if not all(hasattr(communicator, name) for name in needed):
        raise OptionError(
            f'communicator is {communicator!r}; what '
            f'chainermn.create_communicator() returns is needed.'
        )


def open_ranks(communicator: Any, tell: Callable[[str], None]) -> Ranks | None:
    """The ranks on this node; None if there is one.

    Args:
        communicator: Of ChainerMN; None if there is one process.
        tell: Takes a line of progress.

    Raises:
        SessionError: If other ranks do not come.
    """
    if communicator is None or communicator.size == 1:
        return None
    end_all_on_errors()
    ranks = Ranks(communicator, tell)
    return ranks if ranks.count > 1 else None


def end_all_on_errors() -> None:
    """An error that is not caught ends all ranks; else the others wait for ever."""
    from chainermn import global_except_hook as hook

    if hook._orig_except_hook is None:
        hook.add_hook()
    if not isinstance(hook._orig_except_hook, _HeardFirst):
        hook._orig_except_hook = _HeardFirst(hook._orig_except_hook)


class _HeardFirst:
    """An exception hook that lets the text reach the terminal.

    ``MPI_Abort()`` comes next, and ``mpiexec`` may end with words still in its pipes.

    Args:
        hook (callable): Prints the error.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *error: Any) -> None:
        self._hook(*error)
        sys.stderr.flush()
        timing.sleep(HEARD_SECONDS)


class Ranks:
    """The ranks of one node; made by all of them at once.

    Args:
        communicator: Of ChainerMN.
        tell (callable): Takes a line of progress.

    Attributes:
        node (tuple of int): The ranks on this node, ascending, this one among them.

    Raises:
        SessionError: If some do not come within :data:`OPENING_SECONDS`.
    """

    def __init__(self, communicator: Any, tell: Callable[[str], None]) -> None:
        self._mail = mailbox_of(communicator)
        self._session = self._mail.open_session()
        self._tell = tell
        self.rank: int = communicator.rank
        self._others = [r for r in range(communicator.size) if r != self.rank]
        self._meetings: dict[Topic, int] = {}  # how often each has been held
        self._changes: dict[Topic, _Changes] = {}
        self._absent: set[int] = set()  # have not come to a meeting
        self.node: tuple[int, ...] = self._find_node()
        self._peers = [r for r in self.node if r != self.rank]

    def _find_node(self) -> tuple[int, ...]:
        name = socket.gethostname()
        key = self._name_meeting(Topic('node'))
        self._mail.send(self._others, key, name)
        missing = self._wait(self._others, (key,), OPENING_SECONDS)
        if missing:
            count = len(self._others) + 1
            raise SessionError(
                f'Ranks {_list(missing)} of {count} have not called optimize() with '
                f'this communicator within {OPENING_SECONDS:.0f} s; every rank has to.'
            )
        near = [r for r in self._others if self._take(r, key) == name]
        return tuple(sorted([*near, self.rank]))

    @property
    def count(self) -> int:
        """How many share this node's link."""
        return len(self.node)

    @property
    def plans(self) -> bool:
        """Whether this one plans for the node."""
        return self.rank == self.node[0]

    # -- meetings -------------------------------------------------------------
    def meet(self, topic: Topic) -> bool:
        """Waits until all ranks of the node are here; whether they are.

        Args:
            topic: What they meet for; the k-th time, all meet for the k-th time.
        """
        return self.exchange(topic, None) is not None

    def exchange(self, topic: Topic, value: Any) -> list[Any] | None:
        """What each of the others brings to a meeting; None if some are not there.

        Args:
            topic: As for :meth:`meet`.
            value: What this one brings.
        """
        key = self._name_meeting(topic)
        self._mail.send(self._peers, key, value)
        missing = self._wait(self._peers, (key,), self._patience(self._peers))
        late = key._replace(what='gone')
        gone = [r for r in self._peers if (r, late) in self._mail.received]
        if missing or gone:
            self._mail.send(self._peers, late, None)
        if missing:
            self._leave_out(missing, topic)
        values = [self._take(r, key) for r in self._peers if r not in missing]
        return None if missing or gone else values

    def decide(self, topic: Topic, decide: Callable[[], Any]) -> Decision:
        """What the first rank of the node decides; this one's own if it does not come.

        Args:
            topic: What is to be decided, as for :meth:`meet`.
            decide: Decides, where this is the first rank or that one does not come;
                None is no decision.
        """
        key = self._name_meeting(topic)
        begins, ends = key._replace(what='begins'), key._replace(what='ends')
        if self.plans:
            return Decision(self._hand_out(begins, ends, decide), False)
        first = [self.node[0]]
        if self._wait(first, (begins,), self._patience(first), ends_early=True):
            self._leave_out(first, topic)
            return Decision(decide(), False)
        if not self._wait(first, (ends,), PLANNING_SECONDS):
            value = self._take(first[0], ends)
            if value is not None:
                return Decision(value, True)
        return Decision(decide(), False)

    def _hand_out(
        self,
        begins: Key,
        ends: Key,
        decide: Callable[[], Any],
        iteration: int | None = None,
    ) -> Any:
        """Decides for the others, who wait as soon as they hear that it begins."""
        value = None
        self._mail.send(self._peers, begins, iteration)
        try:
            value = decide()
        finally:
            self._mail.send(self._peers, ends, value)  # None: it has failed
        return value

    # -- what the first rank changes: [in order] ----------------------------------
    def change(self, topic: Topic, decide: Callable[[], Any]) -> Any:
        """What the first rank changes to, for which others may wait or not.

        Args:
            topic: What is changed.
            decide: Decides.
        """
        return self._change(topic, decide, self._changes_of(topic).iteration)

    def announce(self, topic: Topic, value: Any) -> None:
        """What the first rank has changed to, for which nobody waits."""
        self._change(topic, lambda: value, None)

    def _change(
        self, topic: Topic, decide: Callable[[], Any], iteration: int | None
    ) -> Any:
        changes = self._changes_of(topic)
        changes.number += 1
        key = self._name(topic, 'changed', changes.number)
        return self._hand_out(key._replace(what='begins'), key, decide, iteration)

    def end_iteration(self, topic: Topic) -> Any:
        """An iteration has ended in all ranks; what the first one has changed to.

        Args:
            topic: What may have been changed.

        Returns:
            The newest change that this rank has not heard of so far; None if none.
        """
        self._changes_of(topic).end_iteration()
        return self._take_newest(topic)

    def forget_changes(self, topic: Topic) -> None:
        """What has been changed so far is out of date."""
        self._take_newest(topic)

    def await_change(self, topic: Topic) -> Any:
        """What the first rank changes to at this point, which all come to.

        Args:
            topic: What that one changes as well.

        Returns:
            The change, or the newest one if that rank does not come to this point with
            what it follows now; None if it has failed, or if there is none.
        """
        first, changes = [self.node[0]], self._changes_of(topic)
        closed = self._name(topic, 'closed')
        while changes.asked == len(changes.answers):
            key = self._name(topic, 'changed', changes.number + 1)
            begins = key._replace(what='begins')
            if self._wait(first, (begins, closed), self._patience(first)):
                self._leave_out(first, topic)
                return None
            received = self._mail.received
            if (first[0], begins) not in received:
                if received[first[0], closed] >= changes.iteration:
                    return changes.take_newest()
                del received[first[0], closed]  # of an earlier one
                continue
            if self._wait(first, (key,), PLANNING_SECONDS):
                return None
            self._take_change(topic, changes)
        return changes.take_answer()

    def close_iteration(self, topic: Topic) -> None:
        """The first rank changes nothing more in this iteration."""
        iteration = self._changes_of(topic).iteration
        self._mail.send(self._peers, self._name(topic, 'closed'), iteration)

    def _take_newest(self, topic: Topic) -> Any:
        self._absent -= self._mail.collect()
        changes = self._changes_of(topic)
        while self._has_come(topic, changes):
            self._take_change(topic, changes)
        return changes.take_newest()

    def _changes_of(self, topic: Topic) -> _Changes:
        return self._changes.setdefault(topic, _Changes())

    def _has_come(self, topic: Topic, changes: _Changes) -> bool:
        key = self._name(topic, 'changed', changes.number + 1)
        return (self.node[0], key) in self._mail.received

    def _take_change(self, topic: Topic, changes: _Changes) -> None:
        first, key = self.node[0], self._name(topic, 'changed', changes.number + 1)
        iteration = self._mail.received.pop((first, key._replace(what='begins')), None)
        changes.take(iteration, self._take(first, key))

    def _patience(self, ranks: list[int]) -> float:
        """No second wait for those that have not come before."""
        return 0.0 if self._absent.issuperset(ranks) else PATIENCE_SECONDS

    def _leave_out(self, missing: list[int], topic: Topic) -> None:
        new = [r for r in missing if r not in self._absent]
        self._absent.update(missing)
        if new:
            self._tell(
                f'rank {self.rank} goes on alone ({topic.kind}): rank {_list(new)} has '
                f'another iteration, limit or network, or does not come'
            )

    def _name_meeting(self, topic: Topic) -> Key:
        number = self._meetings[topic] = self._meetings.get(topic, 0) + 1
        return self._name(topic, 'here', number)

    def _name(self, topic: Topic, what: str, number: int = 0) -> Key:
        return Key(self._session, topic, number, what)

    # -- messages -------------------------------------------------------------
    def _wait(
        self,
        ranks: list[int],
        keys: tuple[Key, ...],
        seconds: float,
        ends_early: bool = False,
    ) -> list[int]:
        """Waits for a message of each; returns those that have not sent any.

        Args:
            ranks: Who is waited for.
            keys: Of the message; any of them does.
            seconds: For how long.
            ends_early: Whether a rank need not be waited for that has begun something
                else on this topic.
        """
        deadline = timing.now() + seconds
        while True:
            self._absent -= self._mail.collect()
            received = self._mail.received
            missing = [
                r for r in ranks if not any((r, key) in received for key in keys)
            ]
            if not missing or timing.now() >= deadline:
                return missing
            if ends_early and all(self._is_elsewhere(r, keys[0]) for r in missing):
                return missing
            timing.sleep(POLL_SECONDS)

    def _is_elsewhere(self, rank: int, key: Key) -> bool:
        """Whether a rank has begun something else on the topic; forgets that."""
        others = [
            (source, other)
            for source, other in self._mail.received
            if source == rank and other != key and other.is_like(key)
        ]
        for item in others:
            del self._mail.received[item]
        return bool(others)

    def _take(self, rank: int, key: Key) -> Any:
        return self._mail.received.pop((rank, key))

    def close(self) -> None:
        """The session has ended."""
        self._mail.close()


def _list(ranks: list[int]) -> str:
    return ', '.join(map(str, ranks))
