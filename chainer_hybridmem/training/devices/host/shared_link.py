"""A throttled link that several processes of one machine share.

Note: [fair shares]
    Copies that run at once in one direction get equal shares of the bandwidth at every
    moment. The link counts, for each direction, the bytes that it has carried for
    every copy that ran all the time. A copy of ``n`` bytes that enters at a count of
    ``c`` ends at ``c + n``: others that come or go change when that is, not what it is.
    So a copy enters once, and wakes only when it may have ended.

Note: [locks]
    The counts lie in a file that all processes map. Its first byte is locked to change
    them, and each user holds the lock of a byte of its own. The system drops the locks
    of a process that ends, however it ends: others then take what it was copying off
    the link. Such locks belong to a process, not to a thread: all devices of a process
    share one open file, which is closed last, and take turns with ``_turn``. A forked
    child has none of them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import gc
import glob
import mmap
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Iterator

from chainer_hybridmem import timing
from chainer_hybridmem.errors import OptionError

MOST_USERS = 256  # devices at a time
LATE_SECONDS = 0.01  # an idle link may make up for so much of a late wake-up
_SHARED_FOLDER = '/dev/shm'
_NAME = re.compile(r'[A-Za-z0-9_.-]{1,64}')

# Numbers of the file, each a double.
_BANDWIDTH = 0
_USERS = 1  # places that have ever been taken
_CARRIED = 2, 4  # to the store, from the store; see Note: [fair shares]
_CLOCK = 3, 5  # up to when that is counted; if no copy runs, when the last one ended
_ENDS = 6, 6 + MOST_USERS  # first count of each direction at which a user's copy ends
_FILE_BYTES = 8 * (6 + 2 * MOST_USERS)

_LONGEST_PAUSE_SECONDS = 0.2  # so late a copy may notice that another process has died
_SHORTEST_PAUSE_SECONDS = 5e-4  # of a copy that others have delayed

_turn = threading.Lock()
_files: dict[str, _LinkFile] = {}


class _LinkFile:
    """The file of one link, open in this process.

    Attributes:
        numbers (memoryview): What the file holds.
        own (set of int): Places of this process.
        lost (list of int): Those of links that are gone and were not closed.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = _open_locked(path)
        try:
            os.ftruncate(self._fd, _FILE_BYTES)
            self._memory = mmap.mmap(self._fd, _FILE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self.numbers = memoryview(self._memory).cast('d')
        self.own: set[int] = set()
        self.lost: list[int] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other thread or process changes a number meanwhile."""
        with _turn:
            self.lock()
            try:
                yield
            finally:
                self.unlock()

    def lock(self) -> None:
        """Waits until no other process changes numbers."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)

    def unlock(self) -> None:
        """Lets other processes change numbers."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)

    def uses(self, place: int) -> bool:
        """Whether the user of a place lives; frees the place otherwise."""
        if place in self.own:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + place)
        except (BlockingIOError, PermissionError):
            return True
        self.give_place(place)
        return False

    def in_use(self) -> list[int]:
        """Places of users that live."""
        return list(filter(self.uses, range(int(self.numbers[_USERS]))))

    def take_place(self, name: str, bandwidth: float) -> int:
        """A free place; the first user sets the bandwidth.

        Raises:
            OptionError: If the link has another bandwidth, or no place.
        """
        used = self.in_use()
        if not used:
            self.numbers[:] = memoryview(bytes(_FILE_BYTES)).cast('d')
            self.numbers[_BANDWIDTH] = bandwidth
        elif self.numbers[_BANDWIDTH] != bandwidth:
            raise OptionError(
                f'link_bandwidth is {bandwidth:g} bytes per second, but the shared '
                f'link {name!r} has {self.numbers[_BANDWIDTH]:g}; give all processes '
                f'the same link_bandwidth, or this one another shared_link.'
            )
        place = next(p for p in range(MOST_USERS + 1) if p not in used)
        if place == MOST_USERS:
            raise OptionError(
                f'the shared link {name!r} has {MOST_USERS} users, and no room for '
                f'more; give this process another shared_link.'
            )
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + place)
        self.numbers[_USERS] = max(self.numbers[_USERS], place + 1)
        self.own.add(place)
        return place

    def give_place(self, place: int) -> None:
        """Frees a place of this process, or of one that has died."""
        self.own.discard(place)
        for first in _ENDS:
            self.numbers[first + place] = 0.0
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 1 + place)

    def remove_unused(self) -> None:
        """Removes the file unless a user lives."""
        if not self.in_use():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def close(self) -> None:
        """Ends all locks of this process."""
        self.numbers.release()
        self._memory.close()
        os.close(self._fd)


class Lane:
    """One direction of a shared link, for one device.

    Args:
        file: Of the link.
        place: Of the device.
        outward: Whether it leads to the store.
    """

    def __init__(self, file: _LinkFile, place: int, outward: bool) -> None:
        direction = 0 if outward else 1
        self._file = file
        self._carried = _CARRIED[direction]
        self._clock = _CLOCK[direction]
        self._first = _ENDS[direction]
        self._place = place
        self._end = 0.0

    def enter(self, nbytes: int, begin: float) -> float:
        """Begins a copy; the former one has ended.

        Args:
            nbytes: Its size.
            begin: When it could have begun, in seconds of ``perf_counter``. If the link
                has been idle since, it has begun then, or ``LATE_SECONDS`` ago.

        Returns:
            float: When it has begun.
        """
        numbers = self._file.numbers
        with self._file.locked():
            now = began = timing.now()
            if not self._advance(now):
                earliest = min(max(begin, now - LATE_SECONDS), now)
                began = numbers[self._clock] = max(numbers[self._clock], earliest)
            self._end = numbers[self._carried] + nbytes
            numbers[self._first + self._place] = self._end
        return began

    def wait(self, left_bytes: int) -> float:
        """Sleeps until the link has carried the copy but for some bytes.

        Args:
            left_bytes: That are still to come.

        Returns:
            float: When that was, in seconds of ``perf_counter``, or later.
        """
        end = self._end - left_bytes
        shortest = 0.0
        while True:
            with self._file.locked():
                ends = self._advance(timing.now())
                if end - self._file.numbers[self._carried] < 1:
                    return self._file.numbers[self._clock]
                seconds = self._seconds_until(end, ends)
            timing.sleep(min(max(seconds, shortest), _LONGEST_PAUSE_SECONDS))
            shortest = _SHORTEST_PAUSE_SECONDS

    def leave(self) -> None:
        """Takes a copy that has failed off the link."""
        with self._file.locked():
            self._advance(timing.now())
            self._file.numbers[self._first + self._place] = 0.0

    def _advance(self, now: float) -> list[float]:
        """Counts what the link has carried; returns where running copies end."""
        numbers = self._file.numbers
        bandwidth = numbers[_BANDWIDTH]
        carried, clock = numbers[self._carried], numbers[self._clock]
        ends = self._running(carried)
        while ends:
            seconds = (ends[0] - carried) * len(ends) / bandwidth
            if clock + seconds > now:
                carried += max(0.0, now - clock) * bandwidth / len(ends)
                clock = max(clock, now)
                break
            carried = ends.pop(0)
            clock += seconds
        numbers[self._carried], numbers[self._clock] = carried, clock
        return ends

    def _running(self, carried: float) -> list[float]:
        """Where the copies of living users end, the next one first."""
        first = self._first
        ends = self._file.numbers[first : first + int(self._file.numbers[_USERS])]
        return sorted(
            end
            for place, end in enumerate(ends)
            if end > carried and self._file.uses(place)
        )

    def _seconds_until(self, end: float, ends: list[float]) -> float:
        """Seconds until a count is reached if no other copy begins."""
        carried = self._file.numbers[self._carried]
        seconds = 0.0
        for k, reached in enumerate(ends):
            step = min(reached, end) - carried
            seconds += step * (len(ends) - k) / self._file.numbers[_BANDWIDTH]
            carried += step
            if reached >= end:
                break
        return seconds


class SharedLink:
    """A device's place on a link that it shares.

    Args:
        name: Devices that give the same name share one throttle, in all processes of
            this user on this machine.
        bandwidth: Bytes per second and direction, the same for all of them.

    Attributes:
        name (str): As given.
        outward (Lane): To the store.
        inward (Lane): From the store.

    Raises:
        OptionError: If the name or the bandwidth cannot be used.
    """

    def __init__(self, name: str, bandwidth: float) -> None:
        self.name = name
        self._path = _path_of(check_name(name))
        taken = None
        with contextlib.suppress(OptionError):
            taken = self._take_place(bandwidth)
        if taken is None:
            gc.collect()  # sessions that were never entered are in cycles
            taken = self._take_place(bandwidth)
        self._file, self._place = file, place = taken
        # The garbage collector runs anywhere: it must not wait for a lock.
        self._lost = weakref.finalize(self, file.lost.append, place)
        self.outward = Lane(file, place, outward=True)
        self.inward = Lane(file, place, outward=False)

    def _take_place(self, bandwidth: float) -> tuple[_LinkFile, int]:
        try:
            with _visit(self._path) as file:
                return file, file.take_place(self.name, bandwidth)
        except OSError as error:
            raise OptionError(
                f'the file {self._path} of shared_link {self.name!r} cannot be used '
                f'({error.strerror}); give another name.'
            ) from error

    def close(self) -> None:
        """Frees the place, once no copy runs; the last user removes the file."""
        if _files.get(self._path) is not self._file:  # closed, or of the parent process
            return
        if self._lost.detach() is not None:
            with _visit(self._path) as file:
                file.give_place(self._place)


@contextlib.contextmanager
def _visit(path: str) -> Iterator[_LinkFile]:
    """A file, locked; it stays open as long as this process has a place on it."""
    with _turn:
        if path not in _files:
            _files[path] = _LinkFile(path)
            _remove_abandoned()
        else:
            _files[path].lock()
        file = _files[path]
        try:
            while file.lost:
                file.give_place(file.lost.pop())
            yield file
        finally:
            if file.own:
                file.unlock()
            else:
                del _files[path]
                file.remove_unused()
                file.close()


def _remove_abandoned() -> None:
    """Removes the files of processes that were killed."""
    for path in glob.glob(_path_of('*')):
        if path in _files:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:  # the lock of all bytes: there is no user, and none may come meanwhile
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


def check_name(name: object) -> str:
    """The name of a link, if it can be one.

    Raises:
        OptionError: If it is none.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f'shared_link is {name!r}; a name of 1 to 64 letters, digits, points, '
            f"underscores and hyphens is needed, such as 'bus0'."
        )
    return name


def _path_of(name: str) -> str:
    """Where all processes of this user find a link; ``*`` stands for any name."""
    writable = os.access(_SHARED_FOLDER, os.W_OK)
    folder = _SHARED_FOLDER if writable else tempfile.gettempdir()
    return os.path.join(folder, f'chainer_hybridmem-{os.geteuid()}-{name}')


def _open_locked(path: str) -> int:
    """Opens a file that only this user can open, and locks its first byte.

    Raises:
        OSError: If that is not possible.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, 'it belongs to another user')
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == status.st_ino:
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its last user has removed it meanwhile


def _forget_parent() -> None:
    """A forked child has no place; see Note: [locks]."""
    global _turn
    _turn = threading.Lock()
    _files.clear()


def _leave_all() -> None:
    """At exit: devices that were not closed leave no file."""
    with _turn:
        for file in _files.values():
            file.lock()
            for place in list(file.own):
                file.give_place(place)
            file.remove_unused()
            file.unlock()
        _files.clear()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget_parent)
