"""Where the runs of a comparison run: local processes, or Ray. Both call `run_job`, which goes on where a killed one was.

An executor gives each job to one process with one torch thread, and watches the run's own files for progress, so that
nothing but the folder connects the two. A job that is killed is resumed from its checkpoint, to the same bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from assay.envs.host import end_with
from assay.protocols import UserError
from assay.rundir import RunDir
from assay.seeds import Job, row_of, write_row
from assay.train import resume, share_spent, train

POLL_S = 0.3
INTERRUPTED = 130
ATTEMPTS = 3  # of a run whose process was killed, before it counts as failed
LOG_CHARACTERS = 400  # of a failed run's last words


class Watch:
    """What a comparison tells a person; this one says nothing."""

    def phase(self, name: str, jobs: int, done: int) -> None: ...
    def progress(self, job: Job, step: int, share: float, success: float | None) -> None: ...
    def finished(self, job: Job) -> None: ...
    def failed(self, job: Job, error: str) -> None: ...
    def note(self, text: str) -> None: ...


class Executor(Protocol):
    def run(self, jobs: Sequence[Job], watch: Watch) -> dict[Path, str]:
        """Runs all; {row file: what went wrong} of those without a row. KeyboardInterrupt: all are stopped, none is lost."""
        ...


def run_job(job: Job) -> str:
    """Train, or go on from the last checkpoint, then write the row: "" or the sentence that says why there is none."""
    if job.row.exists():
        return ""
    try:
        result = (
            resume(job.folder)
            if (job.folder / "config.toml").exists()
            else train({**job.values, "out": str(job.folder)})
        )
        if result.stopped:
            return "stopped"
        with RunDir(job.folder) as run:
            write_row(job.row, row_of(run, job.key, job.environment_version))
    except UserError as error:
        return str(error)
    return ""


def peek(job: Job) -> tuple[int, float, float | None]:
    """(step, share of the budget, training success) of a run as its files say, without a lock."""
    try:
        with open(job.folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            lines = [line for line in file.read().split(b"\n")[:-1] if line]
        record = json.loads(lines[-1])
    except (OSError, ValueError, IndexError):
        return 0, 0.0, None
    spent = {name: record.get(f"total_{name}", 0) for name in ("episodes", "tokens", "env_steps")}
    return (
        int(record["step"]),
        min(1.0, share_spent(job.config, spent | {"steps": record["step"]})),
        record.get("success"),
    )


class Local:
    """Processes on this machine, `jobs` at once; they end with this one, however it ends."""

    def __init__(self, jobs: int = 0) -> None:
        self.jobs = jobs or max(1, len(os.sched_getaffinity(0)))

    def run(self, jobs: Sequence[Job], watch: Watch) -> dict[Path, str]:
        waiting = [(job, 1) for job in jobs]
        running: list[tuple[Job, int, subprocess.Popen[bytes]]] = []
        failed: dict[Path, str] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    job, attempt = waiting.pop(0)
                    running.append((job, attempt, _start(job)))
                time.sleep(POLL_S)
                for entry in list(running):
                    job, attempt, process = entry
                    code = process.poll()
                    if code is None:
                        watch.progress(job, *peek(job))
                        continue
                    running.remove(entry)
                    if job.row.exists():
                        watch.finished(job)
                    elif code < 0 and attempt < ATTEMPTS:  # killed from outside: it goes on from its checkpoint
                        watch.note(f"{job.name} was killed (signal {-code}): going on from its last checkpoint")
                        waiting.insert(0, (job, attempt + 1))
                    else:
                        failed[job.row] = _last_words(job, code)
                        watch.failed(job, failed[job.row])
        except BaseException:
            _stop([process for _, _, process in running], watch)
            raise
        return failed


def _start(job: Job) -> subprocess.Popen[bytes]:
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = open(_log(job), "ab")  # noqa: SIM115 (the child's)
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "assay.executors", job.as_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a terminal's Ctrl-C reaches us only, and we pass it on once
            env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": _path()},
        )


def _path() -> str:
    """So that the user's own environments and methods are found as they were here."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _stop(processes: Sequence[subprocess.Popen[bytes]], watch: Watch) -> None:
    """A first Ctrl-C lets each run end its step and save; a second one kills, and then only that step is redone."""
    watch.note("stopping after the present step of each run, which is saved; again stops at once")
    try:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _log(job: Job) -> Path:
    return job.folder.with_name(job.folder.name + ".log")


def _last_words(job: Job, code: int) -> str:
    text = _log(job).read_text("utf-8", "replace").strip() if _log(job).exists() else ""
    line = text.rpartition("\n")[2][-LOG_CHARACTERS:]
    return line or f"ended with code {code} and without a word"


def main() -> int:
    """`python -m assay.executors JOB PARENT`: one job as JSON, and the process that it must not outlive."""
    text, parent = sys.argv[1:]
    if not end_with(int(parent)):
        return 1
    error = run_job(Job.from_json(text))
    if error:
        print(error, file=sys.stderr)
    return INTERRUPTED if error == "stopped" else 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
