"""Runs the cells of a study in processes with one torch thread each. They take cell after cell: importing torch costs more than
many cells. A process that is killed costs its cell an attempt, a cell that fails costs the others nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from assay.envs.host import end_with
from assay.files import writing
from assay.protocols import UserError
from assay.studies.grid import Cell, Study, Watch, finished, row_path, run_cell
from assay.studies.registry import study_named

ATTEMPTS = 3  # of a cell whose process was killed, before it counts as failed
PATIENCE_S = 5.0  # for an idle worker to end by itself


def run_grid(
    study: Study, cells: Sequence[Cell], out: Path, jobs: int, watch: Watch, reference: str = ""
) -> dict[str, str]:
    """Runs what is missing; {cell: what went wrong} of those without a row. KeyboardInterrupt: finished cells stay.

    `reference` is how a worker finds the study: its name, or "module:OBJECT" for one of the user's own."""
    with writing(out):
        (out / "cells").mkdir(parents=True, exist_ok=True)
    with _alone(out):
        return _run(study, cells, out, jobs, watch, reference or study.name)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """UserError where another process runs a study in this folder."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{out} is in use by another run of a study: wait for it, or give another --out") from error
        yield


def _run(study: Study, cells: Sequence[Cell], out: Path, jobs: int, watch: Watch, reference: str) -> dict[str, str]:
    missing = [cell for cell in cells if not finished(out, study, cell)]
    for path in [row_path(out, study, cell) for cell in missing]:
        if path.exists():
            watch.note(f"{path} is not this cell's result: it runs again")
    watch.begin(len(cells), len(cells) - len(missing))
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(missing))
    failed: dict[str, str] = {}
    queue = [(cell, 1) for cell in missing]
    workers: dict[Any, _Worker] = {}
    try:
        while queue or workers:
            while queue and len(workers) < jobs:
                worker = _Worker.start(reference, out)
                workers[worker.pipe] = worker
                worker.take(*queue.pop(0))
            for pipe in wait(list(workers)):
                worker = workers[pipe]
                cell, attempt = worker.cell, worker.attempt
                try:
                    error = worker.pipe.recv()
                except (EOFError, OSError):  # gone, with its answer or without
                    workers.pop(pipe).stop()
                    if attempt < ATTEMPTS:
                        watch.note(f"the process of {cell.name}, seed {cell.seed}, was killed: once more")
                        queue.insert(0, (cell, attempt + 1))
                        continue
                    error = f"its process was killed {ATTEMPTS} times"
                worker.idle = True
                if error:
                    failed[f"{cell.name}, seed {cell.seed}"] = error
                    watch.failed(cell, error)
                else:
                    watch.finished(cell, worker.seconds)
                if pipe in workers:
                    if queue:
                        worker.take(*queue.pop(0))
                    else:
                        workers.pop(pipe).stop()
    finally:
        for worker in workers.values():
            worker.stop()
    return failed


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    cell: Cell
    attempt: int = 1
    since: float = 0.0
    idle: bool = True

    @classmethod
    def start(cls, study: str, out: Path) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(study, str(out), theirs, os.getpid()), daemon=True)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            process.start()
        finally:
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = threads
        theirs.close()
        return cls(process, ours, Cell("", 0, {}))

    def take(self, cell: Cell, attempt: int) -> None:
        self.cell, self.attempt, self.since, self.idle = cell, attempt, time.perf_counter(), False
        with contextlib.suppress(OSError):  # killed since its last answer: the next look at its pipe says so
            self.pipe.send((cell.name, cell.seed, cell.settings))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.since

    def stop(self) -> None:
        """An idle worker ends by itself when its pipe does; one that works is killed."""
        self.pipe.close()
        self.process.join(PATIENCE_S if self.idle else 0)
        self.process.kill()
        self.process.join()


def _serve(study_name: str, out: str, pipe: Connection, parent: int) -> None:
    """A worker: cell after cell, until the parent has no more or is gone."""
    if not end_with(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the parent
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # transformers' own, of loading weights
    study = study_named(study_name)
    while True:
        try:
            name, seed, settings = pipe.recv()
        except EOFError:
            return
        try:
            run_cell(study, Cell(name, seed, settings), Path(out))
            pipe.send("")
        except UserError as error:
            pipe.send(str(error))
        except (Exception, SystemExit) as error:  # one cell's failure is not the grid's
            last = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send(f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno}, in {last.name})")
