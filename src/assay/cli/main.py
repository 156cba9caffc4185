"""`assay`: one command, its parts by name. Each part is imported when it is asked for, so that help is quick.

Mistakes of the user end with one sentence and exit code 2, an abort with Ctrl-C with 130. ASSAY_TRACEBACK=1 shows where a
sentence comes from.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from assay.cli.flags import nearest, split
from assay.protocols import UserError

MISTAKE, INTERRUPTED = 2, 130


class Command(NamedTuple):
    """Where its function is ("module:function"), how it is called, and what it does."""

    path: str
    usage: str
    line: str


COMMANDS: dict[str, Command] = {  # in the order in which a newcomer needs them
    "train": Command("commands:train", "train --preset demo", "train an agent, here: the demonstration"),
    "play": Command("play:play", "play --env countdown", "watch or play one episode"),
    "envs": Command("lists:envs", "envs", "the environments, one line each"),
    "methods": Command("lists:methods", "methods", "the methods, with paper and fidelity"),
    "models": Command("lists:models", "models", "the built-in policies, and what else can be trained"),
    "eval": Command(
        "commands:evaluate", "eval RUN --split ood", "held-out success of a run or a model, with its interval"
    ),
    "compare": Command(
        "compare:compare", "compare grpo rloo --seeds 8", "which method is better? paired seeds, with a verdict"
    ),
    "replicate": Command(
        "replicate:replicate", "replicate --list", "published claims, put to the test, with our last verdict"
    ),
    "study": Command("study:study", "study --list", "controlled experiments that explain methods, with figures"),
    "report": Command("commands:report", "report RUN", "write the run's report.html again"),
    "audit": Command("audit:audit", "audit FILE", "are these rollouts sound? those of any framework"),
    "resume": Command("commands:resume", "resume RUN --steps +50", "go on from a run's last checkpoint, or extend it"),
    "new": Command("new:new", "new env NAME", "a file to start from: your own environment or method"),
    "pretrain": Command("commands:pretrain", "pretrain --model tiny-1m --out DIR", "make a small policy from nothing"),
}

OVERVIEW = """assay: train language-model agents with RL over many turns, and find out which method really works.

{commands}

'assay COMMAND --help' says more. A run is one folder; RUN stands for its path.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # your own environments and methods are found where you stand
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return run(arguments)
    except UserError as error:
        if os.environ.get("ASSAY_TRACEBACK") == "1":
            raise
        print(f"assay: {' '.join(str(error).split())}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        if os.environ.get("ASSAY_TRACEBACK") == "1":
            raise
        print("assay: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `assay envs | head`: whoever read has gone, which is no mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    """One line; where in the source it was raised is of no use here."""
    print(f"assay: warning: {' '.join(str(message).split())}", file=sys.stderr)


def run(arguments: list[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("--help", "-h", "help"):
        print(overview(), end="")
        return 0
    if name == "--version":
        import assay

        print(f"assay {assay.__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        raise UserError(f"unknown command {name!r}: {f'did you mean {near!r}?' if near else 'assay --help lists all'}")
    module, _, function = COMMANDS[name].path.partition(":")
    command: Callable[..., int] = getattr(importlib.import_module(f"assay.cli.{module}"), function)
    return command(split(rest))


def overview() -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = (f"  assay {command.usage:<{width}}   {command.line}" for command in COMMANDS.values())
    return OVERVIEW.format(commands="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
