"""The claims of the README's first command, checked on a seed that the README does not show."""

from pathlib import Path

import pytest

from assay.config import load, overlay
from assay.train import train

PRESETS = Path(__file__).parents[1] / "src" / "assay" / "presets"


@pytest.mark.slow
def test_the_demo_learns_and_greedy_does_not_fall(tmp_path: Path) -> None:
    values = overlay(load(PRESETS / "demo.toml"), {"seed": 7, "out": str(tmp_path / "run")})
    result = train(values)
    before, after = result.before, result.after
    assert after["sampled"]["success"] >= before["sampled"]["success"] + 0.30
    assert after["sampled"]["low"] > before["sampled"]["high"], "intervals apart"
    assert after["greedy"]["high"] >= before["greedy"]["success"], "greedy does not fall"
    assert before["sampled"]["panel"] == after["sampled"]["panel"]
    assert before["sampled"]["n"] == after["sampled"]["n"] == 200
