"""Types only: an offset for every buffer of an iteration."""

from __future__ import annotations

import dataclasses

from chainer_hybridmem.errors import OptionError

CUDA_ALIGNMENT, HOST_ALIGNMENT = 512, 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every buffer of a trace lies.

    Attributes:
        offsets (tuple of int): First byte of each buffer.
        footprint_bytes (int): End of the highest buffer.
        bound_bytes (int): No layout is smaller: the peak load, every size rounded
            up to the alignment.
        peak_load_bytes (int): Highest load of the trace, nothing rounded.
        alignment (int): Every offset is a multiple of it.
        found_by (str): The order and fit, or the search, that found it.
    """

    offsets: tuple[int, ...]
    footprint_bytes: int
    bound_bytes: int
    peak_load_bytes: int
    alignment: int
    found_by: str

    @property
    def optimal(self) -> bool:
        """Whether the footprint is proven to be the smallest possible."""
        return self.footprint_bytes == self.bound_bytes

    @property
    def competitive_ratio(self) -> float:
        """Footprint over peak load."""
        if not self.peak_load_bytes:
            return 1.0
        return self.footprint_bytes / self.peak_load_bytes

    @property
    def gap(self) -> float:
        """Footprint over the proven bound, minus 1."""
        return self.footprint_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


def check_alignment(alignment: int) -> None:
    """Refuses an alignment that is not a power of two up to 1 GiB.

    Raises:
        OptionError: With the value.
    """
    if not (1 <= alignment <= 2**30 and alignment & (alignment - 1) == 0):
        raise OptionError(
            f'alignment is {alignment}; it must be a power of two, such as 512.'
        )
