"""Assay, the laboratory bench of agentic reinforcement learning.

    import assay

    result = assay.train({"env": "countdown", "method": ["dr-grpo"], "steps": 20})
    print(result.after["sampled"])

Names are imported when they are used: `import assay` costs nothing. `assay.train` is the module and can be called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.config import RunConfig as RunConfig
    from assay.envs.base import TextEnv as TextEnv
    from assay.envs.registry import environments as environments
    from assay.envs.registry import make as make
    from assay.protocols import Env as Env
    from assay.protocols import Method as Method
    from assay.protocols import Metrics as Metrics
    from assay.protocols import UserError as UserError
    from assay.rows import Batch as Batch
    from assay.rows import Row as Row
    from assay.rows import Stream as Stream
    from assay.rundir import RunDir as RunDir
    from assay.trace import Group as Group
    from assay.trace import Outcome as Outcome
    from assay.trace import Provenance as Provenance
    from assay.trace import Trace as Trace
    from assay.trace import Turn as Turn
    from assay.trace_store import read_traces as read_traces
    from assay.train import Display as Display
    from assay.train import Result as Result
    from assay.train import resume as resume
    from assay.train import train as train

_HOMES = {
    "assay.config": ("RunConfig",),
    "assay.envs.base": ("TextEnv",),
    "assay.envs.registry": ("environments", "make"),
    "assay.protocols": ("Env", "Method", "Metrics", "UserError"),
    "assay.rows": ("Batch", "Row", "Stream"),
    "assay.rundir": ("RunDir",),
    "assay.trace": ("Group", "Outcome", "Provenance", "Trace", "Turn"),
    "assay.trace_store": ("read_traces",),
    "assay.train": ("Display", "Result", "resume"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME, "__version__", "train"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("assay")
    if name == "train":
        return importlib.import_module("assay.train")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'assay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
