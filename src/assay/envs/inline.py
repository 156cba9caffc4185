"""Environments in this process (`--runtime.workers 0`): no start-up, no pipes, and none of what isolation gives.

The same requests and the same answers as `workers.Pool`: exceptions end their own episode only, and values go through
JSON, so a run gives the same bits. Not here: an environment that hangs or kills its process takes the run with it
(`runtime.step_timeout_s` has no effect), and what it prints goes to the terminal, uncounted. For small environments whose
code is trusted, where starting a process costs more than the work.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.envs.host import begin
from assay.envs.workers import Ask, Log, Pool, failed
from assay.protocols import Reset, Restore, Snapshot, Step, StepResult, UserError
from assay.rng import stable_hash


@dataclass(slots=True)
class _Slot:
    log: Log | None = None
    request: Any = None  # the one in flight
    broken: str = ""  # why the episode cannot go on


class Inline:
    """Environments by slot number, in this process. Requests, answers and counters are those of `workers.Pool`.

    A request is executed by `collect`. UserError when the environment cannot be made.
    """

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.settings = dict(settings or {})
        self.counters = {"errors": 0, "timeouts": 0, "restarts": 0, "stray_lines": 0}
        self.stray: list[str] = []  # always empty: nothing is captured
        self._slots: dict[int, _Slot] = {}
        self._snapshots: dict[int, tuple[int, Log]] = {}  # handle: slot, how to rebuild
        self._handles = 0
        self._host, line = begin(name, self.settings)
        _, error, spec = json.loads(line)
        if error:
            raise UserError(error)
        self.spec: dict[str, Any] = spec

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all environments; what that raises changes nothing any more."""
        for env in (*self._host.envs.values(), self._host.spare):
            with contextlib.suppress(Exception):
                env.close()
        self._host.envs.clear()
        self._host.playing.clear()
        self._host.spare = None

    def submit(self, slot: int, request: Any) -> None:
        """Queue a request; `collect` executes it."""
        if not isinstance(request, Reset | Step | Snapshot | Restore | Ask):
            raise TypeError(f"not a request to an environment: {request!r}")
        state = self._slots.setdefault(slot, _Slot())
        if state.request is not None:
            self.collect([slot])  # its episode was abandoned: the answer belongs to nobody
        state.request = request

    def flush(self) -> None:
        """Nothing waits to be sent."""

    def collect(self, slots: Sequence[int]) -> list[Any]:
        """Execute the slots' requests; their answers, in the order of `slots`."""
        for slot in slots:
            if slot not in self._slots or self._slots[slot].request is None:
                raise ValueError(f"slot {slot} has no request in flight")
        return [self._execute(slot) for slot in slots]

    def ask(self, slots: Iterable[int], power: str) -> list[Any]:
        """`expert` or `evidence` of the slots' environments as they stand."""
        slots = list(slots)
        for slot in slots:
            self.submit(slot, Ask(power))
        return self.collect(slots)

    def _execute(self, slot: int) -> Any:
        state = self._slots[slot]
        request, state.request = state.request, None
        if isinstance(request, Reset):
            state.broken = ""
            self._snapshots = {h: s for h, s in self._snapshots.items() if s[0] != slot} if self._snapshots else {}
        elif state.broken or state.log is None:
            state.broken = state.broken or "no episode: the environment was not reset"
            return failed(request, state.broken)
        log = state.log
        match request:
            case Reset(split, task_id):
                value = self._call("reset", slot, [split, task_id])
                if not state.broken:
                    state.log = Log(split, task_id, (), (stable_hash(value[0]),))
                    return StepResult(value[0], 0.0, False, False, value[1])
            case Step(action):
                value = self._call("step", slot, action)
                if not state.broken:
                    assert log is not None
                    log.actions += (action,)
                    log.hashes += (stable_hash(value[0]),)
                    return StepResult(*value)
            case Ask(power):
                value = self._call("ask", slot, power)
                if not state.broken:
                    return value
            case Snapshot():
                assert log is not None
                self._handles += 1
                self._snapshots[self._handles] = (slot, replace(log))
                if "snapshot" in self.spec["powers"]:
                    self._call("snapshot", slot, self._handles)
                if not state.broken:
                    return self._handles
            case Restore(handle):
                self._restore(slot, handle)
        return failed(request, state.broken)

    def _restore(self, slot: int, handle: int) -> None:
        state = self._slots[slot]
        if handle not in self._snapshots:
            state.broken = f"snapshot {handle} does not exist: it ends with the next Reset of its slot"
            return
        owner, log = self._snapshots[handle]
        state.log = replace(log)
        if owner == slot and "snapshot" in self.spec["powers"]:
            self._call("restore", slot, handle)
        else:
            self._call("replay", slot, [log.split, log.id, log.actions, log.hashes])

    def _call(self, op: str, slot: int, argument: Any) -> Any:
        """The value as JSON gives it back; an exception of the environment breaks the slot until its next Reset."""
        _, error, value = json.loads(self._host.answer(op, slot, argument))
        if error:
            state = self._slots[slot]
            self.counters["errors"] += 1
            state.broken, state.log = error, None
        return value


AnyPool = Pool | Inline


def open_pool(name: str, settings: Mapping[str, Any], workers: int, timeout_s: float) -> AnyPool:
    """Environments in `workers` processes; 0: in this one. UserError when the environment cannot be made."""
    return Pool(name, settings, workers, timeout_s) if workers else Inline(name, settings)
