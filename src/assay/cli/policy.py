"""A trained policy to play or evaluate with: a run's saved one, its last checkpoint while it has not ended, or a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.build import Bench, build, build_learner, policy_folder
from assay.config import RunConfig
from assay.protocols import UserError
from assay.rundir import RunDir


@contextmanager
def open_policy(config: RunConfig, policy: str) -> Iterator[Bench]:
    """A bench with the policy's weights. `policy` is a run directory or the name of a model."""
    run = RunDir(policy) if (Path(policy) / "config.toml").is_file() else None
    finished = run is not None and (run.path / "policy").is_dir()
    bench = build(config.model_copy(update={"model": policy}) if finished or run is None else config)
    try:
        if run is not None and not finished:
            _load_checkpoint(bench, run)
        yield bench
    finally:
        bench.close()


def _load_checkpoint(bench: Bench, run: RunDir) -> None:
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise UserError(f"{run.path} has neither a policy nor a checkpoint yet: wait for it, or resume it")
    tensors, state = run.load_checkpoint(checkpoint)
    learner = build_learner(bench.config, bench.network, None)
    learner.load_state_dict({"tensors": dict(tensors), "json": state["learner"]})
    bench.sampler.load(learner)


def decoder(config: RunConfig, run: Path) -> Callable[[Any], str]:
    """Text of token ids, special tokens shown, by the run's tokenizer."""
    from transformers import AutoTokenizer

    source = run / "policy" if (run / "policy").is_dir() else policy_folder(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer of {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
