"""Environments in processes of their own: requests in batches over pipes, exceptions, crashes and hangs survived.

A worker is a fresh interpreter that hosts many environments, one a slot. One JSON array a line crosses the pipes:
`[op, slot, argument]` there, `[slot, error, value]` back, in the same order. Snapshots stay in the worker, named by
handles. The worker writes into shared memory how many requests it has begun: so when it dies, the one it was executing
is blamed and no other. The other slots' episodes are rebuilt in a new worker by reset and replay. What an environment
prints is captured and counted. Left out on purpose: pickle, fork, threads.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.envs.host import line_of
from assay.protocols import Reset, Restore, Snapshot, Step, StepResult, UserError
from assay.rng import stable_hash

STRAY_LINES = 20  # of what the environments printed, the first lines that are kept
LINE_LENGTH = 1000  # bytes of each


@dataclass(frozen=True, slots=True)
class Ask:
    """A request beside those of the protocol: "expert" is answered with an action, "evidence" with a dict."""

    power: str


@dataclass(slots=True)
class Log:
    """What rebuilds an episode: its task, the executed actions, the hashes of all observations."""

    split: str
    id: int
    actions: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Slot:
    log: Log | None = None
    request: Any = None  # the one in flight
    answer: Any = None
    ready: bool = False
    broken: str = ""  # why the episode cannot go on


@dataclass(slots=True)
class _Worker:
    index: int
    process: subprocess.Popen[bytes]
    requests: int  # file descriptors
    answers: int
    output: int
    begun: mmap.mmap
    pending: deque[tuple[str, int, Any]] = field(default_factory=deque)  # sent or in `out`, not answered
    answered: int = 0
    out: bytearray = field(default_factory=bytearray)
    rest: bytes = b""
    said: bytes = b""  # the beginning of a printed line
    since: float = 0.0  # when the oldest pending request became the oldest


class Pool:
    """Environments by slot number, in `workers` processes; slot s lives in worker s modulo `workers`.

    `submit(slot, request)`, then `collect(slots)`: Reset and Step give a StepResult, Snapshot a handle that holds until
    the slot's next Reset, Restore None, Ask its value. A failed request other than Reset and Step answers -1, None or
    {}, and the slot's next Step carries the error. `timeout_s` is for one request; UserError when the environment
    cannot be made. A slot has one request in flight.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        workers: int = 1,
        timeout_s: float = 30.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.name = name
        self.settings = dict(settings or {})
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.counters = {"errors": 0, "timeouts": 0, "restarts": 0, "stray_lines": 0}
        self.stray: list[str] = []
        self.spec: dict[str, Any] = {}
        self._slots: dict[int, _Slot] = {}
        self._snapshots: dict[int, tuple[int, _Worker | None, Log]] = {}  # handle: slot, where it lives, how to rebuild
        self._handles = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        for index in range(workers):
            self._workers.append(self._spawn(index))
        for worker in self._workers:
            self._await(lambda worker=worker: worker.pending)  # type: ignore[misc]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; nothing can be submitted afterwards."""
        self._finalizer()
        self._selector.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def submit(self, slot: int, request: Any) -> None:
        """Queue a request; it is sent by `flush` or `collect`."""
        state = self._slots.setdefault(slot, _Slot())
        if state.request is not None:
            self.collect([slot])  # its episode was abandoned: the answer belongs to nobody
        state.request, state.answer, state.ready = request, None, False
        if isinstance(request, Reset):
            state.broken = ""
            self._snapshots = {h: s for h, s in self._snapshots.items() if s[0] != slot} if self._snapshots else {}
        elif state.broken or state.log is None:
            state.broken = state.broken or "no episode: the environment was not reset"
            state.answer, state.ready = failed(request, state.broken), True
            return
        self._enqueue(slot, request)

    def _enqueue(self, slot: int, request: Any) -> None:
        worker = self._worker(slot)
        match request:
            case Reset(split, task_id):
                self._send(worker, "reset", slot, [split, task_id])
            case Step(action):
                self._send(worker, "step", slot, action)
            case Snapshot():
                self._snapshot(worker, slot)
            case Restore(handle):
                self._restore(worker, slot, handle)
            case Ask(power):
                self._send(worker, "ask", slot, power)
            case _:
                raise TypeError(f"not a request to an environment: {request!r}")

    def _snapshot(self, worker: _Worker, slot: int) -> None:
        """In the worker where the environment can; else the log alone is the snapshot."""
        state = self._slots[slot]
        assert state.log is not None
        self._handles += 1
        native = "snapshot" in self.spec["powers"]
        self._snapshots[self._handles] = (slot, worker if native else None, replace(state.log))
        if native:
            self._send(worker, "snapshot", slot, self._handles)
        else:
            state.answer, state.ready = self._handles, True

    def _restore(self, worker: _Worker, slot: int, handle: int) -> None:
        state = self._slots[slot]
        if handle not in self._snapshots:
            state.broken = f"snapshot {handle} does not exist: it ends with the next Reset of its slot"
            state.ready = True
            return
        owner, lives_in, log = self._snapshots[handle]
        state.log = replace(log)
        if lives_in is worker and owner == slot:
            self._send(worker, "restore", slot, handle)
        else:  # its worker died, or it is another slot's
            self._send(worker, "replay", slot, [log.split, log.id, log.actions, log.hashes])

    def flush(self) -> None:
        """Send what is queued, without waiting for answers."""
        self._pump(0.0)

    def collect(self, slots: Sequence[int]) -> list[Any]:
        """The answers of the slots' requests, in the order of `slots`; waits for those that are late."""
        for slot in slots:
            if self._slots[slot].request is None:
                raise ValueError(f"slot {slot} has no request in flight")
        waiting = [slot for slot in slots if not self._slots[slot].ready]
        self._await(lambda: any(not self._slots[slot].ready for slot in waiting))
        answers = []
        for slot in slots:
            state = self._slots[slot]
            answers.append(state.answer)
            state.request, state.answer = None, None
        return answers

    def ask(self, slots: Iterable[int], power: str) -> list[Any]:
        """`expert` or `evidence` of the slots' environments as they stand."""
        slots = list(slots)
        for slot in slots:
            self.submit(slot, Ask(power))
        return self.collect(slots)

    # -------------------------------------------------------------------------------------------- pipes

    def _worker(self, slot: int) -> _Worker:
        return self._workers[slot % len(self._workers)]

    def _send(self, worker: _Worker, op: str, slot: int, argument: Any) -> None:
        if not worker.pending:
            worker.since = time.monotonic()
        worker.pending.append((op, slot, argument))
        worker.out += line_of([op, slot, argument])

    def _await(self, unfinished: Callable[[], Any]) -> None:
        """Pump until done. Every wait ends: the worker that is silent beyond its limit is replaced."""
        self._pump(0.0)
        while unfinished():
            deadlines = [w.since + self._limit(w) for w in self._workers if w.pending]
            self._pump(max(0.0, min(deadlines) - time.monotonic()))
            for worker in list(self._workers):
                if worker.pending and time.monotonic() > worker.since + self._limit(worker):
                    self.counters["timeouts"] += 1
                    self._replace(worker, f"no answer within {self._limit(worker):g} s")

    def _limit(self, worker: _Worker) -> float:
        op, _, argument = worker.pending[0]
        if op == "make":
            return self.start_timeout_s
        return self.timeout_s * (1 + len(argument[2])) if op == "replay" else self.timeout_s

    def _pump(self, timeout_s: float) -> None:
        """Write what can be written, read what is there, replace who died."""
        for worker in self._workers:
            self._write(worker)
        for event, _ in self._selector.select(timeout_s):
            worker, kind = event.data
            if self._workers[worker.index] is not worker:
                continue  # replaced a moment ago
            if kind == "output":
                self._read_output(worker)
            elif kind == "requests":
                self._write(worker)
            elif not self._read_answers(worker):
                code = worker.process.wait()
                self._replace(worker, f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}")

    def _write(self, worker: _Worker) -> None:
        watched = worker.requests in self._selector.get_map()
        try:
            while worker.out:
                del worker.out[: os.write(worker.requests, worker.out)]
        except BlockingIOError:
            if not watched:
                self._selector.register(worker.requests, selectors.EVENT_WRITE, (worker, "requests"))
            return
        except BrokenPipeError:  # it died: the end of its answers will be read next
            worker.out.clear()
        if watched:
            self._selector.unregister(worker.requests)

    def _read_answers(self, worker: _Worker) -> bool:
        """False at the end of the stream."""
        data = os.read(worker.answers, 1 << 18)
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        for line in lines:
            slot, error, value = json.loads(line)
            op, _, argument = worker.pending.popleft()
            worker.answered += 1
            self._deliver(op, slot, error, argument if op == "snapshot" else value)
        if lines:
            worker.since = time.monotonic()
            self._read_output(worker)  # printed before these answers: counted with them
        return bool(data)

    def _read_output(self, worker: _Worker) -> None:
        try:
            data = os.read(worker.output, 1 << 16)
        except BlockingIOError:
            return
        if not data and worker.output in self._selector.get_map():
            self._selector.unregister(worker.output)
        *lines, worker.said = (worker.said + data).split(b"\n")
        worker.said = worker.said[:LINE_LENGTH]
        self.counters["stray_lines"] += len(lines)
        kept = lines[: STRAY_LINES - len(self.stray)]
        self.stray += [line[:LINE_LENGTH].decode(errors="replace") for line in kept]

    def _deliver(self, op: str, slot: int, error: str, value: Any) -> None:
        if op == "make":
            if error:
                self.close()
                raise UserError(error)
            self.spec = value
            return
        state = self._slots[slot]
        if error and not state.broken:
            self.counters["errors"] += 1
            state.broken = error
        request = state.request
        if op == "replay" and not isinstance(request, Restore):
            return  # ours, after a restart: the slot's own request comes behind it
        state.ready = True
        if state.broken:
            state.log, state.answer = None, failed(request, state.broken)
        elif isinstance(request, Reset):
            observation, info = value
            state.log = Log(request.split, request.id, (), (stable_hash(observation),))
            state.answer = StepResult(observation, 0.0, False, False, info)
        elif isinstance(request, Step):
            assert state.log is not None
            state.log.actions += (request.action,)
            state.log.hashes += (stable_hash(value[0]),)
            state.answer = StepResult(*value)
        else:
            state.answer = value

    # -------------------------------------------------------------------------------------------- life and death

    def _spawn(self, index: int) -> _Worker:
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        output_read, output_write = os.pipe()
        with tempfile.TemporaryFile() as shared:
            shared.write(bytes(8))
            shared.flush()
            begun = mmap.mmap(shared.fileno(), 8)
            theirs = (request_read, answer_write, shared.fileno())
            process = subprocess.Popen(  # -P: a numbers.py where the user stands is not Python's own
                [sys.executable, "-P", "-m", "assay.envs.host", *map(str, theirs), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=theirs,
                start_new_session=True,  # a Ctrl-C in the terminal is for the parent
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
            )
        for fd in (request_read, answer_write, output_write):
            os.close(fd)
        for fd in (request_write, answer_read, output_read):
            os.set_blocking(fd, False)
        worker = _Worker(index, process, request_write, answer_read, output_read, begun)
        self._selector.register(answer_read, selectors.EVENT_READ, (worker, "answers"))
        self._selector.register(output_read, selectors.EVENT_READ, (worker, "output"))
        path = [entry or os.getcwd() for entry in sys.path]
        self._send(worker, "make", -1, {"name": self.name, "settings": self.settings, "path": path})
        return worker

    def _replace(self, worker: _Worker, why: str) -> None:
        """Kill, blame the request that was being executed, rebuild the other slots in a new worker."""
        _kill(worker)
        self._read_output(worker)
        for fd in (worker.answers, worker.output, worker.requests):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        _close(worker)
        (begun,) = struct.unpack("q", worker.begun[:])
        pending = list(worker.pending)
        culprit = begun - worker.answered - 1  # index in pending; answers that were held back are simply asked again
        if pending and pending[0][0] == "make":
            self._workers.remove(worker)
            self.close()
            said = f": {self.stray[-1]}" if self.stray else ""
            raise UserError(f"the worker of environment {self.name!r} did not start, it {why}{said}")
        self.counters["restarts"] += 1
        fresh = self._workers[worker.index] = self._spawn(worker.index)
        if 0 <= culprit < len(pending):
            op, slot, _ = pending[culprit]
            pending[culprit] = ("done", slot, None)
            self._deliver(op, slot, f"worker {worker.index} {why} in {op} of slot {slot}", None)
        resets = {slot for op, slot, _ in pending if op == "reset"}
        for slot, state in sorted(self._slots.items()):
            restoring = isinstance(state.request, Restore) and not state.ready
            if self._worker(slot) is fresh and state.log and not state.broken and slot not in resets and not restoring:
                log = state.log
                self._send(fresh, "replay", slot, [log.split, log.id, log.actions, log.hashes])
        for op, slot, argument in pending:
            request = self._slots[slot].request
            if op == "done" or (op == "replay" and not isinstance(request, Restore)):
                continue
            if isinstance(request, Restore):  # its snapshot died with the worker
                self._enqueue(slot, request)
            else:
                self._send(fresh, op, slot, argument)


def failed(request: Any, error: str) -> Any:
    """What a request is answered with when it failed: of the type that it is always answered with."""
    if isinstance(request, Snapshot):
        return -1
    if isinstance(request, Ask):
        return {} if request.power == "evidence" else ""
    return None if isinstance(request, Restore) else StepResult("", 0.0, False, False, {}, error)


def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pid, signal.SIGKILL)  # with whatever the environment started
    worker.process.wait()


def _close(worker: _Worker) -> None:
    for fd in (worker.requests, worker.answers, worker.output):
        os.close(fd)


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        _kill(worker)
        _close(worker)
    workers.clear()
