"""What `assay audit --model` needs: log-probs of the file's tokens by a checkpoint, and its tokenizer as two functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.audit.columns import Ragged, Rollouts
from assay.protocols import UserError
from assay.rows import Row
from assay.trace import Outcome, TaskKey, Trace

CHUNK = 32  # rows scored between two signs of life
TASK = TaskKey("audit", "", "", 0, "")


def score(rollouts: Rollouts, model: str, progress: Callable[[float], None]) -> Ragged:
    """Log-probs, in the rows of `ids`, of the tokens that were sampled (or are trained on), at the declared temperature.

    NaN elsewhere, and in samples that the model cannot read: longer than its context, or of ids that it does not have.
    UserError if there are no ids, or if no sample can be read.
    """
    if "ids" not in rollouts.tokens:
        raise UserError(f"{rollouts.source}: --model needs token ids, and this {rollouts.format} file has none")
    from assay.build import build_learner, load_policy
    from assay.config import RunConfig

    config = RunConfig(model=model)
    network, _ = load_policy(config)
    learner = build_learner(config, network, None)
    vocabulary = network.model.config.vocab_size
    ids = rollouts.tokens["ids"]
    scored = Ragged(np.full(len(ids.values), np.nan, np.float32), ids.offsets)
    temperature = float(rollouts.declared.get("temperature") or 1.0)
    rows = [
        (i, row)
        for i in range(len(rollouts))
        if (row := _row(i, ids.row(i), _targets(rollouts, i), vocabulary, network.max_length, temperature)) is not None
    ]
    if not rows:
        raise UserError(
            f"{rollouts.source}: no sample has sampled tokens that {model} can read: ids below {vocabulary}, and at most "
            f"{network.max_length} of them"
        )
    for first in range(0, len(rows), CHUNK):
        part = rows[first : first + CHUNK]
        learner.score([row for _, row in part], frozenset({"old_logprob"}))
        for i, row in part:
            scored.row(i)[row.at] = row.columns["old_logprob"]
        progress((first + len(part)) / len(rows))
    return scored


def _targets(rollouts: Rollouts, i: int) -> NDArray[np.bool_]:
    """Tokens of sample i whose recorded log-prob can be compared."""
    tokens = rollouts.tokens
    wanted = np.ones(len(tokens["ids"].row(i)), np.bool_)
    for name in ("sampled", "mask"):
        if name in tokens and len(tokens[name].row(i)) == len(wanted):
            wanted = tokens[name].row(i).astype(np.bool_)
            break
    if "logprobs" in tokens and len(tokens["logprobs"].row(i)) == len(wanted):
        wanted = wanted & np.isfinite(tokens["logprobs"].row(i))
    return wanted


def _row(
    i: int, ids: NDArray[np.int32], wanted: NDArray[np.bool_], vocabulary: int, length: int, temperature: float
) -> Row | None:
    at = np.flatnonzero(wanted[1:]).astype(np.int32) + 1  # nothing predicts the first token
    if not len(at) or len(ids) > length or ids.min() < 0 or ids.max() >= vocabulary:
        return None
    none = np.zeros(0, np.int32)
    trace = Trace(TASK, 0, 0, 0, i, none, none.astype(np.uint8), (), "", 0.0, Outcome.FAILURE, temperature)
    return Row(trace, -1, "", ids, np.zeros(len(ids), np.uint8), at, np.zeros(len(at), np.int32), 0)


def texts(source: str) -> tuple[Callable[[Any], str], Callable[[str], list[int]]]:
    """(decode, encode) of a tokenizer, special tokens shown in the one and not added in the other."""
    from transformers import AutoTokenizer

    from assay.build import policy_folder

    folder = policy_folder(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer of {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    return (
        lambda ids: str(tokenizer.decode(np.asarray(ids), skip_special_tokens=False)),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
    )
