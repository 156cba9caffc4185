"""A claim is decided by the rule that stood there before the runs; what came out stays, whatever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import Forged

from assay.cli.main import main
from assay.config import resolve
from assay.protocols import UserError
from assay.replicate import FOLDER, SHIPPED, load, plan_of, recipes, replicate, verdicts

ROOT = Path(__file__).parent.parent


def recipe(tmp_path: Path, expected: str = "higher", metric: str = "iid sampled") -> str:
    path = tmp_path / "claim.toml"
    path.write_text(
        f"""
claim = "New is better than old."
paper = "arXiv 0000.00000"
fidelity = "paper"
metric = "{metric}"
a = "new"
b = "old"
expected = "{expected}"
secondary = ["entropy last third"]
[arms.old]
method = ["grpo"]
[arms.new]
method = ["rloo"]
[tiny]
about = "nothing to speak of"
seeds = 4
[tiny.common]
env = "babyai/GoToRedBallNoDists"
model = "tiny-300k"
steps = 3
evaluation = {{ tasks = 4, ood = false }}
[full]
about = "large"
[full.common]
env = "countdown"
"""
    )
    return str(path)


OLD = [0.50, 0.60, 0.40, 0.70]
ABOVE, BELOW = [v + d for v, d in zip(OLD, (0.11, 0.09, 0.12, 0.10), strict=True)], [0.40, 0.51, 0.29, 0.60]
EQUAL, UNSURE = [0.501, 0.602, 0.399, 0.699], [0.70, 0.40, 0.60, 0.75]
BELOW_ALIKE = [v - 0.03 for v in OLD]  # no spread: nothing to be sure by
JUST_NO_WORSE = [v + d for v, d in zip(OLD, (0.20, -0.02, 0.1, 0.01), strict=True)]


@pytest.mark.parametrize(
    ("expected", "figures", "verdict"),
    [
        ("higher", ABOVE, "holds"),
        ("higher", BELOW, "reversed"),
        ("higher", EQUAL, "does not hold"),
        ("higher", UNSURE, "inconclusive"),
        ("lower", BELOW, "holds"),
        ("lower", ABOVE, "reversed"),
        ("no worse", ABOVE, "holds"),
        ("no worse", EQUAL, "holds"),
        ("no worse", JUST_NO_WORSE, "holds"),
        ("no worse", BELOW, "does not hold"),
        ("no worse", UNSURE, "inconclusive"),
        ("no worse", BELOW_ALIKE, "inconclusive"),
        ("the same", EQUAL, "holds"),
        ("the same", ABOVE, "does not hold"),
    ],
)
def test_the_rule_decides(tmp_path: Path, expected: str, figures: list[float], verdict: str) -> None:
    found = replicate(recipe(tmp_path, expected), tmp_path / "results", Forged({"old": OLD, "new": figures}))
    assert found["verdict"] == verdict
    assert found["arms"] == ["new", "old"] and found["seeds"] == 4
    assert found["secondary"][-1]["metric"] == "entropy last third"


def test_a_verdict_stays_whatever_it_is_and_the_table_is_written_beside_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "docs" / "results"
    replicate(recipe(tmp_path), out, Forged({"old": OLD, "new": BELOW}))
    (tmp_path / "other.toml").write_text(Path(recipe(tmp_path)).read_text().replace("New is", "Other is"))
    again = Forged({"old": OLD, "new": BELOW})
    replicate(str(tmp_path / "other.toml"), out, again)
    assert again.ran == []  # the same runs, shared by both recipes
    assert [v["verdict"] for v in verdicts(out)] == ["reversed", "reversed"]
    table = (tmp_path / "docs" / "results.md").read_text()
    assert (
        table.count("| reversed |") == 2
        and "New is better than old." in table
        and "Rule, written before the runs" in table
    )
    assert "-0.100" in table


def test_an_unfinished_seed_leaves_the_claim_open(tmp_path: Path) -> None:
    executor = Forged({"old": OLD, "new": ABOVE}, fails=["new, seed 3"])
    assert replicate(recipe(tmp_path), tmp_path / "results", executor)["verdict"] == "inconclusive"


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_can_be_started_at_both_scales(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = load(name)
    plan = plan_of(name, found, "tiny")
    assert next(iter(plan.arms)) == found.b and list(plan.arms)[-1] == found.a and len(plan.seeds) >= 8
    for values in plan.arms.values():
        resolve(values, name)
    for values in plan_of(name, found, "full").arms.values():
        assert resolve(values, name).model != "tiny-300k"
    for scale in ("tiny", "full"):
        assert main(["replicate", name, "--scale", scale, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert found.claim in " ".join(said.split()) and found.rule(scale) in said


def test_the_list_has_the_verdicts_that_came_with_the_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["replicate", "--list", "--json"]) == 0
    claims = json.loads(capsys.readouterr().out)["claims"]
    assert [c["name"] for c in claims] == sorted(recipes())
    assert {c["name"] for c in claims if c["last"]} == {v["name"] for v in verdicts(SHIPPED.parent)}


def test_shipped_verdicts_are_those_of_the_documentation() -> None:
    assert SHIPPED.read_bytes() == (ROOT / "docs" / "results" / "verdicts.json").read_bytes()
    from assay.compare_report import replicate_table

    assert (ROOT / "docs" / "results.md").read_text() == replicate_table(verdicts(SHIPPED.parent))


def test_shipped_verdicts_follow_from_the_finished_seeds_beside_them(tmp_path: Path) -> None:
    """No run is needed: the rows are there, and whoever has them gets the same verdicts."""
    shutil.copytree(ROOT / "docs" / "results" / "seeds", tmp_path / "results" / "seeds")
    shutil.copytree(FOLDER, tmp_path / "recipes")
    for verdict in verdicts(SHIPPED.parent):
        executor = Forged({})
        found: dict[str, Any] = replicate(verdict["name"], tmp_path / "results", executor)
        assert executor.ran == [], "rows are missing"
        changing = ("date",)
        assert {k: v for k, v in found.items() if k not in changing} == {
            k: v for k, v in verdict.items() if k not in changing
        }


def test_mistakes_in_a_recipe_are_named(tmp_path: Path) -> None:
    path = Path(recipe(tmp_path))
    text = path.read_text()
    for old, new, words in (
        ('expected = "higher"', 'expected = "nicer"', "expected"),
        ('a = "new"', 'a = "newer"', "no arm newer"),
        ("claim =", "clam =", "cla"),
        ("[arms.old]", "[arms.old", "TOML"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=words):
            load(str(path))
    with pytest.raises(UserError, match="does not exist"):
        load("no-such-claim")
