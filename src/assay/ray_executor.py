"""The runs of a comparison on Ray: one task per run, on every machine of the cluster that sees the same folder.

A run whose worker is killed is given to another one, which goes on from the last checkpoint in the run's folder; so
the comparison's folder must lie where all machines can reach it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.executors import ATTEMPTS, POLL_S, Watch, peek, run_job
from assay.protocols import UserError
from assay.seeds import Job


class Ray:
    """At $RAY_ADDRESS, else a local one with `jobs` processors (0: all). One processor and one torch thread a run."""

    def __init__(self, jobs: int = 0) -> None:
        try:
            import ray
        except ImportError as error:
            raise UserError("--executor ray needs Ray: pip install 'assay[ray]'") from error
        self.ray, self.jobs = ray, jobs

    def run(self, jobs: Sequence[Job], watch: Watch) -> dict[Path, str]:
        address = os.environ.get("RAY_ADDRESS")
        ours = not self.ray.is_initialized()
        if ours:
            local: dict[str, Any] = {"address": "local", "num_cpus": self.jobs or len(os.sched_getaffinity(0))}
            self.ray.init(
                **({} if address else local), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
        task = self.ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_run)
        limit = self.jobs if self.jobs and address else len(jobs)
        waiting, failed = list(jobs), dict[Path, str]()
        running: dict[Any, Job] = {}
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    job = waiting.pop(0)
                    running[task.options(name=job.name).remote(job.as_json())] = job
                done, _ = self.ray.wait(list(running), timeout=POLL_S)
                for reference in done:
                    job = running.pop(reference)
                    if error := self._error(reference):
                        failed[job.row] = error
                        watch.failed(job, error)
                    else:
                        watch.finished(job)
                for job in running.values():
                    if (job.folder / "metrics.jsonl").exists():
                        watch.progress(job, *peek(job))
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)  # what is lost is the step it was at: its checkpoints stay
            if ours:
                self.ray.shutdown()
        return failed

    def _error(self, reference: Any) -> str:
        try:
            return str(self.ray.get(reference))
        except self.ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def _run(text: str) -> str:
    """In a worker: "" or why there is no row."""
    return run_job(Job.from_json(text))
