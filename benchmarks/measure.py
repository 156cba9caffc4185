"""What both sides measure alike."""

from __future__ import annotations

import statistics
import time

import torch

SIDE = 1024  # of the square matrices: large enough for the full rate


def matrix_rate(repeats: int = 7) -> float:
    """Floating-point operations a second of a large fp32 product on one thread, median of `repeats`."""
    a, b = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / statistics.median(seconds)
