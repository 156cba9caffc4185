"""The study as the command line sees it: cells, verdicts by their rule, figures from whatever rows there are."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.studies.charts import subplots
from assay.studies.grid import Cell, Row
from assay.studies.icl import recursions, rewards, supervision
from assay.studies.icl.study import STUDY, AgenticIclOptions
from assay.studies.icl.verdicts import Quantity, finding, gap, judge, less, values
from assay.studies.registry import study_named

EXPERIMENTS = ("recursions", "rewards", "supervision")


def options(experiment: str, **more: Any) -> AgenticIclOptions:
    return AgenticIclOptions(experiment=experiment, **more)  # type: ignore[arg-type]


def test_the_registry_knows_it_and_its_text_says_what_is_inferred() -> None:
    assert study_named("agentic-icl") is STUDY
    assert STUDY.fidelity == "inferred" and "our reading" in STUDY.paper
    assert STUDY.folder(options("rewards")) == "agentic-icl-rewards"


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, "text"])
def test_cells_have_names_of_their_own_and_json_settings(experiment: str) -> None:
    cells = STUDY.cells(options(experiment), [0, 1])
    assert len({(c.name, c.seed) for c in cells}) == len(cells)
    assert len({c.name for c in cells}) * 2 == len(cells)
    assert all(json.loads(json.dumps(c.settings)) == c.settings for c in cells)
    assert all(set(c.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.+-_") for c in cells)


# ------------------------------------------------------------------------------------------------------- the rule


def seeds(*found: float) -> dict[int, float]:
    return dict(enumerate(found))


def test_a_claim_holds_only_where_every_interval_lies_beyond_its_bound() -> None:
    good, wide, bad = seeds(1.0, 1.1, 1.2), seeds(-1.0, 1.0, 3.0), seeds(-1.0, -1.1, -1.2)
    assert judge([Quantity("a", good)]) == "holds"
    assert judge([Quantity("a", good), Quantity("b", wide)]) == "inconclusive"
    assert judge([Quantity("a", good), Quantity("b", bad)]) == "reversed"
    assert judge([Quantity("a", good, 2.0)]) == "does not hold"
    assert judge([Quantity("a", good, 2.0, above=False)]) == "holds"
    assert judge([Quantity("a", good, 1.1)]) == "inconclusive"


def test_one_seed_or_none_claims_nothing_and_the_sentence_says_so() -> None:
    assert judge([Quantity("a", seeds(5.0))]) == "no claim"
    assert judge([]) == "no claim"
    said = finding("n", "c", [Quantity("a", seeds(5.0)), Quantity("b", {})], []).sentence
    assert "a: 5.000, claimed above 0" in said and "b: no cell of it is finished" in said and "nan" not in said


def test_differences_pair_by_seed_and_none_is_left_out() -> None:
    rows: list[Row] = [
        {"name": "x", "seed": s, "settings": {}, "seconds": 1.0, "result": {"k": [v]}} for s, v in ((1, 2.0), (2, None))
    ]
    assert values(rows, "x", "k", 0) == {1: 2.0}
    assert less({1: 3.0, 2: 1.0}, {2: 0.5, 3: 9.0}) == {2: 0.5}
    assert gap({1: 3.0}, 4.0) == {1: 1.0}


# ------------------------------------------------------------------------------------- findings and figures of rows

SMALL: dict[str, dict[str, Any]] = {
    "rewards": {"updates": 2, "batch": 16, "group": 4, "width": 8, "layers": 1},
    "supervision": {"updates": 1, "batch": 4, "horizon": 4, "width": 8, "layers": 1},
    "recursions": {"updates": 1, "batch": 4, "pairs": 4, "width": 8, "layers": 1},
}


def rows_of(experiment: str, folder: Path, seeds: list[int]) -> list[Row]:
    found = []
    for cell in STUDY.cells(options(experiment), seeds):
        small = Cell(cell.name, cell.seed, cell.settings | SMALL[experiment])
        result = STUDY.run(small, folder)
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        found.append(
            {"name": cell.name, "seed": cell.seed, "settings": cell.settings, "seconds": 1.0, "result": result}
        )
    return found


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_and_judges_whatever_there_is(experiment: str, tmp_path: Path) -> None:
    chosen = options(experiment)
    rows = rows_of(experiment, tmp_path / "work", [0, 1])
    assert not (tmp_path / "work").exists()
    for some in ([], rows[:1], rows[::3], rows[: len(rows) // 2], rows):
        for found in STUDY.findings(some, chosen):
            assert len(some) > 1 or found.verdict == "no claim"
            assert found.claim and found.sentence and "nan" not in found.sentence
            assert all(set(row) == set(found.table[0]) for row in found.table)
            json.dumps([dict(row) for row in found.table], allow_nan=False)
        for figure, caption in STUDY.figures(some, chosen).values():
            assert type(figure) is type(subplots()[0]) and len(caption) > 50
            figure.canvas.draw()
    assert len(STUDY.figures(rows, chosen)) == 2
    names = {found.name for found in STUDY.findings(rows, chosen)}
    assert len(names) == len(STUDY.findings(rows, chosen)) > 4


def test_all_arms_of_the_experiments_are_known_cells() -> None:
    assert set(rewards.ARMS) == {c.name for c in STUDY.cells(options("rewards"), [0])}
    assert set(supervision.ARMS) == {c.name for c in STUDY.cells(options("supervision"), [0])}
    assert {f"{k}-{w}" for k in recursions.RECURSIONS for w in recursions.WAYS} < {
        c.name for c in STUDY.cells(options("recursions"), [0])
    }


def test_fewer_updates_are_another_cell() -> None:
    assert {c.settings["updates"] for c in STUDY.cells(options("supervision", updates=9), [0])} == {9}
