"""The environment of the step benchmark: exactly `turns` turns of 10 to 20 words, whatever the policy answers.

Word counts depend on (task, turn) only and words on the last action too, so that two sides which sample different
actions still do the same work. Both sides import this file; it needs numpy and gymnasium alone.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import gymnasium
import numpy as np

SPECIAL = ["<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = ["<tool_call>", "</tool_call>"]
DIRECTIONS = ["north", "south", "east", "west", "up", "down", "in", "out"]
ACTIONS = [f'{{"name": "act", "arguments": {{"word": "{word}"}}}}' for word in DIRECTIONS]  # one token each
REWARDS = [
    0.0,
    0.11,
    0.23,
    0.31,
    0.53,
    0.59,
    0.83,
    1.0,
]  # of the last action: a group's mean is hardly ever one of them
VOCABULARY = 2048
WORDS = [f"w{i}" for i in range(VOCABULARY - len(SPECIAL) - len(CALL) - len(ACTIONS))]
INSTRUCTIONS = " ".join(WORDS[:10])
TURN_TOKENS = 4  # <tool_call>, one of ACTIONS, </tool_call>, <|end|>


def words(count: int, *key: int) -> str:
    """`count` words that are a function of the key."""
    return " ".join(WORDS[i] for i in np.random.default_rng(key).integers(0, len(WORDS), count))


def observation(task: int, turn: int, action: int) -> str:
    """10 to 20 words."""
    return words(10 + int(np.random.default_rng((task, turn)).integers(0, 11)), task, turn, action)


def action_of(text: str) -> int:
    """Index of the direction that an answer names; the last one if it names none."""
    return next((i for i, action in enumerate(ACTIONS) if action in text), len(ACTIONS) - 1)


class World(gymnasium.Env[str, str]):
    """Success is a reward above one half. The task is over after `turns` actions and never before."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium declares it so)
    version = "1"
    skills: ClassVar[tuple[str, ...]] = ()
    instructions = INSTRUCTIONS
    brief = INSTRUCTIONS

    def __init__(self, turns: int = 5) -> None:
        self.observation_space = gymnasium.spaces.Text(1024)
        self.action_space = gymnasium.spaces.Text(1024)
        self.turns, self.task, self.turn = turns, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        task = (options or {}).get("task")
        self.task, self.turn = int(self.np_random.integers(2**31)) if task is None else int(task), 0
        content = hashlib.blake2b(str(self.task).encode(), digest_size=8).hexdigest()
        return observation(self.task, 0, 0), {"hash": content, "goal": goal(self.task), "horizon": self.turns}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        index, done = action_of(action), self.turn >= self.turns
        reward = REWARDS[index] if done else 0.0
        info = {"valid": True, "success": reward > 0.5, "skill": "other", "noop": False}
        return observation(self.task, self.turn, index), reward, done, False, info


def goal(task: int) -> str:
    """6 words."""
    return words(6, task)
