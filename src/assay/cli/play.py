"""`assay play`: one episode in the terminal, turn by turn; of an expert, of chance, of a policy, or yours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import numpy as np
from pydantic import Field, create_model
from rich.console import Console
from rich.text import Text

from assay.cli.commands import policy_config
from assay.cli.flags import Help, Line, read, show_help
from assay.cli.layers import env_model, filled, section
from assay.config import RunConfig, Section, environments
from assay.envs.registry import make
from assay.protocols import SPLITS, UserError
from assay.rng import generator

SHOWN = 12  # admissible actions that are listed; a person who plays sees all
Act = Callable[[int, dict[str, Any]], tuple[str, str]]  # turn, info -> action, what is known of how it was made


class Stop(Exception):
    """The player has no further action; the message says why."""


class Play(Section):
    env: str | None = None
    """Environment; absent: the run's, else babyai/GoToLocal."""
    policy: str = "expert"
    """expert (the environment's solver), random (admissible actions), me (the keyboard), a run directory, or a model."""
    task: int = Field(0, ge=0)
    """Which task of the split."""
    split: str = "train"
    """train, iid or ood."""
    greedy: bool = False
    """A policy takes its most likely token; else it samples at the run's temperature."""
    seed: int = Field(0, ge=0)
    """Of what is drawn: by chance, or by a policy."""


def play(line: Line) -> int:
    policy, name = line.value("policy") or Play().policy, line.value("env")
    config = _config(policy, name)
    if len(environments(config)) > 1:
        raise UserError(f"an episode is of one environment: give --env, one of {', '.join(environments(config))}")
    model = _with_settings(config.env)
    examples = ("play --env countdown", "play --env textworld-cooking --policy me --task 3", "play --policy runs/NAME")
    page = Help("play", "Watch or play one episode.", examples)
    if line.wants_help:
        return show_help(page, model, _shown(model, config))
    asked: Any = read(line, model, page)
    if asked.split not in SPLITS:
        raise UserError(f"--split {asked.split}: the splits are {', '.join(SPLITS)}")
    given = getattr(asked, "env_args", None)
    env_args = {**config.env_args, **(given.model_dump(exclude_unset=True) if given else {})}
    config = config.model_copy(update={"env_args": env_args})
    with redirect_stdout(sys.stderr):  # what an environment prints is no part of the episode
        env: Any = make(config.env, **config.env_args)
    act = ACTORS[policy](env, asked) if policy in ACTORS else _policy(config, policy, asked)
    episode(Console(highlight=False, soft_wrap=True), env, config.env, asked.split, asked.task, act, policy == "me")
    return 0


def _config(policy: str, env: str | None) -> RunConfig:
    if policy in ACTORS:
        return RunConfig(env=env or RunConfig().env)
    return policy_config(policy, env)


def _with_settings(env: str) -> type[Play]:
    settings = env_model(env)
    if not settings.model_fields:
        return Play
    fields: dict[str, Any] = {"env_args": (settings, Field(default=None, description=f"Settings of {env}."))}
    return create_model("PlayFlags", __base__=Play, **fields)


def _shown(model: type[Play], config: RunConfig) -> Play:
    if "env_args" not in model.model_fields:
        return model()
    filled_in: Any = {"env_args": filled(section(model, "env_args"), config.env_args)}
    return model.model_construct(**filled_in)


def episode(out: Console, env: Any, name: str, split: str, task: int, act: Act, all_actions: bool) -> None:
    """Plays and shows it. All text of the environment is printed as it is, never as markup."""
    with redirect_stdout(sys.stderr):
        observation, info = env.reset(options={"task": task, "split": split})
    out.print(Text(f"{name}, {split} task {task}", style="bold"))
    if info.get("goal"):
        out.print(Text(f"goal: {info['goal']}"))
    total, turn, ended, cut = 0.0, 0, False, False
    while not (ended or cut):
        out.print(Text(f"\n{turn + 1}  {observation}"))
        _admissible(out, info.get("admissible"), all_actions)
        try:
            action, made = act(turn, info)
        except Stop as stop:
            out.print(Text(f"\nended after {turn} turns: {stop}"))
            return
        with redirect_stdout(sys.stderr):
            observation, reward, ended, cut, info = env.step(action)
        total, turn = total + reward, turn + 1
        out.print(Text(f"   > {action}", style="bold cyan"), Text("" if info.get("valid", True) else "(not valid)"))
        if made:
            out.print(Text(f"     {made}", style="dim"))
        if reward:
            out.print(Text(f"     reward {reward:g}"))
    outcome = "success" if info.get("success") else "failure" if ended else "horizon: out of turns"
    out.print(Text(f"\n   {observation}"))
    out.print(Text(f"{outcome} after {turn} turns, reward {total:g}", style="bold"))


def _admissible(out: Console, actions: list[str] | None, everything: bool) -> None:
    if not actions:
        return
    if everything:
        out.print(Text("   " + "  ".join(f"{i}: {action}" for i, action in enumerate(actions, 1)), style="dim"))
    else:
        more = f" and {len(actions) - SHOWN} more" if len(actions) > SHOWN else ""
        out.print(Text("   can: " + ", ".join(actions[:SHOWN]) + more, style="dim"))


# ------------------------------------------------------------------------------------------------------------ players


def _expert(env: Any, asked: Play) -> Act:
    if not hasattr(env, "expert"):
        raise UserError("this environment has no expert(): --policy random, me, or a run directory")
    return lambda turn, info: (env.expert(), "")


def _random(env: Any, asked: Play) -> Act:
    draw = generator(asked.seed, "play", asked.task)

    def act(turn: int, info: dict[str, Any]) -> tuple[str, str]:
        actions = info.get("admissible")
        if not actions:
            raise UserError("this environment names no admissible actions to draw from: --policy expert or me")
        return str(actions[int(draw.integers(len(actions)))]), ""

    return act


def _me(env: Any, asked: Play) -> Act:
    def act(turn: int, info: dict[str, Any]) -> tuple[str, str]:
        print("   ? ", end="", flush=True)
        line = sys.stdin.readline()
        if not sys.stdin.isatty():
            print()  # nobody pressed return
        if not line:
            raise Stop("no more input")
        text, actions = line.strip(), info.get("admissible") or []
        number = int(text) if text.isdecimal() else 0
        return (str(actions[number - 1]), "") if 1 <= number <= len(actions) and text not in actions else (text, "")

    return act


ACTORS: dict[str, Callable[[Any, Play], Act]] = {"expert": _expert, "random": _random, "me": _me}


def _policy(config: RunConfig, policy: str, asked: Play) -> Act:
    """The policy plays first, as in a run; what is shown is the same actions in the same task again."""
    from assay.cli.policy import open_policy
    from assay.rollout import Job

    with open_policy(config, policy) as bench:
        driver = bench.driver(0.0 if asked.greedy else config.temperature, asked.seed)
        (trace,) = driver.collect([Job(asked.task, asked.split)], bench.sampler.version)
        decode = bench.renderer.decode
    if trace.error:
        raise UserError(f"environment {config.env!r} failed on {asked.split} task {asked.task}: {trace.error}")
    made = [" ".join(_tokens(turn, decode)) for turn in trace.turns]

    def act(turn: int, info: dict[str, Any]) -> tuple[str, str]:
        if turn >= len(trace.turns):
            raise Stop(f"{trace.outcome} by a token limit (max_episode_tokens or the model's context)")
        return trace.turns[turn].action, made[turn]

    return act


def _tokens(turn: Any, decode: Callable[[Any], str]) -> Iterator[str]:
    """Each sampled token with its log-prob and the entropy it was drawn at, in nats."""
    for token, logprob, entropy in zip(turn.ids, turn.logprobs, turn.entropies, strict=True):
        yield f"{decode(np.array([token]))!r} {logprob:.2f} (H {entropy:.2f})"
