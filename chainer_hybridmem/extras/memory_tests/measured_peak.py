"""What a test compares with a size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chainer_hybridmem.errors import OptionError
from chainer_hybridmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from chainer_hybridmem.planning.records.peak import Peak
    from chainer_hybridmem.training.recording.peak_meter import PeakMeter


class MeasuredPeak:
    """The highest load of a test so far; compares with sizes as a number of bytes does.

    >>> assert hybridmem_peak < '600MiB'

    Args:
        meter: Measures now.
    """

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __init__(self, meter: PeakMeter) -> None:
        self._meter = meter

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.peak().nbytes

    def peak(self) -> Peak:
        """With what it is made of."""
        return self._meter.peak()

    def __int__(self) -> int:
        return self.nbytes

    def __str__(self) -> str:
        return describe_bytes(self.nbytes)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str | int | float | MeasuredPeak):
            return NotImplemented
        return self.nbytes == _bytes_of(other)

    # pytest shows the line of the test, not these.
    def __lt__(self, other: str | float | MeasuredPeak) -> bool:
        __tracebackhide__ = True
        return self.nbytes < _bytes_of(other)

    def __le__(self, other: str | float | MeasuredPeak) -> bool:
        __tracebackhide__ = True
        return self.nbytes <= _bytes_of(other)

    def __gt__(self, other: str | float | MeasuredPeak) -> bool:
        __tracebackhide__ = True
        return self.nbytes > _bytes_of(other)

    def __ge__(self, other: str | float | MeasuredPeak) -> bool:
        __tracebackhide__ = True
        return self.nbytes >= _bytes_of(other)


def describe_bytes(nbytes: int) -> str:
    """For people, and exactly: ``'1.5 MiB (1,572,864 bytes)'``."""
    return f'{format_bytes(nbytes)} ({nbytes:,} bytes)'


def _bytes_of(other: str | float | MeasuredPeak) -> int:
    __tracebackhide__ = True
    if isinstance(other, MeasuredPeak):
        return other.nbytes
    try:
        return parse_bytes(other, 'the size that the peak is compared with', least=0)
    except OptionError as error:
        why = str(error)
    raise OptionError(why)
