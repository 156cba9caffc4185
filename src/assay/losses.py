"""Losses: pure functions over compact tensors, one entry per target token, in the order of the optimiser step's rows.

The loss of a stream is `sum(weights * loss)`. `policy_loss`, `kl`, `nll` and `value_loss` give the loss of each token
[N]; `weights` gives what each token counts under a named denominator. Weights are a function of the whole optimiser
step, computed once on the host; a micro-batch takes its slice, so splitting changes no value beyond rounding.

Everything is minimised. Old and reference log-probs, advantages, old values, targets and bounds are constants: no
gradient reaches them. Log-probs are nats of the sampled token. Left out: padding masks (a compact tensor has none) and
the mean (whoever takes one has chosen a denominator without saying so).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as F

from assay.rows import Stream

LOG_RATIO_LIMIT = 20.0  # nats, either side (verl): far past any bound, and exp() stays finite
SEQUENCE_LIMIT = 10.0  # nats, upper limit of a sequence's mean log ratio (verl)
KL_LIMIT = 10.0  # nats, limit of one token's k3 (verl)

Bound = float | Tensor  # one for all tokens, or [N]; a bound per row is expanded by the caller: bound[row]
Loss = tuple[Tensor, dict[str, Tensor]]


# --------------------------------------------------------------------------------------------------- policy losses


def policy_loss(
    gate: str,
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    sequence: Tensor | None = None,
    **constants: float | Tensor,
) -> Loss:
    """Policy-gradient loss of each token behind a gate on the probability ratio.

    Args:
      gate: one of `GATES`; its function below names the constants that it takes.
      logprob: [N] of the policy being trained, with gradient.
      old_logprob: [N] of the policy that the ratio refers to, computed by the same learner.
      advantage: [N].
      sequence: [N] int64, which sequence a token belongs to ("gspo", "sequence"). All tokens of a sequence must be in
        the same call: index traces to have one ratio per episode, rows to have one per row.

    Returns:
      loss [N], and detached metrics [N], to be averaged over tokens with any weights: `ratio`, `approx_kl` (nats, k3
      from old to new policy), `clip_low`, `clip_high`, `clip_dual` (1 where that bound took the token's gradient or,
      for "cispo", capped its weight), `chosen` (1 where a covariance picked the token).

    Raises:
      ValueError: unknown gate, shapes that differ, no `sequence` where the gate needs one.
    """
    if gate not in GATES:
        raise ValueError(f"gate {gate!r} does not exist: the gates are {', '.join(GATES)}")
    if not logprob.shape == old_logprob.shape == advantage.shape or logprob.dim() != 1:
        shapes = f"{tuple(logprob.shape)}, {tuple(old_logprob.shape)}, {tuple(advantage.shape)}"
        raise ValueError(f"logprob, old_logprob and advantage must have one shape [N], not {shapes}")
    old_logprob, advantage = old_logprob.detach(), advantage.detach()
    log_ratio = logprob - old_logprob
    if gate in SEQUENCE_GATES:
        if sequence is None:
            raise ValueError(f"gate {gate!r} needs `sequence`, the sequence index of each token")
        log_ratio = sequence_log_ratio(log_ratio, sequence, mean=gate == "gspo")
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss, clips = GATES[gate](logprob, ratio, advantage, **constants)
    unclipped = torch.zeros_like(ratio, requires_grad=False)
    metrics = {name: unclipped for name in ("clip_low", "clip_high", "clip_dual")} | clips
    metrics["ratio"] = ratio.detach()
    metrics["approx_kl"] = kl(old_logprob, logprob.detach(), "k3")
    return loss, metrics


def clipped(
    logprob: Tensor, ratio: Tensor, advantage: Tensor, low: Bound = 0.2, high: Bound = 0.2, dual: float | None = None
) -> Loss:
    """`max(-A rho, -A clip(rho, 1 - low, 1 + high))`, and for A < 0 at most `-A dual`.

    Source: Schulman et al., arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476; dual clip: Ye et al.,
    arXiv 1912.09729. With a sequence's ratio it is GSPO's or the original RLOO's.
    """
    if dual is not None and dual <= 1.0:
        raise ValueError(f"dual caps the ratio of tokens with negative advantage, it must be above 1, not {dual}")
    # bounds as tensors of the ratio's type whatever they come as: equal bounds then give equal bits
    floor = 1.0 - torch.as_tensor(low, dtype=ratio.dtype, device=ratio.device).detach()
    ceiling = 1.0 + torch.as_tensor(high, dtype=ratio.dtype, device=ratio.device).detach()
    loss = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, floor, ceiling))
    positive, negative = advantage > 0, advantage < 0
    clips = {"clip_low": negative & (ratio < floor), "clip_high": positive & (ratio > ceiling)}
    if dual is not None:
        loss = torch.where(negative, torch.minimum(loss, -advantage * dual), loss)
        clips["clip_dual"] = negative & (ratio > dual)
    return loss, {name: hit.to(ratio.dtype) for name, hit in clips.items()}


def plain(logprob: Tensor, ratio: Tensor, advantage: Tensor) -> Loss:
    """`-A rho`, importance sampling without a bound; at rho = 1 its gradient is REINFORCE's."""
    return -advantage * ratio, {}


def cispo(logprob: Tensor, ratio: Tensor, advantage: Tensor, cispo_weight_cap: float = 5.0) -> Loss:
    """`-sg(min(rho, cap)) A log pi`: every token keeps its gradient, only its weight is capped.

    Source: MiniMax-M1, arXiv 2506.13585, without a lower bound. The cap is the largest weight itself, as in
    TRL, not 1 + epsilon as in verl; 5 is ScaleRL's (arXiv 2510.13786).
    """
    weight = ratio.detach()
    loss = -weight.clamp(max=cispo_weight_cap) * advantage * logprob
    return loss, {"clip_high": (weight > cispo_weight_cap).to(ratio.dtype)}


def sapo(logprob: Tensor, ratio: Tensor, advantage: Tensor, tau: float = 1.0, tau_negative: float = 1.05) -> Loss:
    """`-A f(rho)`, `f = 4 / tau sigmoid(tau (rho - 1))`: a soft gate with slope 1 at rho = 1 instead of a clip.

    Source: SAPO, arXiv 2511.20347. `tau` is the sharpness where A > 0, `tau_negative` elsewhere.
    """
    sharpness = torch.where(advantage > 0, tau, tau_negative)
    return -advantage * torch.sigmoid(sharpness * (ratio - 1.0)) * 4.0 / sharpness, {}


def dppo(
    logprob: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    sampler_logprob: Tensor | None = None,
    low: Bound = 0.2,
    high: Bound = 0.2,
    penalty: float = 0.0,
) -> Loss:
    """`-A rho`, and 0 for a token whose probability has moved too far in the direction in which A pushes it:
    `pi - pi_sampler > high` where A > 0, `pi - pi_sampler < -low` where A < 0.

    Source: DPPO with binary total variation, arXiv 2602.04879; there rho too refers to the sampler. prime-rl adds
    `penalty (log pi - log pi_sampler)^2` on every token, with 1e-3.

    Args:
      sampler_logprob: [N] as the sampler recorded them; NaN where a token was not sampled as it stands: its old one
        stands in. None: so for all.
    """
    old = logprob.detach() - ratio.detach().log()
    sampled = old if sampler_logprob is None else torch.where(sampler_logprob.isnan(), old, sampler_logprob).detach()
    moved = logprob.detach().exp() - sampled.exp()
    clips = {"clip_low": (advantage < 0) & (moved < -low), "clip_high": (advantage > 0) & (moved > high)}
    loss = torch.where(clips["clip_low"] | clips["clip_high"], 0.0, -advantage * ratio)
    if penalty:
        loss = loss + penalty * (logprob - sampled).square()
    return loss, {name: hit.to(ratio.dtype) for name, hit in clips.items()}


def clip_cov(
    logprob: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    chosen: Tensor | None = None,
    low: Bound = 1.0,
    high: Bound = 1.0,
) -> Loss:
    """`clipped`, and 0 for the chosen tokens [N] (not 0: chosen). Source: Clip-Cov, arXiv 2505.22617."""
    loss, clips = clipped(logprob, ratio, advantage, low, high)
    if chosen is None:
        return loss, clips
    return torch.where(chosen != 0, 0.0, loss), clips | {"chosen": (chosen != 0).to(ratio.dtype)}


def kl_cov(
    logprob: Tensor, ratio: Tensor, advantage: Tensor, chosen: Tensor | None = None, penalty: float = 1.0
) -> Loss:
    """`-A rho`, plus `penalty |log rho|` for the chosen tokens [N] (not 0: chosen).

    Source: KL-Cov, arXiv 2505.22617. At rho = 1 the penalty's gradient is 0: it acts from a batch's second update on.
    """
    loss = -advantage * ratio
    if chosen is None:
        return loss, {}
    held = (chosen != 0).to(ratio.dtype)
    return loss + penalty * held * ratio.log().abs(), {"chosen": held}


GATES: dict[str, Callable[..., Loss]] = {
    "ppo": clipped,
    "none": plain,
    "cispo": cispo,
    "sapo": sapo,
    "gspo": clipped,  # on the geometric mean of a sequence's ratios; bounds about 1000 times smaller than PPO's
    "sequence": clipped,  # on their product: the original RLOO; for one update per batch, else it over- or underflows
    "dppo": dppo,
    "clip-cov": clip_cov,
    "kl-cov": kl_cov,
}
GATE_COLUMNS = {"dppo": ("sampler_logprob",), "clip-cov": ("chosen",), "kl-cov": ("chosen",)}  # row columns, [N] each
SEQUENCE_GATES = ("gspo", "sequence")


def sequence_log_ratio(log_ratio: Tensor, sequence: Tensor, mean: bool) -> Tensor:
    """The log ratio of each token's sequence, with the gradient of the token's own log-prob (GSPO-token).

    Value: the sum over the sequence (`mean`: divided by its tokens, at most `SEQUENCE_LIMIT`). Summed (`mean`:
    averaged) over the sequence, the gradient is that of the sequence's own ratio. Source: arXiv 2507.18071.

    Args:
      log_ratio: [N].
      sequence: [N] int64 >= 0, need not be dense.
    """
    total = log_ratio.detach().new_zeros(int(sequence.max()) + 1 if len(sequence) else 0)
    value = total.index_add(0, sequence, log_ratio.detach())
    if mean:
        count = total.index_add(0, sequence, torch.ones_like(log_ratio, requires_grad=False))
        value = value / count.clamp(min=1.0)
    whole = value[sequence] + (log_ratio - log_ratio.detach())
    return whole.clamp(max=SEQUENCE_LIMIT) if mean else whole


# ---------------------------------------------------------------------------------- divergences and other losses


def kl(logprob: Tensor, ref_logprob: Tensor, kind: str = "k3", old_logprob: Tensor | None = None) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, nats, from q = logprob - ref_logprob.

    Source: Schulman, "Approximating KL divergence"; clamps as in verl (q to +-20, k3 to +-10).

    Args:
      logprob, ref_logprob: [N].
      kind: "k1" is q: unbiased, for a reward; as a loss its gradient averages to 0.
        "k2" is q^2 / 2: its gradient averages to that of KL(policy || reference).
        "k3" is e^-q + q - 1 >= 0: its gradient averages to that of KL(reference || policy).
        "k1+", "k3+" have the value of k1, k3 and the gradient of k2.
        "is_k3" is rho k3 with gradient through rho = policy / old: that of KL(policy || reference), also off-policy.
      old_logprob: [N] of the policy that sampled ("is_k3"); None: the present one, rho = 1.

    Returns:
      [N].
    """
    if kind not in KL_KINDS:
        raise ValueError(f"KL estimator {kind!r} does not exist: the kinds are {', '.join(KL_KINDS)}")
    q = logprob - ref_logprob.detach()
    if kind == "k1":
        return q
    if kind == "is_k3":
        old = (logprob if old_logprob is None else old_logprob).detach()
        limited = -q.clamp(min=-LOG_RATIO_LIMIT)
        return (logprob - old).clamp(max=KL_LIMIT).exp() * (limited.exp() - 1.0 + q)
    k2 = 0.5 * q.square()
    if kind == "k2":
        return k2
    limited = q.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = (torch.exp(-limited) + limited - 1.0).clamp(-KL_LIMIT, KL_LIMIT)
    if kind == "k3":
        return k3
    return (q if kind == "k1+" else k3).detach() + k2 - k2.detach()


KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+", "is_k3")


def kl_full(logprobs: Tensor, target_logprobs: Tensor) -> Tensor:
    """Exact KL(policy || target) at each position, `sum_v s_v (log s_v - log p_v)`, nats.

    Args:
      logprobs: [N, V] log-softmax of the policy; -inf (a forbidden token) counts 0.
      target_logprobs: [N, V], a constant.

    Returns:
      [N].
    """
    difference = (logprobs - target_logprobs.detach()).masked_fill(logprobs == -torch.inf, 0.0)
    return (logprobs.exp() * difference).sum(-1)


def kl_topk(logprobs: Tensor, ids: Tensor, target_logprobs: Tensor) -> Tensor:
    """KL(policy || target) over K named tokens and one bucket for all others: a lower bound of `kl_full`, nats.

    Args:
      logprobs: [N, V] log-softmax of the policy.
      ids: [N, K] int64, distinct in a row, K < V.
      target_logprobs: [N, K] of those tokens, normalised over the whole vocabulary; a constant.

    Returns:
      [N].
    """
    if ids.shape != target_logprobs.shape or ids.shape[-1] >= logprobs.shape[-1]:
        raise ValueError(
            f"ids {tuple(ids.shape)} and target_logprobs {tuple(target_logprobs.shape)} must be one shape [N, K] "
            f"with K below the vocabulary's {logprobs.shape[-1]}"
        )
    rest = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    mass = torch.logsumexp(target_logprobs.detach(), -1, keepdim=True)
    tiny = torch.finfo(mass.dtype).eps  # rounding may bring the named mass to 1 and above
    target_rest = torch.log(-torch.expm1(mass.clamp(max=-tiny)))
    bucketed = torch.cat([logprobs.gather(-1, ids), rest], -1)
    return kl_full(bucketed, torch.cat([target_logprobs, target_rest], -1))


def nll(logprob: Tensor) -> Tensor:
    """Negative log-likelihood [N] of the target tokens, nats."""
    return -logprob


def value_loss(value: Tensor, target: Tensor, old_value: Tensor | None = None, clip: float | None = None) -> Tensor:
    """`max((V - T)^2, (clip(V, V_old +- clip) - T)^2) / 2`, all [N]; plain squared error without `clip`.

    Source: Schulman et al.'s PPO implementation (baselines); verl.
    """
    target = target.detach()
    loss = (value - target).square()
    if clip is not None:
        if old_value is None:
            raise ValueError("value_loss with a clip needs old_value, the values before this batch's first update")
        old = old_value.detach()
        loss = torch.maximum(loss, (torch.clamp(value, old - clip, old + clip) - target).square())
    return 0.5 * loss


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [N] of targets [N] under logits [N, V] at a temperature; log-softmax in fp32, nats."""
    return F.log_softmax(logits.float() / temperature, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy [N] of the whole vocabulary under logits [N, V] at a temperature, fp32, nats; -inf logits count 0."""
    logprobs = F.log_softmax(logits.float() / temperature, -1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)


# ------------------------------------------------------------------------------------------------------ denominators

DENOMINATORS = ("token", "sequence", "turn", "episode", "group", "constant")


def weights(
    denominator: str,
    row: ArrayLike,
    *,
    traces: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    turns: ArrayLike | None = None,
    constant: float | None = None,
    mask: ArrayLike | None = None,
) -> NDArray[np.float64]:
    """What each token of an optimiser step counts, so that the step's loss is `sum(weights * loss)`.

    "token": mean over all tokens. "sequence": mean over rows of the row's token mean. "turn", "episode", "group": mean
    over turns, episodes, groups of the token mean over all rows of the unit, so the numbers of the append and the
    window layout agree. "constant": sum / (episodes * constant), Dr.GRPO's with the generation budget as constant
    (verl's form of it does not divide by the episodes, which makes the step grow with the batch). Rows, turns,
    episodes and groups without a counted token leave the number that is divided by.

    Args:
      denominator: one of `DENOMINATORS`.
      row: [N] index 0 .. B-1 of each token's row.
      traces: [B] key of each row's trace ("turn", "episode", "constant").
      groups: [B] key of each row's group ("group").
      turns: [N] turn of each token in its trace ("turn").
      constant: tokens per episode ("constant").
      mask: [N]; tokens where it is false weigh 0 and are not counted.

    Returns:
      [N] float64; the sum is 1, but for "constant".
    """
    index = np.asarray(row, np.int64)
    counted = np.ones(len(index), bool) if mask is None else np.asarray(mask, bool)
    if index.ndim != 1 or counted.shape != index.shape:
        raise ValueError(f"row and mask must have one entry per token, not shapes {index.shape} and {counted.shape}")
    if denominator == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"denominator 'constant' needs a positive number of tokens per episode, not {constant}")
        episodes = len(np.unique(_codes(traces, "traces", index)[counted]))
        return counted / (max(episodes, 1) * float(constant))
    unit = _units(denominator, index, traces, groups, turns)
    count = np.bincount(unit[counted], minlength=int(unit.max(initial=-1)) + 1)
    return counted / (max(np.count_nonzero(count), 1) * np.maximum(count, 1)[unit])


def stream_weights(stream: Stream) -> list[NDArray[np.float64]]:
    """`weights` of a stream's rows, times its token weights and its own weight: one [N] per row, in the rows' order.

    The constant of "constant" is `stream.constants["length"]`, tokens per episode. A row whose token weights are all 0
    is out of the denominator; a single token of weight 0 stays in.
    """
    if not stream.rows:
        return []
    lengths = [len(row.at) for row in stream.rows]
    token = [row.columns[stream.token_weight] if stream.token_weight else np.ones(len(row.at)) for row in stream.rows]
    length = stream.constants.get("length")
    base = weights(
        stream.denominator,
        np.repeat(np.arange(len(lengths)), lengths),
        traces=[row.trace.key for row in stream.rows],
        groups=[row.trace.group_key for row in stream.rows],
        turns=np.concatenate([row.turns for row in stream.rows]),
        constant=None if length is None else float(length),
        mask=np.repeat([bool(np.any(w)) for w in token], lengths),
    )
    return np.split(stream.weight * base * np.concatenate(token), np.cumsum(lengths)[:-1])


def _units(
    denominator: str,
    index: NDArray[np.int64],
    traces: Sequence[Hashable] | None,
    groups: Sequence[Hashable] | None,
    turns: ArrayLike | None,
) -> NDArray[np.int64]:
    """[N] the unit, 0 .. U-1, whose token mean a token is part of."""
    if denominator == "token":
        return np.zeros_like(index)
    if denominator == "sequence":
        return index
    if denominator == "episode":
        return _codes(traces, "traces", index)
    if denominator == "group":
        return _codes(groups, "groups", index)
    if denominator != "turn":
        raise ValueError(f"denominator {denominator!r} does not exist: the names are {', '.join(DENOMINATORS)}")
    if turns is None or np.shape(turns) != index.shape:
        raise ValueError("denominator 'turn' needs `turns`, the turn of each token")
    pairs = np.stack([_codes(traces, "traces", index), np.asarray(turns, np.int64)])
    return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)


def _codes(keys: Sequence[Hashable] | None, name: str, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] number of the key of each token's row."""
    if keys is None:
        raise ValueError(f"this denominator needs `{name}`, one key per row")
    if len(index) and index.max() >= len(keys):
        raise ValueError(f"row index {index.max()} is beyond the {len(keys)} {name}: one key per row")
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    return codes[index]
