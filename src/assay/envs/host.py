"""The worker's side of workers.py: `python -m assay.envs.host` hosts many environments, one a slot. inline.py uses it too.

It answers one line of JSON with one line, in order, and writes how many requests it has begun into shared memory, so
that the parent knows what it was executing when it died. Whatever the environments' code raises becomes an answer.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from assay.protocols import SPLITS, UserError
from assay.rng import digest, stable_hash

FLUSH_S = 0.005  # answers are held back no longer than this while further requests wait
ERROR_LENGTH = 500  # characters of an exception's text that are kept
FACTS = ("success", "valid", "noop")
POWERS = ("size", "expert", "snapshot", "evidence", "prepare")


class Malformed(Exception):
    """The environment returned what the contract does not allow; the message names the field."""


class Host:
    """One environment per slot, made when it is first needed and thrown away when it raised."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.envs: dict[int, Any] = {}
        self.spare: Any = None  # made at the start, to find a wrong setting at once
        self.playing: set[int] = set()
        self.snapshots: dict[int, dict[int, Any]] = {}

    def answer(self, op: str, slot: int, argument: Any) -> bytes:
        """One line for the pipe; whatever the environment's code raises becomes its error."""
        try:
            value = getattr(self, op)(slot, argument)
            return line_of([slot, "", value])
        except (Exception, SystemExit) as error:  # any code may run here: all of it is the environment's fault
            self.envs.pop(slot, None)
            self.playing.discard(slot)
            return line_of([slot, _describe(error), None])

    def reset(self, slot: int, task: list[Any]) -> list[Any]:
        split, task_id = task
        if slot not in self.envs:
            self.envs[slot] = self.make() if self.spare is None else self.spare
            self.spare = None
        self.snapshots.pop(slot, None)
        seed = int.from_bytes(digest("reset", split, task_id)[:4], "little") >> 1  # for those that know no options
        result = self.envs[slot].reset(seed=seed, options={"task": task_id, "split": split})
        values = _checked("reset", result, observation=str, info=dict)
        self.playing.add(slot)
        return values

    def step(self, slot: int, action: str) -> list[Any]:
        result = self._env(slot).step(action)
        values = _checked("step", result, observation=str, reward=float, terminated=bool, truncated=bool, info=dict)
        for name in FACTS:  # a text such as "no" would count as a yes
            if not isinstance(fact := values[4].get(name), bool | np.bool_ | None) and fact not in (0, 1):
                raise Malformed(f"step returned info[{name!r}] = {fact!r:.80}, not a bool")
        return values

    def snapshot(self, slot: int, handle: int) -> None:
        self.snapshots.setdefault(slot, {})[handle] = self._env(slot).snapshot()

    def restore(self, slot: int, handle: int) -> None:
        self._env(slot).restore(self.snapshots[slot][handle])

    def ask(self, slot: int, power: str) -> Any:
        return getattr(self._env(slot), power)()

    def replay(self, slot: int, log: list[Any]) -> None:
        """Play an episode again; ValueError where an observation is not what it was."""
        split, task_id, actions, hashes = log
        observation = self.reset(slot, [split, task_id])[0]
        for turn, expected in enumerate(hashes):
            if stable_hash(observation) != expected:
                raise Malformed(f"replay of {split}/{task_id}: the observation of turn {turn} is not what it was")
            if turn < len(actions):
                observation = self.step(slot, actions[turn])[0]

    def _env(self, slot: int) -> Any:
        if slot not in self.playing:
            raise Malformed("no episode: the environment was not reset")
        return self.envs[slot]


def _checked(call: str, result: Any, **fields: type) -> list[Any]:
    """The tuple's values as plain types; Malformed names the field that is not of its type."""
    names = ", ".join(fields)
    if not isinstance(result, tuple) or len(result) != len(fields):
        found = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise Malformed(f"{call} returned {found}, not ({names})")
    values: list[Any] = []
    for (name, kind), value in zip(fields.items(), result, strict=True):
        plain = value.item() if isinstance(value, np.generic) else value
        if kind is float and isinstance(plain, int | float):  # a bool reward is a number as well
            plain = float(plain)
            if not np.isfinite(plain):
                raise Malformed(f"{call} returned {name} {plain}, not a finite number")
        if not isinstance(plain, kind):
            raise Malformed(f"{call} returned {name} of type {type(value).__name__}, not {kind.__name__}")
        values.append(plain)
    return values


def _plain(value: Any) -> Any:
    """numpy and sets for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise Malformed(f"a value of type {type(value).__name__} in info or evidence is not JSON: {value!r:.80}")


def line_of(message: list[Any]) -> bytes:
    """UnicodeEncodeError for half a surrogate pair: no tokenizer, hash or file downstream could take it."""
    return json.dumps(message, default=_plain, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _describe(error: BaseException) -> str:
    """ "ValueError: what (file.py:12 in step)"; the place is the last one outside this file."""
    said = str(error).encode(errors="replace").decode()[:ERROR_LENGTH]
    if isinstance(error, Malformed):
        return f"malformed: {said}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {said}{place}"


def _spec(env: Any) -> dict[str, Any]:
    return {
        "version": str(getattr(env, "version", "0")),
        "skills": list(getattr(env, "skills", ())),
        "instructions": str(getattr(env, "instructions", "")),
        "brief": str(getattr(env, "brief", "")),
        "powers": [power for power in POWERS if hasattr(env, power)],
        "sizes": {split: _size(env, split) for split in SPLITS},
    }


def _size(env: Any, split: str) -> int | None:
    size = env.size(split) if hasattr(env, "size") else None
    if size is not None and (not isinstance(size, int | np.integer) or size < (split == "train")):
        raise Malformed(f"size({split!r}) returned {size!r}, not a number of tasks or None")
    return None if size is None else int(size)


def end_with(parent: int) -> bool:
    """Lets this process end when its parent does, also when hung, and when the parent is killed with -9; False where it
    has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        return os.getppid() == parent
    return True


def main() -> None:
    """`python -m assay.envs.host REQUESTS ANSWERS BEGUN PARENT`: file descriptors, and the parent's process id."""
    requests, answers, begun_fd, parent = (int(argument) for argument in sys.argv[1:])
    if not end_with(parent):
        return
    begun = mmap.mmap(begun_fd, 8)
    count = 0
    host: Host | None = None
    rest = b""
    held: list[bytes] = []
    while chunk := os.read(requests, 1 << 18):  # empty: the parent is gone
        *lines, rest = (rest + chunk).split(b"\n")
        flushed = time.monotonic()
        for line in lines:
            op, slot, argument = json.loads(line)
            count += 1
            begun[:] = struct.pack("q", count)
            if host is None:
                sys.path[:] = argument["path"]
                host, reply = begin(argument["name"], argument["settings"])
                held.append(reply)
            else:
                held.append(host.answer(op, slot, argument))
            if (now := time.monotonic()) - flushed > FLUSH_S:
                _write(answers, held)
                flushed = now
        _write(answers, held)


def begin(name: str, settings: Mapping[str, Any]) -> tuple[Host, bytes]:
    """Make the first environment, so that a wrong name or setting is known at once: (host, its answer with the spec)."""
    from assay.envs.registry import make  # after the worker's path is set

    host = Host(lambda: make(name, **settings))
    try:
        host.spare = host.make()
        return host, line_of([-1, "", _spec(host.spare)])
    except UserError as error:
        return host, line_of([-1, str(error), None])
    except (Exception, SystemExit) as error:  # the constructor of a user's environment
        return host, line_of([-1, f"environment {name!r} cannot be made: {_describe(error)}", None])


def _write(fd: int, held: list[bytes]) -> None:
    data = memoryview(b"".join(held))
    held.clear()
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
