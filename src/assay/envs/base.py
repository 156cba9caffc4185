"""What the built-in environments share: text spaces, and splits that are disjoint by content.

A split is a set of *content hashes*, not of seeds: candidate seeds of a task id are tried in a fixed order until the
content they give hashes into the split's bucket. So "train" and "iid" can never share a layout, whatever the seed.
"""

from __future__ import annotations

import string
from typing import Any, ClassVar

import gymnasium

from assay.protocols import SPLITS, UserError
from assay.rng import digest, stable_hash

CHARSET = string.printable
IID_SHARE = 5  # one content hash in five belongs to "iid", the others to "train"
TASKS = 1 << 31  # ids of a split without end are below it
TRIES = 1000  # candidate seeds of one task id; (4/5)^1000 is never


def bucket(content_hash: str) -> str:
    """ "train" or "iid", a function of the content hash alone."""
    return "iid" if int(content_hash, 16) % IID_SHARE == 0 else "train"


def candidate_seed(environment: str, split: str, task: int, attempt: int) -> int:
    """A 31-bit seed; the attempt counts candidates whose content belonged to another split."""
    return int.from_bytes(digest(environment, split, task, attempt)[:4], "little") >> 1


def check_task(environment: str, task: int) -> None:
    """UserError for an id out of range."""
    if not 0 <= task < TASKS:
        raise UserError(f"{environment}: task is {task}; a task id is a number from 0 to {TASKS - 1}")


class TextEnv(gymnasium.Env[str, str]):
    """Base of the built-in environments. A user's own environment need not derive from it."""

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 (gymnasium declares it so)
    render_mode: str | None = None
    version: str = "1"
    skills: ClassVar[tuple[str, ...]] = ()
    instructions: str = ""
    brief: str = ""

    def __init__(self, observation_length: int = 4096, action_length: int = 256) -> None:
        self.observation_space = gymnasium.spaces.Text(observation_length, min_length=0, charset=CHARSET)
        self.action_space = gymnasium.spaces.Text(action_length, min_length=0, charset=CHARSET)

    def size(self, split: str) -> int | None:
        """Number of tasks of a split; None means unbounded."""
        return None

    def pick(self, seed: int | None, options: dict[str, Any] | None) -> tuple[str, int]:
        """(split, task id) that a `reset` asks for; without options, a training task drawn from the seeded generator."""
        super().reset(seed=seed)
        split = (options or {}).get("split", "train")
        if split not in SPLITS:
            raise UserError(f"split {split!r} does not exist: the splits are {', '.join(SPLITS)}")
        task = (options or {}).get("task")
        return split, int(self.np_random.integers(TASKS)) if task is None else int(task)

    def anchor(self, observation: str) -> str:
        return stable_hash(observation)
