"""Where metrics go beside the run directory: whatever the user watches.

`metrics.jsonl` and `timings.jsonl` are the record and always there (rundir.py); these are copies for the eye, in whose
offline modes nothing leaves the machine (WANDB_MODE=offline; trackio and tensorboard are local anyway). A resumed run
continues its curves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from assay.files import read_file, write_file
from assay.protocols import UserError
from assay.rundir import RunDir

Log = Callable[[int, dict[str, float]], None]
Sink = tuple[Log, Callable[[], None]]  # (log, close)


class Loggers:
    """`names` may hold "jsonl", which the run directory writes itself. UserError for a name that does not exist or a
    package that is not installed."""

    def __init__(self, names: Sequence[str], run: RunDir, config: Mapping[str, Any]) -> None:
        wanted = [name for name in dict.fromkeys(names) if name != "jsonl"]
        for name in wanted:
            if name not in SINKS:
                raise UserError(f"logger {name!r} does not exist: choose from jsonl, {', '.join(SINKS)}")
            if find_spec(name) is None:
                raise UserError(f"logger {name!r} needs a package that is not installed: pip install 'assay[{name}]'")
        self.sinks = [SINKS[name](run, dict(config)) for name in wanted]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The numbers of one step; texts and None stay in the run directory."""
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        for log, _ in self.sinks:
            log(step, numbers)

    def close(self) -> None:
        for _, close in self.sinks:
            close()
        self.sinks = []


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, str)


def _tensorboard(run: RunDir, config: dict[str, Any]) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []  # none before the first step: only then is it known which steps are redone

    def log(step: int, numbers: dict[str, float]) -> None:
        if not writers:
            writers.append(SummaryWriter(run.path / "tensorboard", purge_step=step))
        for name, value in numbers.items():
            writers[0].add_scalar(name, value, step)
        writers[0].flush()  # a killed run shows all its steps

    def close() -> None:
        for writer in writers:
            writer.close()

    return log, close


def _wandb(run: RunDir, config: dict[str, Any]) -> Sink:
    import wandb

    try:
        online = wandb.init(
            project="assay", name=run.path.name, id=run_id(run), resume="allow", dir=run.path, config=config
        )
    except wandb.errors.Error as error:  # no login, no network
        raise UserError(f"logger 'wandb' does not start: {error} (WANDB_MODE=offline needs neither)") from error
    return lambda step, numbers: online.log(numbers, step=step), online.finish


def _trackio(run: RunDir, config: dict[str, Any]) -> Sink:
    import trackio

    name = f"{run.path.name}-{run_id(run)}"  # trackio resumes by name
    local = trackio.init("assay", name=name, resume="allow", config=config, embed=False, auto_log_gpu=False)
    return lambda step, numbers: local.log(numbers, step=step), local.finish


def run_id(run: RunDir) -> str:
    """A name that stays with the folder, wherever it is moved."""
    path = run.path / ".id"
    if not path.exists():
        write_file(path, secrets.token_hex(4).encode())
    return read_file(path, 100).decode()


SINKS: dict[str, Callable[[RunDir, dict[str, Any]], Sink]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
