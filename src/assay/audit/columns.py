"""What an audit looks at: samples as optional columns. Readers (readers/) only fill them, checks (checks.py) only read them.

A sample is what one training row was made of: a whole episode, or one turn where a framework trains turns apart. Nothing
is required but `where`; a check runs where its columns are there, and says that it did not run where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """N rows of unequal length, flat: row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: NDArray[Any]  # [M]
    offsets: NDArray[np.int64]  # [N + 1], offsets[0] == 0

    @classmethod
    def of(cls, rows: Iterable[ArrayLike], dtype: Any) -> Ragged:
        """From rows; a row that was not there is empty."""
        arrays = [np.asarray(row, dtype).ravel() for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, dtype), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def row(self, i: int) -> NDArray[Any]:
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def row_of(self) -> NDArray[np.int64]:
        """[M]: the row of each value."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(slots=True, eq=False)
class Rollouts:
    """N samples of one file or run. Absent columns are not known; NaN, "" and -1 inside one are "not known" for a sample.

    `tokens` hold one number per token of the sample's whole sequence, prompt included (a reader spreads a column that a
    framework keeps for the response only), in the order of `ids`:
        ids               int32, padding taken off if the format says what padding is, and then counted in `padded`
        mask              bool, the loss mask: is the token trained on
        sampled           bool, did the policy sample it (from provenance, roles or spans, never from `mask`)
        attention         bool, False on padding, where padding could not be taken off
        logprobs          float32, the sampler's; NaN where there is none
        trainer_logprobs  float32, of the same tokens by the trainer before its first update ("old log-probs")
        advantages        float32
        weights           float32, what the token's loss is multiplied by, denominator included
    `samples` hold one value per sample, as arrays of N:
        reward, score     float; NaN is not known (`score`: the shaped one)
        group             str or int: which samples were compared with one another
        task              str: which task instance; `split`: "train", "iid", "ood", "eval", ...
        rollout           str: which episode; several samples of one episode are its turns (or its forks)
        turn              int: order of the samples of one rollout; -1: the whole episode
        outcome           str: a value of trace.Outcome where known
        stop              str: why generation ended ("stop", "length", ...)
        error             str: what an environment, tool or engine error said; "" for none
        version           int: of the weights that sampled it
        padded            int: padding tokens that were taken off
    `texts` hold one string (or None) per sample: "prompt", "completion", "gold" (further gold strings are joined by "\\n"),
    and "messages" as a list of {"role", "content"}.
    `declared` is what the file, the format or the user said of all samples: estimator ("grpo", "dr-grpo", "rloo", ...),
    temperature, top_p, top_k, rollouts_per_task, layout, denominator, vocabulary, end_ids, pad_id, whatever was said.
    """

    source: str  # file or folder, for messages
    format: str
    where: Sequence[str]  # [N] how a person finds the sample: "line 12", "row 3", "step 4, task 2, rollout 1"
    tokens: dict[str, Ragged] = field(default_factory=dict)
    samples: dict[str, NDArray[Any]] = field(default_factory=dict)
    texts: dict[str, list[Any]] = field(default_factory=dict)
    declared: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.where)


SEVERITIES = ("error", "warning", "note")  # an error ends the command with 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `rows` are the first few of `count` samples (or tokens, or groups), in words."""

    code: str  # "A101": the page is docs/audit.md#a101
    severity: str
    sentence: str  # what is wrong, with numbers
    count: int
    rows: tuple[str, ...] = ()
    advice: str = ""  # what to try, in one sentence
