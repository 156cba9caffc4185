"""A small random policy, and one finished run of it, made through the command line itself."""

import os
from pathlib import Path

import pytest
from small_run import SMALL

from assay.cli.main import main

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from assay import tiny

    folder = tmp_path_factory.mktemp("policy") / "random"
    folder.mkdir()
    tiny.train_tokenizer(["one move go to the red ball left right forward 1 to 8 guess the number"], folder)
    tiny.build_model("tiny-300k", 0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def finished(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: read it, copy it, never change it."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(["train", "--model", str(policy), "--out", str(out), *SMALL]) == 0
    return out
