"""From names in a configuration to methods: who sets the estimator."""

import sys
from pathlib import Path

import pytest

from assay.build import build, build_methods
from assay.config import resolve
from assay.protocols import UserError

IDEAS = """
import numpy as np
from assay import Method

class Constant(Method):
    def advantage(self, batch, rows):
        for row in rows:
            row.columns["advantage"] = np.ones(len(row.at), np.float32)
        return {}

class Other(Constant):
    pass

class Price(Method):
    pass
"""


@pytest.fixture()
def ideas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ideas_of_mine.py").write_text(IDEAS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("ideas_of_mine", None)


def test_a_method_of_ones_own_goes_around_grpo_when_no_preset_is_named(ideas: None) -> None:
    config = resolve({"method": ["ideas_of_mine:Price"]}, "x")
    assert config.method == ["grpo", "ideas_of_mine:Price"]
    host, price = build_methods(config)
    assert host.advantage is not None and price.advantage is None


def test_a_method_that_sets_the_estimator_replaces_the_host_s_and_two_are_refused(ideas: None) -> None:
    host, mine = build_methods(resolve({"method": ["rloo", "ideas_of_mine:Constant"]}, "x"))
    assert host.advantage is None and mine.advantage is not None
    with pytest.raises(UserError, match="two methods set the advantage: Constant, Other"):
        build_methods(resolve({"method": ["grpo", "ideas_of_mine:Constant", "ideas_of_mine:Other"]}, "x"))


@pytest.mark.slow
def test_games_that_a_run_will_play_are_made_before_it_with_progress(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("textworld")
    values = {"env": "textworld-cooking", "model": "tiny-300k", "env_args": {"games": 4, "cache": str(tmp_path)}}
    values |= {"steps": 2, "tasks_per_step": 2, "evaluation": {"tasks": 0}}
    bench = build(resolve(values, "x"))
    bench.close()
    assert len(list(tmp_path.rglob("*.z8"))) >= 4
    assert "of 4 TextWorld games" in capfd.readouterr().err
