"""The configuration of a run: pydantic models whose field docstrings are the help text; TOML in and out.

Quantities are named by their unit. Absent means None. Unknown keys are errors that name the nearest key. A preset fills
in what the user did not say; the configuration that a run writes is complete and re-runs it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from assay.methods.presets import PRESETS
from assay.methods.registry import PAPERS, check_names
from assay.protocols import UserError

BUDGETS = {"steps": "steps", "episodes": "episodes", "tokens": "tokens", "env-steps": "env_steps"}  # -> Trainer.spent
WITHOUT_END = 1_000_000  # steps of a run that ends by its budget
DEFAULT_HOST = "grpo"  # around which a method of one's own goes when no preset is named


class Section(BaseModel):
    """Strict: no unknown keys, no silent conversions of text to numbers, attribute docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_assignment=True, strict=True, allow_inf_nan=False
    )


class Slots(Section):
    """What a baseline is made of: five slots. A preset (grpo, dr-grpo, ...) fills them; each can be set by hand."""

    advantage: Literal[
        "grpo",
        "dr-grpo",
        "rloo",
        "reinforce++",
        "reinforce++-baseline",
        "gae",
        "turn-gae",
        "gigpo",
        "hgpo",
        "opo",
        "gpg",
    ] = "grpo"
    """Estimator, unless a further method sets it: group mean and std, group mean, leave-one-out, whitened token returns,
    the same with a group baseline, GAE with a critic over tokens or over turns, steps compared with others that began
    with the same observation (gigpo) or history (hgpo), group mean weighted by length (opo), or group mean scaled up by
    the share of dead groups (gpg)."""
    keep: Literal["all", "mixed", "top-std"] = "all"
    """Which groups to train on: all, those with both successes and failures (dynamic sampling; refills), or the
    keep_share of each environment's groups whose rewards differ most."""
    keep_share: float = Field(0.25, gt=0, le=1)
    """Share of the groups that keep = "top-std" trains on (StarPO-S: 0.25)."""
    gate: Literal["ppo", "none", "cispo", "gspo", "sequence", "sapo", "dppo", "clip-cov", "kl-cov"] = "ppo"
    """How the probability ratio is bounded (dppo: the probability itself), or which tokens a covariance holds back."""
    clip_low: float = Field(0.2, gt=0)
    """Lower bound: ratios below 1 - clip_low get no gradient where the advantage is negative."""
    clip_high: float = Field(0.2, gt=0)
    """Upper bound: ratios above 1 + clip_high get no gradient where the advantage is positive (cispo: the weight cap)."""
    gate_penalty: float = Field(0.0, ge=0)
    """kl-cov: weight of the chosen tokens' |log ratio| (paper: 1); dppo: of every token's squared one (prime-rl: 0.001)."""
    cov_share: float = Field(2e-4, gt=0, le=1)
    """clip-cov, kl-cov: share of an optimiser step's tokens that are chosen, at least one. A fraction, not per cent."""
    cov_low: float = 1.0
    """clip-cov: covariances up to this are never chosen (paper: 1, made for advantages of spread 1)."""
    cov_high: float = 5.0
    """clip-cov: covariances from this on are never chosen (paper: 5)."""
    correction: Literal["none", "tis", "tis-sequence", "icepop"] = "none"
    """Weight of each token for samples that the learner's policy would not have drawn alike: its probability ratio to
    the sampler cut off at correction_cap, that of its whole episode, or 0 outside [correction_low, correction_cap]."""
    correction_cap: float = Field(2.0, gt=0)
    """Largest weight of the correction (icepop: above it, 0)."""
    correction_low: float = Field(0.5, ge=0)
    """icepop: below this ratio a token counts 0."""
    dual_clip: float | None = Field(None, gt=1)
    """Cap on the ratio of tokens with negative advantage; absent: none."""
    denominator: Literal["token", "sequence", "turn", "episode", "group", "constant"] = "episode"
    """What the summed loss is divided by, over the whole optimiser step: all tokens, or the mean over rows, turns,
    episodes or groups of their token means, or episodes x constant_tokens."""
    constant_tokens: int | None = Field(None, gt=0)
    """Tokens per episode for the constant denominator; absent: the episode's token budget."""
    kl: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference model enters."""
    kl_kind: Literal["k1", "k2", "k3", "k1+", "k3+", "is_k3"] = "k3"
    """Estimator of that KL in the loss (in the reward it is k1)."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL to the reference."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda, per sampled token (turn-gae: per turn)."""
    advantage_norm: Literal["std", "mean"] = "std"
    """gae, turn-gae: the batch's advantages made mean 0 and spread 1, or mean 0 only."""
    step_weight: float = Field(1.0, ge=0)
    """gigpo: weight of the step's advantage beside the episode's (paper: 1)."""
    step_norm: Literal["std", "none"] = "std"
    """gigpo, hgpo: what centred returns and rewards are divided by, their group's std or nothing."""
    history: int = Field(2, ge=0)
    """hgpo: turns of shared history that are looked back on (paper: 2 or 4); 0: the present observation only."""
    step_alpha: float = Field(1.0, ge=0)
    """hgpo: how much more a longer shared history counts (paper: 1); 0: all alike."""
    invalid_penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward of every turn whose action was invalid, in reward units (GiGPO's scripts: 0.1)."""
    overlong_cache: int = Field(0, ge=0)
    """Sampled tokens before max_episode_tokens over which a penalty on an episode's score grows to overlong_factor
    (DAPO: a fifth of the limit); 0: none."""
    overlong_factor: float = Field(1.0, gt=0)
    """Largest penalty on the score of an overlong episode, in reward units."""


class WarmStart(Section):
    """Tune the policy on imperfect expert episodes before RL, so that there are successes to learn from."""

    episodes: int = Field(0, ge=0)
    """How many demonstrated episodes; 0: none."""
    noise: float = Field(0.3, ge=0, le=1)
    """Share of the demonstrated actions that are random admissible ones."""
    passes: int = Field(1, ge=1)
    """Passes over these episodes."""
    learning_rate: float = Field(1e-3, gt=0)
    """AdamW learning rate of the warm start."""
    rows_per_update: int = Field(8, ge=1)
    """Episodes per optimiser step: many small updates learn faster here."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the episodes and their order; not the run's seed, so that runs share their start."""
    from_scratch: bool = False
    """Forget the checkpoint's weights first: the policy then knows these episodes and nothing else."""


class Evaluation(Section):
    """The fixed panel of held-out tasks."""

    tasks: int = Field(200, ge=0)
    """Tasks per split of the panel, one episode each; 0: no evaluation."""
    ood: bool = True
    """Also evaluate on the out-of-distribution split."""
    greedy: bool = True
    """Also evaluate with greedy decoding."""
    before: bool = True
    """Evaluate before training too, not only after it."""
    every: int = Field(0, ge=0)
    """Evaluate sampled success on iid every so many steps as well; 0: only before and after."""


class Runtime(Section):
    """Where and how it runs. Nothing here may change what is learnt, but for rounding."""

    workers: int = Field(1, ge=0, le=1024)
    """Environment worker processes; 0: environments in this process, without isolation, time-outs and captured output."""
    step_timeout_s: float = Field(60.0, gt=0, le=1e6)
    """An environment that takes longer is killed: environment error. Needs workers."""
    concurrency: int = Field(128, ge=1, le=65536)
    """Episodes in flight at once."""
    delay_ticks: int = Field(1, ge=1)
    """Decode ticks until an environment's answer is taken: part of what fixes the order of arithmetic."""
    tokens_per_forward: int = Field(16384, ge=1)
    """Tokens per micro-batch: bounds memory, changes no value beyond rounding."""
    threads: int = Field(1, ge=1, le=1024)
    """Torch threads. Small policies are fastest with one."""
    device: str = "cpu"
    """Torch device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights' type."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the last ones are kept."""
    traces_every: int = Field(1, ge=0)
    """Steps between those whose traces are written; 0: only the evaluations'."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """After a loss or gradient that is not finite: skip the update, or stop. Either way its rows are saved and named."""
    guard: bool = True
    """Say in one line what silently ruins a run, as soon as its first batches or its metrics show it."""
    loggers: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Beside metrics.jsonl."""


class RunConfig(Section):
    """Train a language-model agent with RL over many turns."""

    env: str = "babyai/GoToLocal"
    """Environment: a name from `assay envs`, or your own as mypkg.module:Class; several, with commas, are a mixture."""
    env_args: dict[str, Any] = {}
    """Settings of the environment; of a mixture, those of each by its name."""
    env_shares: list[float] | None = None
    """Share of tasks_per_step of each environment of a mixture, in the order named, in any unit; absent: equal."""
    method: list[str] = ["grpo"]
    """A preset from `assay methods` (absent: grpo), then further methods in the order they apply, with spaces or commas
    between them; your own as mypkg.module:Class."""
    method_args: dict[str, dict[str, Any]] = {}
    """Settings of each further method, by its name; as flags --NAME.SETTING."""
    model: str = "tiny-1m"
    """A built-in policy from `assay models`, a local folder, or a hub name."""
    lora_rank: int | None = Field(None, ge=1)
    """Train a low-rank adapter of this rank on all projections; absent: all weights."""
    lora_alpha: int = Field(16, gt=0)
    """Scale of the adapter, over its rank."""
    thinking: Literal["off", "keep"] = "off"
    """Ask the chat template for no thinking block, or let the policy think and keep the block in later turns' context."""
    prompt: Literal["auto", "brief", "full"] = "auto"
    """The environment's brief or full instructions; auto: brief for built-in policies."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Every draw of the run derives from it."""
    steps: int = Field(100, ge=0)
    """Training steps: collect a batch, update on it."""
    budget: str | None = None
    """What ends the run instead of `steps`, so that unlike methods spend alike: env-steps:200k, tokens:2M or episodes:10k.
    The step that reaches it is the last; schedules take it as the whole."""
    planned_steps: int | None = Field(None, ge=1)
    """What schedules take as the whole; absent: steps. Extending a run keeps it."""
    tasks_per_step: int = Field(16, ge=1, le=9999)
    """Task instances, one group each."""
    rollouts_per_task: int = Field(8, ge=1, le=9999)
    """Episodes per group."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps per batch, each on its own share of the tasks."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch."""
    rounds: int = Field(3, ge=1, le=100)
    """Collection rounds per step at most, when `keep` drops groups."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over the planned budget."""
    warmup_steps: int = Field(5, ge=0)
    """Optimiser steps over which the learning rate rises."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    temperature: float = Field(1.0, ge=0.001, le=1000)
    """Sampling temperature while training; log-probs, entropies and KL are taken at it."""
    layout: str = "append"
    """History: append (one row per episode) or window(K) (one row per turn with the last K turns)."""
    max_turn_tokens: int = Field(16, ge=1)
    """Sampled tokens per turn at most."""
    max_episode_tokens: int = Field(1024, ge=1)
    """Tokens per episode at most: what does not fit is outcome `cut`."""
    cut: Literal["failure", "drop"] = "failure"
    """Episodes ended by a token limit: train on them with the reward they have, or leave them out. Counted either way."""
    slots: Slots = Slots()
    """Parts of the preset."""
    warm_start: WarmStart = WarmStart()
    """Imitation before RL."""
    evaluation: Evaluation = Evaluation()
    """Held-out panel."""
    runtime: Runtime = Runtime()
    """Processes, memory, checkpoints."""
    out: str | None = None
    """Run directory; absent: runs/ENV-METHOD-MODEL-sSEED."""


def parse(values: dict[str, Any], where: str) -> RunConfig:
    """A configuration from nested keys; UserError names the key, what was found and the nearest name."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error, where)) from error


def load(path: Path) -> dict[str, Any]:
    """The nested keys of a TOML file, or of a run directory's config.toml."""
    path = path / "config.toml" if path.is_dir() else path
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: give a .toml file or a run directory") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def resolve(values: dict[str, Any], where: str) -> RunConfig:
    """A complete configuration: the preset's slots under the user's keys."""
    config = parse(values, where)
    methods = method_names(config.method)
    if not methods:
        raise UserError(f"{where}: method is empty: name a preset, {', '.join(PRESETS)}")
    try:
        check_names(methods, config.method_args)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    _check_mixture(config, where)
    values = values | {"method": methods, "env": ",".join(environments(config))}
    name = methods[0]
    if config.budget is not None:
        parse_budget(config.budget, where)
        values = {"steps": WITHOUT_END} | values
    slots = overlay(Slots().model_dump(exclude_none=True), PRESETS[name].slots)
    return parse(overlay(values, {"slots": overlay(slots, values.get("slots", {}))}), where)


def method_names(given: Sequence[str]) -> list[str]:
    """Methods as they apply: "grpo,aem" names two, and one that goes around a host has one before it."""
    names = [name.strip() for part in given for name in part.split(",") if name.strip()]
    around = bool(names) and (":" in names[0] or names[0] in PAPERS)
    return [DEFAULT_HOST, *names] if around else names


def split_env(text: str) -> list[str]:
    """The environments that `env` names, in order."""
    return [name.strip() for name in text.split(",") if name.strip()]


def environments(config: RunConfig) -> list[str]:
    """Names of the run's environments as given: several are a mixture. UserError for none, or the same one twice."""
    names = split_env(config.env)
    if not names:
        raise UserError("env is empty: 'assay envs' lists the environments")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(
            f"env {config.env!r} names {twice[0]!r} twice: name it once and give it a larger share (env_shares)"
        )
    return names


def env_settings(config: RunConfig, name: str) -> dict[str, Any]:
    """Settings of one of the run's environments."""
    return config.env_args if len(environments(config)) == 1 else dict(config.env_args.get(name, {}))


def with_env(config: RunConfig, name: str) -> RunConfig:
    """The same run on one of its environments alone, for what plays or evaluates."""
    return config.model_copy(update={"env": name, "env_args": env_settings(config, name), "env_shares": None})


def task_quotas(config: RunConfig) -> dict[str, int]:
    """Environment -> tasks a step: `tasks_per_step` in proportion to the shares by largest remainder (ties: the one named
    first), at least one each, taken from the largest. UserError where that cannot be."""
    names, tasks = environments(config), config.tasks_per_step
    if tasks < len(names):
        raise UserError(
            f"tasks_per_step is {tasks}, and the mixture has {len(names)} environments: give at least one each"
        )
    shares = config.env_shares or [1.0] * len(names)
    if len(shares) != len(names) or min(shares) <= 0:
        raise UserError(f"env_shares {shares} does not fit: give one number above 0 for each of {', '.join(names)}")
    exact = [tasks * share / sum(shares) for share in shares]
    counts = [int(part) for part in exact]
    for i in sorted(range(len(names)), key=lambda i: (counts[i] - exact[i], i))[: tasks - sum(counts)]:
        counts[i] += 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return dict(zip(names, counts, strict=True))


def _check_mixture(config: RunConfig, where: str) -> None:
    try:
        names = list(task_quotas(config))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if len(names) == 1:
        return
    for key, item in config.env_args.items():
        if key not in names or not isinstance(item, dict):
            raise UserError(
                f"{where}: env_args.{key}: the settings of a mixture go by environment, one of {', '.join(names)}: "
                f'[env_args."{names[0]}"]'
            )


def parse_budget(text: str, where: str) -> tuple[str, int]:
    """("env-steps", 200_000) of "env-steps:200k"; UserError says what it must look like."""
    unit, _, amount = text.partition(":")
    try:
        number = float(amount.rstrip("kKM")) * {"k": 1e3, "K": 1e3, "M": 1e6}.get(amount[-1:], 1)
        if unit in BUDGETS and 1 <= number < 1e15 and amount[:1].isdigit():
            return unit, round(number)
    except ValueError:
        pass
    raise UserError(f"{where}: budget {text!r} is not UNIT:AMOUNT with a unit of {', '.join(BUDGETS)}: env-steps:200k")


def default_out(config: RunConfig) -> str:
    """runs/ENV-METHOD-MODEL-sSEED; environments and methods are joined by +."""
    parts = ["+".join(environments(config)), "+".join(config.method), Path(config.model).name, f"s{config.seed}"]
    return "runs/" + "-".join(p.replace("/", "-").replace(":", "-") for p in parts)


def dump(config: RunConfig) -> dict[str, Any]:
    """Nested keys without absent ones: what config.toml holds."""
    return config.model_dump(exclude_none=True)


def overlay(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = overlay(merged[key], value) if both else value
    return merged


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    found: dict[str, Any] = {}
    for name, item in values.items():
        found |= flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item}
    return found


def field_names(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """All keys, dotted."""
    names = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += field_names(inner, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def _explain(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = field_names()
        near = difflib.get_close_matches(key, names, 1, 0.4) or difflib.get_close_matches(
            key.rpartition(".")[2], [n.rpartition(".")[2] for n in names], 1, 0.4
        )
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{where}: unknown key {key!r}{hint}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}{more}"
