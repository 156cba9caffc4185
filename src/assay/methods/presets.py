"""The baselines as presets over five slots: advantage, filter, gate on the ratio, aggregation, KL.

Sources and equations stand with the functions in advantages.py and losses.py. A class is for a paper with a state or a
stage of its own; none of these has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    line: str  # what it is
    paper: str  # where it is from
    slots: dict[str, Any]  # what differs from config.Slots' defaults
    fidelity: str = "paper"
    page: str = "baselines"  # docs/methods/PAGE.md


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "group mean and std, PPO clip, mean over episodes of token means",
        "arXiv 2402.03300",
        {"advantage": "grpo", "denominator": "episode"},
    ),
    "dr-grpo": Preset(
        "group mean only, one constant length: no length or difficulty bias",
        "arXiv 2503.20783",
        {"advantage": "dr-grpo", "denominator": "constant"},
    ),
    "rloo": Preset(
        "leave-one-out baseline, mean over tokens",
        "arXiv 2402.14740",
        {"advantage": "rloo", "denominator": "token"},
    ),
    "reinforce++": Preset(
        "token returns whitened over the batch",
        "arXiv 2501.03262",
        {"advantage": "reinforce++", "denominator": "token"},
    ),
    "reinforce++-baseline": Preset(
        "group mean, then whitened over the batch",
        "arXiv 2501.03262",
        {"advantage": "reinforce++-baseline", "denominator": "token", "kl_kind": "k2"},
    ),
    "ppo": Preset(
        "GAE with a critic, PPO clip with dual clip 3, mean over tokens",
        "arXiv 1707.06347",
        {"advantage": "gae", "denominator": "token", "dual_clip": 3.0},
    ),
    "dapo": Preset(
        "clip-higher, mean over tokens, groups with mixed outcomes only",
        "arXiv 2503.14476",
        {"advantage": "grpo", "denominator": "token", "clip_high": 0.28, "dual_clip": 10.0, "keep": "mixed"},
        fidelity="reconstruction",  # without overlong shaping: turns here have a hard token limit
    ),
    "gspo": Preset(
        "one ratio per episode, the geometric mean of its tokens'",
        "arXiv 2507.18071",
        {"advantage": "grpo", "gate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "denominator": "episode"},
    ),
    "cispo": Preset(
        "weights capped instead of gradients clipped",
        "arXiv 2506.13585",
        {"advantage": "grpo", "gate": "cispo", "clip_high": 5.0, "denominator": "token"},
    ),
    "ppo-turn": Preset(
        "GAE over turns with a critic of turns, PPO clip with dual clip 3, mean over tokens",
        "arXiv 1707.06347",
        {"advantage": "turn-gae", "denominator": "token", "dual_clip": 3.0, "gamma": 0.95},
        fidelity="inferred",  # as agent frameworks have it, after the turn-level part of RAGEN's bi-level GAE
        page="ppo",
    ),
    "gigpo": Preset(
        "group advantage plus that of steps with the same observation, mean over tokens",
        "arXiv 2505.10978",
        {"advantage": "gigpo", "denominator": "token", "gamma": 0.95},
        page="gigpo",
    ),
    "hgpo": Preset(
        "steps compared under ever longer shared histories, mean over tokens",
        "Hierarchy-of-Groups Policy Optimization, ICLR 2026",
        {"advantage": "hgpo", "denominator": "token", "gamma": 0.95},
        page="gigpo",
    ),
    "starpo-s": Preset(
        "PPO with a critic on the quarter of the groups whose rewards differ most",
        "arXiv 2504.20073",
        {"advantage": "gae", "denominator": "token", "clip_high": 0.28, "keep": "top-std"},
        fidelity="reconstruction",  # without the entropy bonus of .001: no loss here has one
    ),
    "dppo": Preset(
        "tokens whose probability has moved too far are dropped, mean over tokens",
        "arXiv 2602.04879",
        {"advantage": "grpo", "gate": "dppo", "denominator": "token"},
        fidelity="reconstruction",  # the ratio refers to the learner's old policy, the bound to the sampler's
    ),
    "clip-cov": Preset(
        "some tokens of high covariance between advantage and log-prob get no gradient",
        "arXiv 2505.22617",
        {"advantage": "grpo", "gate": "clip-cov", "clip_low": 1.0, "clip_high": 1.0, "denominator": "token"},
        fidelity="reconstruction",  # covariance over the optimiser step, from the log-probs before its first update
    ),
    "kl-cov": Preset(
        "the tokens of highest covariance between advantage and log-prob are held back by a KL",
        "arXiv 2505.22617",
        {"advantage": "grpo", "gate": "kl-cov", "cov_share": 2e-3, "gate_penalty": 1.0, "denominator": "token"},
        fidelity="reconstruction",  # as clip-cov
    ),
    "opo": Preset(
        "baseline weighted by length, no bound on the ratio, mean over tokens",
        "arXiv 2505.23585",
        {"advantage": "opo", "gate": "none", "denominator": "token"},
    ),
    "gpg": Preset(
        "group mean only, no bound on the ratio, dead groups shrink no step",
        "arXiv 2504.02546",
        {"advantage": "gpg", "gate": "none", "denominator": "token"},
        fidelity="reconstruction",  # from a description of it
    ),
    "sapo": Preset(
        "a soft gate instead of a clip",
        "arXiv 2511.20347",
        {"advantage": "grpo", "gate": "sapo", "denominator": "episode"},
    ),
}
