"""Task advantage normalisation: advantages of each environment of a mixture brought to one scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from assay.advantages import STD_FLOOR, Array, all_equal, whiten
from assay.protocols import Method, Metrics, Setting
from assay.rows import Batch, Row


class TaskNorm(Method):
    """In a run over several environments, advantages get mean 0 and variance 1 over the sampled tokens of each.

    Environments of one mixture differ in how far apart their rewards are and in how long their episodes are, so that one
    of them can own most of the gradient. After the host has set the advantages, those of each environment are centred
    and divided by their spread over its tokens of the batch.

    centre: subtract the mean too; false leaves 0 at 0, so that groups of equal rewards stay without gradient (ours: true).
    """

    name = "task-norm"
    paper = "arXiv 2510.04206, AgentRL: Scaling Agentic Reinforcement Learning with a Multi-Turn, Multi-Task Framework"
    fidelity = "inferred"

    def __init__(self, centre: bool = True) -> None:
        self.centre = centre
        self.several = True

    def bind(self, setting: Setting) -> Sequence[str]:
        self.several = len(setting.worlds) > 1
        return () if self.several else ["one environment: its advantages are whitened over the whole batch"]

    def modulate(self, batch: Batch, rows: Sequence[Row]) -> Metrics:
        """Rewrites column "advantage"."""
        metrics: Metrics = {}
        for name in sorted({row.trace.task.environment for row in rows}):
            own = [row for row in rows if row.trace.task.environment == name]
            before = [row.columns["advantage"].astype(np.float64) for row in own]
            for row, values in zip(own, task_norm(before, self.centre), strict=True):
                row.columns["advantage"] = values.astype(np.float32)
            suffix, every = f"[{name}]" if self.several else "", np.concatenate(before)
            metrics[f"task_norm_mean{suffix}"] = float(np.nanmean(every))
            metrics[f"task_norm_std{suffix}"] = float(np.nanstd(every))
        return metrics


def task_norm(advantages: Sequence[ArrayLike], centre: bool = True) -> list[Array]:
    """`(A - mean) / std` over the sampled tokens of one environment in a batch, one [N_i] per row.

    Source: named in AgentRL, arXiv 2510.04206; the formula is the usual whitening, not read there.

    Args:
      advantages: one [N_i] per row; NaN is left out.
      centre: False divides by the std only.

    Returns:
      One [N_i] per row. Where all are equal: exactly 0, or what they were if not centred.
    """
    arrays = [np.asarray(values, np.float64) for values in advantages]
    if centre:
        return whiten(arrays)
    every = np.concatenate(arrays) if arrays else np.zeros(0)
    if all_equal(every):
        return arrays
    known = every[~np.isnan(every)]
    return [array / max(float(np.std(known, ddof=1)), STD_FLOOR) for array in arrays]
