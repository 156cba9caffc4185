"""Schedules: a factor as a function of `progress`, the share in [0, 1] of the planned budget spent before this step.

Progress past 1 (an extended run) stays at the end value: a cosine must not rise again. Left out: anything that counts
steps, because steps of one run differ in cost and a resumed run must not restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[float, float, float], float]


def constant(progress: float, start: float = 1.0, end: float = 0.0) -> float:
    """`start` throughout; `end` is ignored."""
    return start


def linear(progress: float, start: float = 1.0, end: float = 0.0) -> float:
    """Straight from `start` at progress 0 to `end` at 1."""
    p = _clamp(progress)
    return (1.0 - p) * start + p * end


def cosine(progress: float, start: float = 1.0, end: float = 0.0) -> float:
    """Half a cosine from `start` at progress 0 to `end` at 1, flat at both. Source: Loshchilov, arXiv 1608.03983, eq. 5."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _clamp(progress)))


def warmup(progress: float, share: float, floor: float = 0.1) -> float:
    """A factor that rises straight from `floor` to 1 over the first `share` of the budget; multiply with a schedule.

    The floor is not 0, because progress is 0 at the first step and a step of size 0 would be paid for and lost.
    """
    if share <= 0.0:
        return 1.0
    return floor + (1.0 - floor) * min(1.0, _clamp(progress) / share)


def scheduled(
    name: str, progress: float, start: float = 1.0, end: float = 0.0, warmup_share: float = 0.0, floor: float = 0.1
) -> float:
    """The named schedule at `progress`, times its warm-up. The decay runs over the whole budget, warm-up included.

    Raises ValueError if the name is not one of `SCHEDULES`.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} does not exist: the schedules are {', '.join(SCHEDULES)}")
    return SCHEDULES[name](progress, start, end) * warmup(progress, warmup_share, floor)


def _clamp(progress: float) -> float:
    if math.isnan(progress):
        raise ValueError("progress is NaN: the planned budget must be a positive number")
    return min(1.0, max(0.0, progress))


SCHEDULES: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}
