"""The largest number that still fits."""

from __future__ import annotations

from collections.abc import Callable


def largest_batchsize(
    needed_bytes: Callable[[int], int], limit_bytes: int, most: int
) -> int:
    """Largest batch size that fits; 0 if not even one does.

    What is needed grows almost in proportion to the batch: interpolation finds the
    answer in a few steps, and falls back to bisection where it does not.

    Args:
        needed_bytes: Bytes that a batch size needs; never less for a larger one.
        limit_bytes: Most bytes there are.
        most: Not looked beyond.
    """
    need = needed_bytes(1)
    if need > limit_bytes:
        return 0
    low, low_need = 1, need
    high, high_need = most + 1, 0  # 0: not known yet
    guess, steps = 2, 0
    while high - low > 1:
        middle = min(max(guess, low + 1), high - 1)
        need = needed_bytes(middle)
        if need <= limit_bytes:
            low, low_need = middle, need
        else:
            high, high_need = middle, need
        steps += 1
        if high_need == 0:
            guess = max(2 * low, low * limit_bytes // max(1, low_need))
        elif steps % 4 == 3:
            guess = (low + high) // 2
        else:
            slope = (high_need - low_need) / (high - low)
            guess = low + round((limit_bytes - low_need) / slope)
    return low


def largest_planned(planned: Callable[[int], bool], most: int) -> int:
    """Largest batch size up to ``most`` for which a plan is found, by bisection.

    Args:
        planned: Whether a plan is found; if one is, so it is for smaller ones.
        most: Tried first.
    """
    if most < 1 or planned(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if planned(middle):
            low = middle
        else:
            high = middle
    return low
