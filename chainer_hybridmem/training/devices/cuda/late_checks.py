"""Compares GPU memory with what it held before, without waiting for the GPU.

Note: [late checks]
    A digest is one kernel, each of whose blocks writes a word into pinned memory; their
    sum is the digest (:mod:`.cuda_bits`, [digests]). The host reads the words when the
    GPU has passed the end of the iteration, as a rule while the next one is issued.
    So a difference is told late, but it is told, and no GPU memory is taken for it.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from chainer_hybridmem.training.devices import cuda_bits
from chainer_hybridmem.training.devices.values import Array

CHUNK_WORDS = 1 << 16
_WORD_BYTES = 8


class Digest:
    """Words in pinned memory that a kernel writes; their sum, modulo 2^64, counts.

    Args:
        words: (n,) uint64, which later iterations write, too.
    """

    __slots__ = ('__weakref__', '_value', '_words')

    def __init__(self, words: Any) -> None:
        self._words = words
        self._value: int | None = None

    def value(self) -> int:
        """The digest, once the kernel has run."""
        if self._value is None:
            return int(self._words.sum(dtype='u8'))
        return self._value

    def settle(self) -> None:
        """The kernel has run, and others get the words: a map may outlive them."""
        self._value = self.value()


class _Chunk:
    """Pinned memory of which words are handed out one after the other."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory  # keeps it
        self.address = memory.ptr
        fields = ctypes.c_uint64 * CHUNK_WORDS
        self.words = np.frombuffer(memoryview(fields.from_address(memory.ptr)), 'u8')
        self.taken = 0


class _Batch:
    """The checks of one iteration.

    Attributes:
        chunks (list of _Chunk): Where their words are.
        digests (list): Weak references to those that have been issued.
        pairs (list): Two digests that must be equal, and of what.
        end (cupy.cuda.Event or None): Behind the last kernel, once it is issued.
        iteration (int): Its number.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.chunks: list[_Chunk] = []
        self.digests: list[weakref.ref[Digest]] = []
        self.pairs: list[tuple[Digest, Digest, str]] = []
        self.end: Any = None


class LateChecks:
    """Checks whose results come when the GPU has got so far.

    Args:
        cuda: The module ``cupy.cuda``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free: list[_Chunk] = []
        self._batch = _Batch()
        self._ended: list[_Batch] = []

    def digest(self, array: Array) -> Digest | None:
        """Issues the digest of an array.

        Returns:
            None where there is none: the array has gaps, or no memory can be pinned.
        """
        array = cuda_bits.in_order(array)
        if not array.flags.c_contiguous or not array.nbytes:
            return None
        count = cuda_bits.count_blocks(array.nbytes)
        chunk = self._chunk(count)
        if chunk is None:
            return None
        first, chunk.taken = chunk.taken, chunk.taken + count
        cuda_bits.write_digest(array, chunk.address + _WORD_BYTES * first, count)
        digest = Digest(chunk.words[first : first + count])
        self._batch.digests.append(weakref.ref(digest))
        return digest

    def expect_same(self, before: Digest, after: Digest, what: str) -> None:
        """See :meth:`.Checks.expect_same`."""
        self._batch.pairs.append((before, after, what))

    def end_iteration(self, iteration: int) -> None:
        """What has been issued is that of one iteration, with this number."""
        batch = self._batch
        if not batch.chunks:
            return
        batch.iteration = iteration
        batch.end = self._cuda.Event(disable_timing=True)
        batch.end.record()
        self._ended.append(batch)
        self._batch = _Batch()

    def differences(self, wait: bool = False) -> list[tuple[int, str]]:
        """What was not the same, of iterations that the GPU has finished.

        Args:
            wait: Whether to wait for the others.

        Returns:
            list of (int, str): Iterations, and what was given with the digests.
        """
        found: list[tuple[int, str]] = []
        while self._ended and (wait or self._ended[0].end.done):
            batch = self._ended.pop(0)
            if wait:
                batch.end.synchronize()
            found += [
                (batch.iteration, what)
                for before, after, what in batch.pairs
                if before.value() != after.value()
            ]
            for reference in batch.digests:
                digest = reference()
                if digest is not None:
                    digest.settle()
            for chunk in batch.chunks:
                chunk.taken = 0
            self._free += batch.chunks
        return found

    def _chunk(self, count: int) -> _Chunk | None:
        chunks = self._batch.chunks
        if not chunks or chunks[-1].taken + count > CHUNK_WORDS:
            chunk = self._free.pop() if self._free else self._new_chunk()
            if chunk is None:
                return None
            chunks.append(chunk)
        return chunks[-1]

    def _new_chunk(self) -> _Chunk | None:
        try:
            return _Chunk(self._cuda.PinnedMemory(_WORD_BYTES * CHUNK_WORDS))
        except self._cuda.runtime.CUDARuntimeError:
            return None
