"""The in-process learner: scores rows, and takes one AdamW step on a weighted sum of loss streams.

An update is: weights of every token over the whole step (terms.py); packs that share what rows have in common
(packing.py); per pack one forward, the streams' losses, one backward; clip; step. Nothing is stepped on that is not
finite: the rows to blame are found, saved and named. Left out: gradient checkpointing and more than one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from assay.learner import fused, saving
from assay.learner.attention import tile_attention
from assay.learner.logprobs import full_logprobs, target_logprobs
from assay.learner.packing import Pack, pack
from assay.learner.terms import Computed, Term, metrics_of, pack_loss, prepare
from assay.losses import SEQUENCE_GATES
from assay.model import LayerWeights, Network
from assay.protocols import Metrics, UserError
from assay.rows import Row, Stream
from assay.schedules import SCHEDULES
from assay.trace import Outcome

CPU_PACK = 2048  # tokens; in longer forwards the activations of a small model leave the core's cache
TOP_K = (8, 16, 20, 32, 64, 100)  # how many tokens a "target:topK" may name


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The targets of one row at one temperature."""

    row: Row
    temperature: float

    @property
    def key(self) -> tuple[int, float]:
        return id(self.row), self.temperature


class TorchLearner:
    """Implements `protocols.Learner`. `version` counts optimiser steps; the sampler reads `network`."""

    def __init__(
        self,
        network: Network,
        *,
        learning_rate: float,
        warmup_steps: int = 0,
        schedule: str = "constant",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        grad_clip: float = 1.0,
        tokens_per_forward: int = 16384,
        value_head: bool = False,
        value_detached: bool = False,
        on_nonfinite: Literal["skip", "stop"] = "skip",
        failure_folder: Path | None = None,
        reference: Network | None = None,
        dtype: torch.dtype | None = None,
        skip_zero_advantage: bool = True,
        share: bool = True,
    ) -> None:
        """Args:
        learning_rate: AdamW's, after `warmup_steps` optimiser steps of rising and times `schedule(progress)`.
        weight_decay: on matrices only.
        grad_clip: largest global norm of the gradient.
        tokens_per_forward: bounds memory; changes no value beyond rounding. At most 2048 are used on a CPU.
        value_detached: the value loss trains its head only, not the network below.
        on_nonfinite: "skip" counts the update and goes on, "stop" raises UserError; both save rows to `failure_folder`.
        reference: frozen network of "ref_logprob"; a peft model is its own, with its adapters off.
        dtype: of the forward (bfloat16: faster, not exact); absent: the weights'. Log-softmax is fp32 always.
        skip_zero_advantage: leave out policy rows whose gradient is exactly 0 (advantage 0 throughout, no KL term).
        share: False computes each row from its start; for tests and measurements.
        """
        if schedule not in SCHEDULES:
            raise UserError(f"schedule {schedule!r} does not exist: the schedules are {', '.join(SCHEDULES)}")
        self.network, self.reference = network, reference
        self.learning_rate, self.warmup_steps, self.schedule = learning_rate, warmup_steps, schedule
        self.grad_clip, self.on_nonfinite, self.failure_folder = grad_clip, on_nonfinite, failure_folder
        self.tokens_per_forward = (
            min(tokens_per_forward, CPU_PACK) if network.device.type == "cpu" else tokens_per_forward
        )
        self.dtype = dtype or network.dtype
        self.value_detached, self.skip_zero_advantage, self.share = value_detached, skip_zero_advantage, share
        self.version = 0
        self.skipped = 0  # updates refused because something was not finite
        self.value_head: nn.Linear | None = None
        named = [(f"model.{name}", p) for name, p in network.model.named_parameters() if p.requires_grad]
        if value_head:
            self.value_head = nn.Linear(network.model.config.hidden_size, 1, device=network.device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
            named += [(f"value.{name}", p) for name, p in self.value_head.named_parameters()]
        if not named:
            raise UserError("the model has no parameter that requires a gradient: there is nothing to train")
        self.parameters = dict(named)
        # AdamW's small steps vanish in bf16: such weights are trained as fp32 copies
        self.masters = {n: p if p.dtype == torch.float32 else p.detach().float() for n, p in named}
        groups = [
            {"params": [p for p in self.masters.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.masters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True
        )

    @property
    def provides(self) -> frozenset[str]:
        """ "target" is the sampled token's log-prob, "target:full" and "target:topK" those of more of the vocabulary."""
        names = {"old_logprob", "entropy", "target", "target:full", *(f"target:top{k}" for k in TOP_K)}
        names |= {"value"} if self.value_head is not None else set()
        names |= {"ref_logprob"} if self.reference is not None or self._adapted else set()
        return frozenset(names)

    @property
    def _adapted(self) -> bool:
        return hasattr(self.network.model, "disable_adapter")

    # ----------------------------------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def score(self, rows: Sequence[Row], needs: frozenset[str], temperature: float = 1.0) -> None:
        """Writes each need as a column of every row, at its trace's temperature (`temperature` for greedy traces).

        "old_logprob", "ref_logprob", "entropy", "value", "target": [N]; "target:full": "target" [N, V]; "target:top20":
        "target" [N, 20] and "target_ids" [N, 20], the ids of an existing column "target_ids" if there is one.
        """
        if needs - self.provides:
            raise UserError(
                f"the learner cannot provide {', '.join(sorted(needs - self.provides))}: it has "
                f"{', '.join(sorted(self.provides))}"
            )
        if not needs:
            return
        if "value" in needs:
            self._score_final(rows, temperature)
        heat = {id(row): row.trace.temperature or temperature for row in rows}
        own = needs - {"ref_logprob"}
        for network, wanted in ((self.network, own), (self.reference or self.network, needs & {"ref_logprob"})):
            if not wanted:
                continue
            adapters_off = "ref_logprob" in wanted and self.reference is None
            with self.network.model.disable_adapter() if adapters_off else contextlib.nullcontext():
                weights = fused.TrainingWeights(network).leaves if network.fused else None
                for part in pack(rows, self.tokens_per_forward, share=self.share):
                    self._score_pack(network, weights, part, wanted, heat)

    def _score_final(self, rows: Sequence[Row], temperature: float) -> None:
        """Column "final_value" [1] of the last row of each `cut` trace: the value of all that it has, which stands for
        what would have followed. (A row is read before its last token only: a token behind it makes that a target.)"""
        last = {row.trace.key: row for row in rows if row.trace.outcome is Outcome.CUT}
        ends = [
            replace(
                row,
                ids=np.append(row.ids, np.int32(0)),
                provenance=np.append(row.provenance, row.provenance[-1:]),
                at=np.array([len(row.ids)], np.int32),
                turns=row.turns[-1:],
                columns={},
            )
            for row in last.values()
        ]
        heat = {id(end): temperature for end in ends}
        weights = fused.TrainingWeights(self.network).leaves if self.network.fused else None
        for part in pack(ends, self.tokens_per_forward, share=self.share):
            self._score_pack(self.network, weights, part, frozenset({"value"}), heat)
        for row, end in zip(last.values(), ends, strict=True):
            row.columns["final_value"] = end.columns["value"]

    def _score_pack(
        self,
        network: Network,
        weights: list[LayerWeights] | None,
        part: Pack,
        needs: frozenset[str],
        heat: Mapping[int, float],
    ) -> None:
        hidden = self._hidden(network, weights, part)
        requests = [Request(row, heat[id(row)]) for row in part.rows]
        sources, targets, heats = _flatten(part, requests, network.device)
        if needs & {"old_logprob", "ref_logprob", "entropy", "target"}:
            logprobs, entropies = target_logprobs(network, hidden, sources, targets, heats)
            for name in needs & {"old_logprob", "ref_logprob", "entropy", "target"}:
                _write(part.rows, name, entropies if name == "entropy" else logprobs)
        if "value" in needs:
            _write(part.rows, "value", self._values(hidden.index_select(0, sources)))
        wide = [need for need in needs if need.startswith("target:")]
        at = np.cumsum([len(row.at) for row in part.rows])[:-1]
        rows = zip(part.rows, *(np.split(x.cpu().numpy(), at) for x in (sources, heats)), strict=True)
        for row, source, temperature in rows if wide else ():
            full = full_logprobs(
                network, hidden, *(torch.as_tensor(x, device=hidden.device) for x in (source, temperature))
            )
            if wide[0] == "target:full":
                row.columns["target"] = full.cpu().numpy()
                continue
            if "target_ids" not in row.columns:
                row.columns["target_ids"] = full.topk(int(wide[0][10:])).indices.cpu().numpy()
            ids = torch.as_tensor(row.columns["target_ids"].astype(np.int64), device=full.device)
            row.columns["target"] = full.gather(-1, ids).cpu().numpy()

    # ---------------------------------------------------------------------------------------------------- updating

    def update(self, streams: Sequence[Stream], progress: float) -> Metrics:
        """One optimiser step on the weighted sum of the streams. UserError if a stream lacks what its loss needs.

        Metrics: see `terms.metrics_of`; `grad_norm` before clipping; `tokens_trained` targets of weight, `tokens_idle`
        targets left out because their gradient is exactly 0, `tokens_forwarded` flat tokens computed, `tokens_shared`
        that rows had in common and did not cost; `updates_skipped`, `rows_nonfinite`.
        """
        terms = prepare(streams, self.skip_zero_advantage)
        self._require(terms)
        rows = list({id(row): row for term in terms for row in term.rows}.values())
        metrics: Metrics = {
            "tokens_trained": float(sum(term.tokens for term in terms)),
            "tokens_idle": float(sum(term.skipped for term in terms)),
            "updates_skipped": 0.0,
            "rows_nonfinite": 0.0,
        }
        if not rows:
            return metrics | metrics_of(terms) | {"grad_norm": 0.0, "tokens_forwarded": 0.0, "tokens_shared": 0.0}
        self._clear()
        whole = any(term.gate in SEQUENCE_GATES and term.loss == "policy" for term in terms)
        packs = pack(rows, self.tokens_per_forward, whole_traces=whole, share=self.share)
        finite = self._backward(terms, packs)
        masters = self._gradients()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None]))
        metrics |= metrics_of(terms) | {"grad_norm": norm, "learning_rate": self._rate(progress)}
        metrics["tokens_forwarded"] = float(sum(part.tokens for part in packs))
        metrics["tokens_shared"] = float(sum(part.unshared for part in packs)) - metrics["tokens_forwarded"]
        if finite and np.isfinite(norm):
            self._step(masters, norm, progress)
            return metrics
        return metrics | self._refuse(terms, rows)

    def _require(self, terms: Sequence[Term]) -> None:
        if self.value_head is None and any(term.loss == "value" for term in terms):
            raise UserError(
                "a stream has loss 'value', but the learner has no value head: build it with value_head=True"
            )

    def _backward(self, terms: Sequence[Term], packs: Sequence[Pack]) -> bool:
        """Gradients of the sum of all terms, added to the parameters'; False if the loss is not finite."""
        weights = fused.TrainingWeights(self.network) if self.network.fused else None
        for part in packs:
            loss = self._pack_loss(terms, part, None if weights is None else weights.leaves)
            if not bool(torch.isfinite(loss)):
                return False
            if loss.requires_grad:
                loss.backward()
        if weights is not None:
            weights.backward()
        return True

    def _pack_loss(self, terms: Sequence[Term], part: Pack, weights: list[LayerWeights] | None) -> Tensor:
        own = [(term, [row for row in part.rows if id(row) in term.weights]) for term in terms]
        own = [(term, rows) for term, rows in own if rows]
        hidden = self._hidden(self.network, weights, part)
        every = {r.key: r for term, rows in own for r in (Request(row, term.temperature(row)) for row in rows)}
        requests = list(every.values())
        sources, targets, heats = _flatten(part, requests, hidden.device)
        logprobs, entropies = target_logprobs(self.network, hidden, sources, targets, heats)
        ends = np.cumsum([len(r.row.at) for r in requests])
        spans = {r.key: np.arange(end - len(r.row.at), end) for r, end in zip(requests, ends, strict=True)}
        total = hidden.new_zeros((), dtype=torch.float32)
        for term, rows in own:
            index = np.concatenate([spans[id(row), term.temperature(row)] for row in rows])
            at = torch.as_tensor(index, device=hidden.device)
            wide = term.loss == "kl" and rows[0].columns["target"].ndim == 2
            full = full_logprobs(self.network, hidden, sources[at], heats[at]) if wide else None
            values = self._values(hidden.index_select(0, sources[at])) if term.loss == "value" else None
            computed = Computed(rows, logprobs.index_select(0, at), entropies[at], full, values)
            total = total + pack_loss(term, computed)
        return total

    def _values(self, states: Tensor) -> Tensor:
        """[M] from hidden states [M, D]."""
        assert self.value_head is not None
        states = states.detach() if self.value_detached else states
        values: Tensor = self.value_head(states.float()).squeeze(-1)
        return values

    def _hidden(self, network: Network, weights: list[LayerWeights] | None, part: Pack) -> Tensor:
        """[N, D] final hidden states of a pack's flat tokens."""
        device = network.device
        attend = tile_attention(part.tiles, device)
        ids, positions = part.ids.to(device), part.positions.to(device)
        if int(positions.max()) >= network.max_length:
            longest = int(positions.max()) + 1
            raise UserError(f"a row has {longest} tokens, more than the {network.max_length} that the model can hold")
        if weights is not None:
            return fused.hidden(network, weights, ids, positions, attend, self.dtype)
        if self.dtype == network.dtype:
            return network.hidden(ids, positions, attend)
        with torch.autocast(device.type, self.dtype):
            return network.hidden(ids, positions, attend)

    # -------------------------------------------------------------------------------------------------- optimising

    def _rate(self, progress: float) -> float:
        rise = min(1.0, (self.version + 1) / max(self.warmup_steps, 1))
        return self.learning_rate * rise * SCHEDULES[self.schedule](progress, 1.0, 0.0)

    def _gradients(self) -> list[Tensor]:
        """What the optimiser steps on, each with its gradient."""
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        return list(self.masters.values())

    @torch.no_grad()
    def _step(self, masters: list[Tensor], norm: float, progress: float) -> None:
        gradients = [p.grad for p in masters if p.grad is not None]
        if norm > self.grad_clip:
            torch._foreach_mul_(gradients, self.grad_clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(progress)
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
        self._clear()
        self.version += 1

    def _clear(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def _refuse(self, terms: Sequence[Term], rows: Sequence[Row]) -> Metrics:
        """No step: find the rows that are not finite by themselves, save and name them, go on or stop."""
        self._clear()
        bad = list(self._bad_rows(terms, rows))
        self.skipped += 1
        where = ""
        if self.failure_folder is not None:
            where = f", saved to {saving.save_rows(bad or rows, self.failure_folder, self.version)}"
        names = ", ".join("/".join(map(str, row.key)) for row in bad[:8]) or "no row by itself"
        if self.on_nonfinite == "stop":
            raise UserError(f"loss or gradient is not finite after {self.version} updates; from: {names}{where}")
        return {"updates_skipped": 1.0, "rows_nonfinite": float(len(bad))}

    def _bad_rows(self, terms: Sequence[Term], rows: Sequence[Row]) -> Iterator[Row]:
        for row in sorted(rows, key=lambda r: r.key):
            finite = self._backward(terms, pack([row], self.tokens_per_forward))
            gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
            if not finite or not all(bool(torch.isfinite(g).all()) for g in gradients):
                yield row
            self._clear()

    # ------------------------------------------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """{"tensors": flat names -> tensors, "json": JSON values}; restored, the next update has the same bits."""
        tensors = {name: p.detach().clone() for name, p in self.masters.items()}
        steps = {}
        for name, p in self.masters.items():
            state = self.optimizer.state.get(p)
            if state:
                steps[name] = int(state["step"])
                tensors |= {f"{kind}.{name}": state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
        return {"tensors": tensors, "json": {"version": self.version, "skipped": self.skipped, "steps": steps}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave; UserError names a tensor that is absent or of another shape."""
        tensors, values = state["tensors"], state["json"]
        for name, p in self.masters.items():
            p.copy_(_checked(tensors, name, p))
            self.parameters[name].copy_(p)
            self.optimizer.state.pop(p, None)
            if name in values["steps"]:
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(values["steps"][name])),
                    "exp_avg": _checked(tensors, f"exp_avg.{name}", p).to(p).clone(),
                    "exp_avg_sq": _checked(tensors, f"exp_avg_sq.{name}", p).to(p).clone(),
                }
        self.version, self.skipped = int(values["version"]), int(values["skipped"])
        self._clear()

    def save_pretrained(self, folder: Path) -> None:
        """The model as a transformers (or adapter) folder; UserError if what was written is not what is trained."""
        saving.save_pretrained(self.network, folder)


def _flatten(part: Pack, requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Sources int64 [M], targets int64 [M] and temperatures [M] of the requests, one after the other."""
    place = {id(row): sources for row, sources in zip(part.rows, part.sources, strict=True)}
    sources: NDArray[Any] = np.concatenate([place[id(r.row)] for r in requests])
    targets = np.concatenate([r.row.targets for r in requests]).astype(np.int64)
    heats = np.repeat([r.temperature for r in requests], [len(r.row.at) for r in requests])
    return tuple(torch.as_tensor(x, device=device) for x in (sources, targets, heats))  # type: ignore[return-value]


def _write(rows: Sequence[Row], name: str, values: Tensor) -> None:
    ends = np.cumsum([len(row.at) for row in rows])[:-1]
    for row, part in zip(rows, np.split(values.float().cpu().numpy(), ends), strict=True):
        row.columns[name] = part.copy()


def _checked(tensors: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    if name not in tensors:
        raise UserError(f"the checkpoint has no tensor {name!r}: it is of another model or another method")
    tensor = torch.as_tensor(tensors[name])
    if tensor.shape != like.shape:
        raise UserError(f"tensor {name!r} of the checkpoint has shape {tuple(tensor.shape)}, not {tuple(like.shape)}")
    return tensor
