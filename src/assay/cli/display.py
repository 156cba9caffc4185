"""How a run looks in a terminal: a live line of progress with what matters, plain lines where none is watching.

All of it goes to standard error: standard output is for results. Nothing here changes what is learnt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from assay.cli.plan import duration
from assay.cli.tables import cells, rate
from assay.config import BUDGETS
from assay.protocols import Metrics
from assay.rollout import Progress
from assay.train import Display

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # characters of a sparkline or bar
STEPS_TO_MEASURE = 2  # before the time that is left is shown
SHARES = {"model_s": "model", "env_wait_s": "environment", "update_s": "update"}
TROUBLE = {  # metric -> what it counts
    "environment_errors": "environment errors (never learnt from)",
    "outcome_cut": "episodes cut by a token limit",
    "dropped_groups": "groups dropped",
    "updates_skipped": "updates skipped (not finite)",
}


class TerminalDisplay(Display):
    """A train.Display. Live where standard error is a terminal, a line a step where it is not."""

    def __init__(self, out: Console, steps: int, budget: tuple[str, int] | None = None) -> None:
        transformers_logging.disable_progress_bar()  # of loading and saving: this display is the progress
        self.out, self.steps, self.budget = out, steps, budget
        self.live: Live | None = None
        self.success: list[float] = []
        self.seconds: list[float] = []
        self.last: dict[str, float] = {}
        self.trouble: dict[str, float] = dict.fromkeys(TROUBLE, 0.0)
        self.began = time.monotonic()
        self.status, self.stopping = "", ""
        self.drawn = 0.0

    def close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None

    # ------------------------------------------------------------------------------------------- train.Display

    def phase(self, name: str) -> None:
        if self.out.is_terminal:
            self._draw(f"{name} ...", now=True)
        else:
            self.out.print(f"{name} ...", style="dim")

    def episodes(self, progress: Progress, part: str = "") -> None:
        if self.stopping == "new":
            self.stopping = "said"
            self.note("interrupted: stopping after this step, which is saved; again stops at once")
        total = progress.done + progress.live + progress.waiting
        done = f"{progress.done}/{total} episodes, {progress.tokens} tokens"
        self._draw(f"{_bar(progress.done / max(total, 1))} {f'{part}: ' if part else ''}{done}")

    def imitation(self, done: int, total: int, loss: float) -> None:
        text = f"warm start: update {done}/{total}, {loss:.3f} nats a token"
        if self.out.is_terminal:
            self._draw(f"{_bar(done / total)} {text}")
        elif done == total or done % max(1, total // 4) == 0:
            self.out.print(text)

    def evaluated(self, when: str, result: dict[str, Any]) -> None:
        """Success by split and decoding, in one line; the table stands at the end."""
        self.out.print(f"held-out success {when} training: " + ", ".join(f"{n} {rate(r)}" for n, r in cells(result)))

    def step(self, metrics: Metrics, timings: Metrics) -> None:
        self.last = {**metrics, **timings}
        if self.budget:  # the number of steps is an estimate, from what they cost so far
            spent = metrics["step"] if self.budget[0] == "steps" else metrics[f"total_{BUDGETS[self.budget[0]]}"]
            self.steps = max(int(metrics["step"]), math.ceil(metrics["step"] * self.budget[1] / max(spent, 1)))
        self.success.append(metrics.get("success", float("nan")))
        self.seconds.append(timings["step_s"])
        for name in TROUBLE:
            self.trouble[name] += metrics.get(name, 0.0)
        if self.out.is_terminal:
            self._draw("", now=True)
        else:
            self.out.print(self.line())

    def note(self, text: str) -> None:
        self.out.print(text, style="dim")

    def interrupted(self) -> None:
        self.stopping = "new"

    # ------------------------------------------------------------------------------------------------ drawing

    def line(self) -> str:
        """One step, aligned with the others."""
        m = self.last
        width = len(str(self.steps))
        parts = [f"step {m['step']:>{width}.0f}/{self.steps}", f"success {_number(m, 'success', '.3f')}"]
        parts += [f"{name} {m[f'success[{name}]']:.3f}" for name in _worlds(m)]
        parts += [f"reward {_number(m, 'reward', '6.3f')}", f"entropy {_number(m, 'entropy', '.3f')}"]
        parts += [f"kl {_kl(m)}", f"clip {_clip(m)}", f"{m['tokens_per_s']:5.0f} tok/s", _shares(m)]
        parts += [f"iid {m['iid_success']:.3f}"] if "iid_success" in m else []
        parts += [f"{value:.0f} {TROUBLE[n].partition(' (')[0]}" for n in TROUBLE if (value := m.get(n, 0))]
        return "  ".join([*parts, f"left {self.left()}"])

    def left(self) -> str:
        """Time until the last step, from the steps so far; "..." until there are enough."""
        if len(self.seconds) < STEPS_TO_MEASURE:
            return "..."
        recent = self.seconds[-20:]
        return duration(sum(recent) / len(recent) * (self.steps - self.last["step"]))

    def _draw(self, status: str, now: bool = False) -> None:
        if not self.out.is_terminal:
            return
        if status:
            self.status = status
        if not now and time.monotonic() - self.drawn < 0.1:
            return
        self.drawn = time.monotonic()
        if self.live is None:
            self.live = Live(console=self.out, auto_refresh=False, transient=True)
            self.live.start()
        self.live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        rows: list[Any] = [Text(self.status, style="dim", no_wrap=True, overflow="ellipsis")]
        if self.last:
            rows.insert(0, self._table())
        trouble = [f"{n:.0f} {TROUBLE[name]}" for name, n in self.trouble.items() if n]
        return Group(*rows, *[Text(text, style="yellow") for text in trouble])

    def _table(self) -> Table:
        m = self.last
        table = Table.grid(padding=(0, 2))
        done = m["step"] / max(self.steps, 1)
        low, high = m.get("success_low", 0.0), m.get("success_high", 1.0)
        clock = f"{duration(time.monotonic() - self.began)}, {self.left()} left"
        table.add_row("step", f"{_bar(done)} {m['step']:.0f}/{self.steps}", clock)
        success = Text(f"{sparkline(self.success)} {_number(m, 'success', '.3f')}", style="bold green")
        table.add_row("success", success, f"[{low:.2f}, {high:.2f}] of this step's episodes")
        for name in _worlds(m):
            low, high = m[f"success_low[{name}]"], m[f"success_high[{name}]"]
            table.add_row("", Text(f"{m[f'success[{name}]']:.3f}".rjust(WIDTH + 6)), f"[{low:.2f}, {high:.2f}] {name}")
        table.add_row("reward", _number(m, "reward", ".3f"), f"entropy {_number(m, 'entropy', '.3f')} nats a token")
        table.add_row("kl", _kl(m), f"clipped {_clip(m)} of tokens")
        table.add_row("speed", f"{m['tokens_per_s']:.0f} tokens/s", _shares(m))
        return table


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The last values as bars from 0 to 1; a value that is not known is a space."""
    return "".join(" " if v != v else BARS[min(7, max(0, int(v * 8)))] for v in values[-width:]).rjust(width)


def _worlds(metrics: Mapping[str, float]) -> list[str]:
    """Environments of a mixture that had an episode in the step."""
    return [name[len("success[") : -1] for name in metrics if name.startswith("success[")]


def _bar(share: float, width: int = WIDTH) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "━" * full + "╌" * (width - full)


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def _kl(metrics: Mapping[str, float]) -> str:
    """To the reference where there is one, else to the policy that sampled; nats a trained token."""
    found = [value for name in ("kl", "ref_kl", "approx_kl") if (value := _policy(metrics, name)) is not None]
    return f"{found[0]:.4f}" if found else "-"


def _clip(metrics: Mapping[str, float]) -> str:
    names = ("clip_low", "clip_high", "clip_dual")
    found = [value for name in names if (value := _policy(metrics, name)) is not None]
    return f"{sum(found):.1%}" if found else "-"


def _policy(metrics: Mapping[str, float], name: str) -> float | None:
    """A mean over the policy's tokens; the learner's are over trained ones and say so in their names."""
    return metrics.get(f"{name}_per_trained_token", metrics.get(name))


def _shares(timings: Mapping[str, float]) -> str:
    whole = max(timings["step_s"], 1e-9)
    return ", ".join(f"{word} {timings[n] / whole:.0%}" for n, word in SHARES.items() if n in timings)
