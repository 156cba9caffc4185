"""Streams made ready for one optimiser step: what is left out, weights over the whole step, the loss of a pack's share.

Loss names of a stream, and the columns and constants that they read:

    policy, policy:GATE   "advantage", "old_logprob" (absent: the new one, ratio 1), "ref_logprob" where `kl` > 0;
                          constants of the gate and further columns (losses.GATE_COLUMNS), `kl` (coefficient),
                          `kl_kind`; "correction" if there is one: a factor on the policy term of each token, which
                          neither the denominator nor the KL sees
    nll                   nothing; at temperature 1
    kl                    "target" [N] (constant `kl_kind`), or [N, V], or [N, K] with "target_ids" [N, K]
    value                 "return"; "value" and constant `clip`, where values are clipped

`length` is the constant of the denominator "constant". Numbers may come one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay import losses
from assay.protocols import UserError
from assay.rows import Row, Stream

LOSSES = ("policy", "nll", "kl", "value")
BY_ENVIRONMENT = ("ratio", "clip_low", "clip_high")  # metrics of a mixture's environments, beside the whole's
OURS = ("kl", "kl_kind", "length", "clip")  # constants that are not the gate's


@dataclass(slots=True, eq=False)
class Term:
    """A stream's rows that count. `weights[id(row)]` float64 [N]; `place[id(row)]` is its index in the stream."""

    stream: Stream
    loss: str
    gate: str
    rows: list[Row]
    weights: dict[int, NDArray[np.float64]]
    place: dict[int, int]
    environments: tuple[str, ...] = ()  # of a policy stream's rows where they are of several
    skipped: int = 0  # target tokens of rows left out because their gradient is exactly 0
    totals: dict[str, float] = field(default_factory=dict)  # sums over target tokens, for the metrics

    @property
    def tokens(self) -> int:
        return sum(len(row.at) for row in self.rows)

    @property
    def coefficient(self) -> float:
        return float(self.stream.constants.get("kl", 0.0))

    def temperature(self, row: Row) -> float:
        """nats of `policy` and `kl` are at the temperature of the trace; greedy decoding counts as 1."""
        return 1.0 if self.loss == "nll" else row.trace.temperature or 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What a pack's forward gives a term for its M target tokens, in the order of `rows`."""

    rows: list[Row]
    logprobs: Tensor  # [M]
    entropies: Tensor  # [M]
    full: Tensor | None  # [M, V], for targets over the vocabulary
    values: Tensor | None  # [M]


def prepare(streams: Sequence[Stream], skip_zero_advantage: bool) -> list[Term]:
    """Terms of the streams that have a token of weight; UserError names what a stream lacks."""
    terms = []
    for stream in streams:
        loss, _, gate = stream.loss.partition(":")
        _check(stream, loss, gate or "ppo")
        try:
            weights = losses.stream_weights(stream)
        except (ValueError, KeyError) as error:
            raise UserError(f"stream {stream.name!r}: {error}") from error
        names = sorted({row.trace.task.environment for row in stream.rows}) if loss == "policy" else []
        term = Term(stream, loss, gate or "ppo", [], {}, {}, tuple(names) if len(names) > 1 else ())
        idle = skip_zero_advantage and loss == "policy" and not term.coefficient and not stream.constants.get("penalty")
        for index, (row, weight) in enumerate(zip(stream.rows, weights, strict=True)):
            if not weight.any():
                continue
            if idle and not row.columns["advantage"].any():
                term.skipped += len(row.at)
                continue
            term.rows.append(row)
            term.weights[id(row)], term.place[id(row)] = weight, index
        if term.rows or term.skipped:
            terms.append(term)
    return terms


def _check(stream: Stream, loss: str, gate: str) -> None:
    name = f"stream {stream.name!r}"
    if loss not in LOSSES or (loss == "policy" and gate not in losses.GATES):
        raise UserError(
            f"{name}: loss {stream.loss!r} does not exist: it is {', '.join(LOSSES)}, or policy:GATE with "
            f"{', '.join(losses.GATES)}"
        )
    required = {"policy": ["advantage"], "kl": ["target"], "value": ["return"]}.get(loss, [])
    required += ["ref_logprob"] if loss == "policy" and stream.constants.get("kl") else []
    required += losses.GATE_COLUMNS.get(gate, ()) if loss == "policy" else ()
    required += ["correction"] if loss == "policy" and any("correction" in row.columns for row in stream.rows) else []
    for column in required:
        lacking = [row for row in stream.rows if column not in row.columns]
        if lacking:
            raise UserError(
                f"{name}: {len(lacking)} of {len(stream.rows)} rows have no column {column!r}, the first is "
                f"{lacking[0].key}: a method must write it or declare it as a need"
            )
    known = {id(row) for row in stream.rows}
    if len(known) != len(stream.rows):
        raise UserError(f"{name}: a row stands in it twice: each row counts once, give it a token weight instead")
    for constant, value in stream.constants.items():
        if isinstance(value, np.ndarray) and value.shape != (len(stream.rows),):
            raise UserError(
                f"{name}: constant {constant!r} has shape {value.shape}: give a number or one per row, "
                f"[{len(stream.rows)}]"
            )


def pack_loss(term: Term, computed: Computed) -> Tensor:
    """The sum of weight x loss over the pack's share of the term; adds to `term.totals`."""
    device = computed.logprobs.device
    weights = _tensor([term.weights[id(row)] for row in computed.rows], device)
    loss = {"policy": _policy, "nll": _nll, "kl": _kl, "value": _value}[term.loss](term, computed)
    total = (weights * loss).sum()
    _count(term, "loss", total)
    if term.loss == "policy":
        _count(term, "entropy", computed.entropies.sum())
    return total


def _policy(term: Term, computed: Computed) -> Tensor:
    logprobs, rows = computed.logprobs, computed.rows
    old = _old(term, computed)
    names: dict[str, int] = {}
    lengths = [len(row.at) for row in rows]
    codes = [names.setdefault(f"{row.trace.key}/{row.view}", len(names)) for row in rows]
    constants = {name: _expand(term, rows, name, logprobs.device) for name in term.stream.constants if name not in OURS}
    constants |= {name: _column(rows, name, logprobs.device) for name in losses.GATE_COLUMNS.get(term.gate, ())}
    try:
        loss, metrics = losses.policy_loss(
            term.gate,
            logprobs,
            old,
            _column(rows, "advantage", logprobs.device),
            torch.as_tensor(np.repeat(codes, lengths), device=logprobs.device),
            **constants,
        )
    except TypeError as error:
        raise UserError(
            f"stream {term.stream.name!r}: gate {term.gate!r} does not take its constants: {error}"
        ) from None
    for name, values in metrics.items():
        _count(term, name, values.sum())
    if term.environments:
        _count_environments(term, rows, torch.stack([metrics[name] for name in BY_ENVIRONMENT]))
    if "correction" in rows[0].columns:
        loss = loss * _column(rows, "correction", logprobs.device)
    if term.coefficient:
        kind = str(term.stream.constants.get("kl_kind", "k3"))
        reference = _column(rows, "ref_logprob", logprobs.device)
        divergence = losses.kl(logprobs, reference, kind, old)
        _count(term, "ref_kl", divergence.sum())
        loss = loss + term.coefficient * divergence
    return loss


def _old(term: Term, computed: Computed) -> Tensor:
    """Old log-probs; the detached new ones where no score pass was asked for."""
    having = sum("old_logprob" in row.columns for row in term.stream.rows)
    if having == 0:
        return computed.logprobs.detach()
    if having < len(term.stream.rows):
        raise UserError(
            f"stream {term.stream.name!r}: {having} of {len(term.stream.rows)} rows have old log-probs: score all or none"
        )
    return _column(computed.rows, "old_logprob", computed.logprobs.device)


def _nll(term: Term, computed: Computed) -> Tensor:
    return losses.nll(computed.logprobs)


def _kl(term: Term, computed: Computed) -> Tensor:
    target = _column(computed.rows, "target", computed.logprobs.device)
    if target.dim() == 1:
        return losses.kl(computed.logprobs, target, str(term.stream.constants.get("kl_kind", "k3")), None)
    assert computed.full is not None
    if "target_ids" in computed.rows[0].columns:
        ids = np.concatenate([row.columns["target_ids"] for row in computed.rows]).astype(np.int64)
        return losses.kl_topk(computed.full, torch.as_tensor(ids, device=target.device), target)
    return losses.kl_full(computed.full, target)


def _value(term: Term, computed: Computed) -> Tensor:
    assert computed.values is not None
    clip = term.stream.constants.get("clip")
    device = computed.values.device
    old = None if clip is None else _column(computed.rows, "value", device)
    return losses.value_loss(
        computed.values, _column(computed.rows, "return", device), old, None if clip is None else float(clip)
    )


def _expand(term: Term, rows: list[Row], name: str, device: torch.device) -> Any:
    """A constant for a pack's tokens: the number itself, or the rows' numbers repeated."""
    value = term.stream.constants[name]
    if not isinstance(value, np.ndarray):
        return value
    each = np.repeat([value[term.place[id(row)]] for row in rows], [len(row.at) for row in rows])
    return torch.as_tensor(each, dtype=torch.float32, device=device)


def _column(rows: list[Row], name: str, device: torch.device) -> Tensor:
    return _tensor([row.columns[name] for row in rows], device)


def _tensor(parts: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    return torch.as_tensor(np.concatenate(parts), dtype=torch.float32, device=device)


def _count(term: Term, name: str, value: Tensor) -> None:
    term.totals[name] = term.totals.get(name, 0.0) + float(value.detach())


def _count_environments(term: Term, rows: list[Row], values: Tensor) -> None:
    """Sums of the metrics [3, M] of a pack's tokens over those of each environment."""
    place = {name: k for k, name in enumerate(term.environments)}
    codes = np.repeat([place[row.trace.task.environment] for row in rows], [len(row.at) for row in rows])
    code = torch.as_tensor(codes, device=values.device)
    sums = torch.stack([torch.where(code == k, values, 0.0).sum(1) for k in range(len(place))]).tolist()
    for environment, own in zip(term.environments, sums, strict=True):
        for name, value in zip(BY_ENVIRONMENT, own, strict=True):
            key = f"{name}[{environment}]"
            term.totals[key] = term.totals.get(key, 0.0) + value


def metrics_of(terms: Sequence[Term]) -> dict[str, float]:
    """`loss` (weighted sum of all), `loss_STREAM`; of policy streams, means over their trained tokens; where they hold
    several environments, those of each as `ratio[ENVIRONMENT]` and so on, and `tokens_policy[ENVIRONMENT]`."""
    metrics = {"loss": sum(term.totals.get("loss", 0.0) for term in terms)}
    for term in terms:
        metrics[f"loss_{term.stream.name}"] = term.totals.get("loss", 0.0)
    policy = [term for term in terms if term.loss == "policy"]
    tokens = sum(term.tokens for term in policy)
    for name in ("ratio", "approx_kl", "clip_low", "clip_high", "clip_dual", "chosen", "ref_kl", "entropy"):
        values = [term.totals[name] for term in policy if name in term.totals]
        if values:
            metrics[f"{name}_per_trained_token"] = sum(values) / tokens
    mixed = [term for term in policy if term.environments]
    for environment in sorted({name for term in mixed for name in term.environments}):
        rows = [row for term in mixed for row in term.rows if row.trace.task.environment == environment]
        own = sum(len(row.at) for row in rows)
        metrics[f"tokens_policy[{environment}]"] = float(own)
        for name in BY_ENVIRONMENT if own else ():
            key = f"{name}[{environment}]"
            metrics[key] = sum(term.totals.get(key, 0.0) for term in mixed) / own
    return metrics
