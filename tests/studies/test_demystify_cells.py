"""A cell from end to end, on policies of three updates: what comes out, that it is repeatable, and what a run is made of."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from assay.protocols import UserError
from assay.studies.demystify import cells
from assay.studies.demystify.study import MATHS, PLAIN, RANDOM, STUDY, DemystifyOptions, tiny_cells
from assay.studies.demystify.tasks import Recipe
from assay.studies.grid import Cell
from assay.studies.registry import study_named

QUICK: dict[str, Any] = {
    "scale": "24k",
    "recipe": {"updates": 3, "rows": 4, "tuning_updates": 5},
    "steps": 2,
    "rollouts": 8,
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cells, "SAMPLES", 8)
        patch.setattr(cells, "HELD_OUT", 6)
        yield


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize(
    "own",
    [
        {"start": "sft+", "reward": "sparse"},
        {"start": "sft-", "reward": "dense", "algorithm": "ppo"},
        RANDOM | {"prompts": "narrow", "updates": 8, "tasks": 8, "steps": 2, "rollouts": 4},
        RANDOM | {"prompts": "broad", "tasks": 4, "steps": 2, "rollouts": 2},
        MATHS | {"start": "sft+", "reward": "dense", "steps": 2, "recipe": QUICK["recipe"] | {"task": "maths"}},
    ],
    ids=["sparse", "ppo", "narrow", "broad", "maths"],
)
def test_a_cell_is_json_with_a_value_a_step_and_the_same_twice(own: dict[str, Any], tmp_path: Path) -> None:
    cell = Cell("x", 0, PLAIN | QUICK | own)
    found = STUDY.run(cell, tmp_path / "none")
    assert not (tmp_path / "none").exists() and finite(found)
    assert json.dumps(found, allow_nan=False) == json.dumps(STUDY.run(cell, tmp_path / "none"), allow_nan=False)
    steps = cell.settings["steps"]
    assert found["played"] == steps * cell.settings["tasks"] * cell.settings["rollouts"]
    assert len(found["curves"]["log_p"]) == steps + 1
    assert all(len(found["curves"][name]) == steps for name in ("reward", "success", "entropy", "dead", "clipped"))
    assert found["curves"]["log_p"][0] == pytest.approx(found["before"]["log_p"], abs=1e-4)
    assert found["curves"]["log_p"][-1] == pytest.approx(found["after"]["log_p"], abs=1e-4)
    assert found["text"] and found["before"]["inside"]["samples"] == 8
    several = cell.settings["updates"] > 1  # ratios leave 1 from the second update on
    assert (max(found["curves"]["clipped"]) > 0) == several
    assert bool(found["probe"]) == (cell.settings["reward"] == "random")


def test_p07_a_crushed_prior_under_a_sparse_reward_is_left_as_it_was() -> None:
    """Every group is all zero: not one update is made."""
    found = cells.run(PLAIN | QUICK | {"start": "sft-", "steps": 3}, 0)
    assert found["first_hit"] is None and found["curves"]["dead"] == [1.0] * 3
    assert len(set(found["curves"]["log_p"])) == 1 and found["before"] == found["after"]


def test_the_run_is_the_papers_where_it_can_be() -> None:
    config = cells.configuration(PLAIN | QUICK | {"algorithm": "ppo"}, 0, "nowhere")
    slots = config.slots
    assert (slots.kl, slots.kl_coefficient, slots.advantage_norm, slots.gamma, slots.lam) == (
        "reward",
        0.01,
        "mean",
        1,
        1,
    )
    assert config.runtime.workers == 0 and config.env_args["substring_credit"] is False
    grpo = cells.configuration(PLAIN, 0, "nowhere")
    assert (grpo.tasks_per_step, grpo.rollouts_per_task) == (1, 32) and grpo.slots.kl == "none"  # one group a step
    coin = cells.configuration(PLAIN | RANDOM, 0, "nowhere")
    assert coin.method == ["grpo", "random-reward"]


def test_narrow_prompts_fill_a_step_and_broad_ones_are_a_thousand() -> None:
    narrow = cells.prompts_of(PLAIN | RANDOM | {"prompts": "narrow"})
    assert len(narrow) == 16 and len(set(narrow)) == 4
    assert len(cells.prompts_of(PLAIN | RANDOM | {"prompts": "broad"})) >= 1000


def test_cells_of_one_seed_share_their_priors_and_names_are_unique() -> None:
    named = tiny_cells()
    assert len({name for name, _ in named}) == len(named) == 24 + 6 + 4 + 4 + 6
    listed = STUDY.cells(DemystifyOptions(), range(5))
    assert len(listed) == 5 * 44 and [cell.seed for cell in listed[:44]] == [0] * 44
    assert {cell.settings["part"] for cell in STUDY.cells(DemystifyOptions(part="prior"), [0])} == {"prior"}
    keys = {Recipe(s["scale"], 0, s["start"], **s["recipe"]).key for _, s in named}
    assert len(keys) == 4 * 3 + 4 + 3  # three starts at four sizes, four mixtures, the three of maths


def test_the_study_is_in_the_registry_and_a_model_asks_for_the_full_size() -> None:
    assert study_named("demystify") is STUDY
    full = STUDY.cells(DemystifyOptions(model="tiny-300k", sft_steps=10), [0])
    assert full and all(cell.settings["scale"] == "full" for cell in full)
    assert STUDY.folder(DemystifyOptions(model="tiny-300k")) != STUDY.folder(DemystifyOptions())
    with pytest.raises(UserError, match="SFT\\+ takes 12800 different lines"):  # before anything runs
        STUDY.cells(DemystifyOptions(model="tiny-300k", sft_steps=1000), [0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": "maths"}, "--task needs --model"),
        ({"model": "tiny-300k", "part": "maths"}, "--part is of the tiny scale"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        STUDY.cells(DemystifyOptions(**given), [0])


def test_no_part_or_model_replaces_the_report_of_another() -> None:
    given: list[dict[str, Any]] = [{}, {"part": "maths"}, {"model": "a/b"}, {"model": "a/c"}]
    assert len({STUDY.folder(DemystifyOptions(**one)) for one in given}) == 4


@pytest.mark.slow
def test_a_target_with_mass_is_raised_by_sparse_rewards() -> None:
    """The smallest policy after SFT+ with a fifth of targets: a prior of some per cent becomes the answer."""
    settings = PLAIN | {"scale": "24k", "start": "sft+", "recipe": {"updates": 300, "mixed_in": 0.2}, "steps": 40}
    found = cells.run(settings, 0)
    before, after = math.exp(found["before"]["log_p"]), math.exp(found["after"]["log_p"])
    assert before > 1e-3 and after > 5 * before  # 40 x 32 samples: more than one hit is to be expected
    assert found["after"]["inside"]["entropy"] < found["before"]["inside"]["entropy"]
