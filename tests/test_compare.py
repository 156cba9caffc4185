"""A comparison counts what is there, runs what is not, and ends with the same numbers whatever interrupts it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import Forged, row

from assay.cli.compare import Compare, plan_of
from assay.cli.flags import split
from assay.cli.main import main
from assay.compare import OTHER_SEEDS, Plan, compare, create, environment_version, load, seed_jobs, start_jobs
from assay.config import resolve
from assay.protocols import UserError
from assay.seeds import Job, key, value

COMMON = "--env babyai/GoToRedBallNoDists --model tiny-300k --steps 3 --tasks-per-step 2 --rollouts-per-task 4"
PANEL = "--evaluation.tasks 4 --evaluation.no-ood --max-turn-tokens 4"


def plan(arms: Sequence[str], seeds: int = 4, flags: str = f"{COMMON} {PANEL}", **settings: Any) -> Plan:
    return plan_of(arms, split(flags.split()).given, Compare(seeds=seeds, **settings))


def test_differences_are_paired_by_seed_and_said_in_words(tmp_path: Path) -> None:
    create(tmp_path, plan(["grpo", "rloo"], 4))
    figures = {"grpo": [0.50, 0.60, 0.40, 0.70], "rloo": [0.61, 0.69, 0.52, 0.79]}
    executor = Forged(figures)
    result = compare(tmp_path, executor)
    (pair,) = [p for p in result["pairs"] if p["metric"] == "iid sampled"]
    assert (pair["a"], pair["b"], pair["n"]) == ("rloo", "grpo", 4)
    assert pair["difference"]["estimate"] == pytest.approx((0.11 + 0.09 + 0.12 + 0.09) / 4)
    assert pair["verdict"] == "better" and "rloo" in pair["sentence"]
    assert result["start"]["iid sampled"]["success"] == 0.25
    assert executor.ran[0].startswith("start of") and len(executor.ran) == 9  # one start for both arms
    assert executor.ran[1:5] == ["grpo, seed 0", "rloo, seed 0", "grpo, seed 1", "rloo, seed 1"]
    assert json.loads((tmp_path / "compare.json").read_text()) == result
    for name in ("report.html", "table.md", "table.tex"):
        assert "rloo" in (tmp_path / name).read_text()
    again = Forged(figures)
    assert compare(tmp_path, again) == result and again.ran == []


def test_added_seeds_go_on_and_a_second_look_costs(tmp_path: Path) -> None:
    create(tmp_path, plan(["grpo", "rloo"], 4))
    figures = {"grpo": [0.50, 0.60, 0.40, 0.70, 0.5, 0.5], "rloo": [0.61, 0.60, 0.52, 0.69, 0.55, 0.56]}
    first = compare(tmp_path, Forged(figures))
    executor = Forged(figures)
    second = compare(tmp_path, executor, add_seeds=2)
    assert executor.ran == ["grpo, seed 4", "rloo, seed 4", "grpo, seed 5", "rloo, seed 5"]
    assert (first["looks"], second["looks"], second["seeds"]) == (1, 2, [0, 1, 2, 3, 4, 5])
    pair = second["pairs"][0]
    assert pair["p_corrected"] == pytest.approx(min(1.0, 2 * pair["p"]))


def test_a_failed_seed_is_named_and_leaves_its_pair_out(tmp_path: Path) -> None:
    create(tmp_path, plan(["grpo", "rloo"], 4))
    figures = {"grpo": [0.5, 0.6, 0.4, 0.7], "rloo": [0.6, 0.7, 0.5, 0.9]}
    result = compare(tmp_path, Forged(figures, fails=["rloo, seed 2"]))
    assert result["unfinished"] == [{"arm": "rloo", "seed": 2, "error": "the disk is on fire"}]
    assert result["pairs"][0]["n"] == 3 and result["pairs"][0]["missing"] == [2]
    assert load(tmp_path).looks == []  # nobody has looked at the whole yet
    assert compare(tmp_path, Forged(figures))["unfinished"] == []


def test_a_method_named_twice_measures_its_noise(tmp_path: Path) -> None:
    create(tmp_path, plan(["grpo", "grpo"], 3))
    executor = Forged({"grpo": [0.5, 0.6, 0.4, *[0.0] * (OTHER_SEEDS - 3), 0.7, 0.5, 0.6]})
    result = compare(tmp_path, executor)
    assert f"grpo, seed {OTHER_SEEDS + 2}" in executor.ran
    assert result["noise"][0]["difference"]["estimate"] == pytest.approx(-0.1)
    assert result["pairs"] == []


def test_comparisons_share_a_store_of_finished_seeds(tmp_path: Path) -> None:
    figures = {"grpo": [0.5, 0.6], "rloo": [0.6, 0.7], "dr-grpo": [0.1, 0.3]}
    for name, arm, expected in (("one", "rloo", 5), ("two", "dr-grpo", 2)):
        create(tmp_path / name, plan(["grpo", arm], 2, store=str(tmp_path / "rows")))
        executor = Forged(figures)
        compare(tmp_path / name, executor)
        assert len(executor.ran) == expected


def test_a_store_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    create(Path("cmp"), plan(["grpo", "rloo"], 2, store="../rows"))
    figures = {"grpo": [0.5, 0.6], "rloo": [0.6, 0.7]}
    compare(Path("cmp"), Forged(figures))
    assert len(list((tmp_path / "here" / "rows").iterdir())) == 5  # "../rows" is seen from the comparison
    monkeypatch.chdir(tmp_path)
    again = Forged(figures)
    compare(Path("here/cmp"), again)
    assert again.ran == []


def test_the_same_question_may_bring_seeds_and_figures(tmp_path: Path) -> None:
    create(tmp_path, plan(["grpo", "rloo"], 3))
    compare(tmp_path, Forged({"grpo": [0.5, 0.6, 0.7], "rloo": [0.6, 0.8, 0.7]}))
    asked = plan(["grpo", "rloo"], 2)
    asked.secondary = ["entropy last third"]
    create(tmp_path, asked)
    now = load(tmp_path)
    assert (now.seeds, now.secondary, now.looks) == ([0, 1, 2], ["entropy last third"], [3])


def test_a_row_under_another_name_is_refused(tmp_path: Path) -> None:
    create(tmp_path, plan(["grpo", "rloo"], 2))
    compare(tmp_path, Forged({"grpo": [0.5, 0.6], "rloo": [0.6, 0.8]}))
    one, two, *_ = sorted((tmp_path / "seeds").iterdir())
    one.write_bytes(two.read_bytes())
    with pytest.raises(UserError, match="not its name"):
        compare(tmp_path, Forged({}))


def test_arms_take_flags_of_their_own_and_say_in_what_they_differ(tmp_path: Path) -> None:
    made = plan(["grpo", "grpo --slots.denominator token --updates-per-batch 2"], 2)
    create(tmp_path, made)
    result = compare(tmp_path, Forged({name: [0.5, 0.6] for name in made.arms}))
    differs = result["arms"]["grpo --slots.denominator token --updates-per-batch 2"]["differs"]
    assert differs == {"slots.denominator": "token", "updates_per_batch": 2}
    version = environment_version(made.arms["grpo"])
    assert len({j.key for j in start_jobs(tmp_path, made, tmp_path, version).values()}) == 1
    assert len({j.key for j in seed_jobs(tmp_path, made, tmp_path, version).values()}) == 4


@pytest.mark.parametrize(
    ("arms", "changes", "words"),
    [
        (["grpo"], {}, "two arms"),
        (["grpo", "nonsense"], {}, "nonsense"),
        (["grpo", "--steps 3"], {}, "names no method"),
        (["grpo", "rloo --evaluation.tasks 7"], {}, "panel"),
        (["grpo", "rloo --env countdown"], {}, "env"),
        (["grpo", "rloo"], {"metric": "ood sampled"}, "not measured"),
        (["grpo", "rloo"], {"metric": "beauty"}, "beauty"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(
    tmp_path: Path, arms: list[str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        create(tmp_path / "c", plan(arms, 2, **changes))
    assert not (tmp_path / "c").exists()


def test_a_folder_keeps_its_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path / "c", plan(["grpo", "rloo"], 2))
    with pytest.raises(UserError, match="another comparison"):
        create(tmp_path / "c", plan(["grpo", "dr-grpo"], 2))
    create(tmp_path / "c", plan(["grpo", "rloo"], 3))  # the same with more seeds is the same
    assert load(tmp_path / "c").seeds == [0, 1, 2]
    for line, words in (
        (["compare", str(tmp_path / "c"), "--steps", "4"], "has its plan"),
        (["compare", "grpo", "rloo", "--add-seeds", "4"], "--add-seeds is for"),
        (["compare", "grpo", "rloo", "--seed", "4"], "--seeds N"),
    ):
        assert main(line) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "precious").touch()
    with pytest.raises(UserError, match="is no comparison"):
        create(tmp_path / "d", plan(["grpo", "rloo"], 2))


def test_figures_of_a_row() -> None:
    found = row(Job("x", {}, Path(), Path(), "k", "v"), 0.75, 0.5)
    figures = {"iid sampled": 0.75, "iid greedy": 0.5, "entropy last third": 0.2, "entropy first third": 1.0}
    figures |= {"entropy": 1.7 / 3, "seconds": 3.0, "env_steps": 30.0, "tokens": 60.0}
    assert {name: value(found, name) for name in figures} == pytest.approx(figures)
    assert value(found, "ood greedy") != value(found, "ood greedy")  # not known


def test_the_first_step_whose_mean_of_five_reaches_a_level() -> None:
    curve = [0.9, 0.1, 0.2, 0.3, 0.5, 0.6, 0.9, 0.1]  # means from step 5: .4, .34, .5, .48
    found: dict[str, Any] = {"curves": {"success": curve}, "end": {}, "timings": {}}
    expected = {"0.4": 5.0, "0.45": 7.0, "0.5": 7.0, "0.51": 9.0}  # nowhere: one more than all
    assert {level: value(found, f"success steps to {level}") for level in expected} == expected
    with pytest.raises(UserError, match="NAME steps to X"):
        value(found, "success steps to high")


def test_a_setting_that_nobody_set_is_not_in_a_row_key() -> None:
    """So that a version with one more setting finds the rows of the versions before it."""
    usual = key(resolve({"model": "tiny-300k"}, "test"), "v")
    assert usual == key(
        resolve({"model": "tiny-300k", "rounds": 3, "out": "x", "runtime": {"workers": 2}}, "test"), "v"
    )
    for other in ({"rounds": 4}, {"slots": {"clip_high": 0.3}}, {"runtime": {"dtype": "bfloat16"}}, {"seed": 1}):
        assert key(resolve({"model": "tiny-300k", **other}, "test"), "v") != usual


def _numbers(folder: Path) -> Any:
    result = json.loads((folder / "compare.json").read_text())
    for arm in result["arms"].values():
        for seed in arm["seeds"].values():
            del seed["seconds"]
    del result["curves"]["seconds"], result["date"]
    return result


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_it_ends_with_the_same_numbers(tmp_path: Path) -> None:
    line = ["grpo", "dr-grpo", *f"{COMMON} {PANEL} --seeds 2 --runtime.checkpoint-every 1 --jobs 2".split(), "--json"]
    command = [sys.executable, "-m", "assay", "compare", *line, "--out"]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    for attempt in range(40):
        process = subprocess.Popen([*command, tmp_path / "killed"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            process.wait(random.Random(attempt).uniform(4, 12) + 1.5 * attempt)  # ends on a busy machine too
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.2)
        else:
            assert process.returncode == 0, process.stderr and process.stderr.read()
            break
    assert 0 < attempt < 39
    assert _numbers(tmp_path / "killed") == _numbers(tmp_path / "whole")
    assert (tmp_path / "killed" / "seeds").exists()
