"""`assay methods`: what is known of each, from its source; and what methods say of a run before it begins."""

import inspect
import json
from pathlib import Path

import pytest
from small_run import SMALL, only_json

from assay.cli.main import main
from assay.cli.methods import BY_SETTING, HOOKS, NEEDS, describe, names, verdicts
from assay.cli.signature import parameters, type_name
from assay.config import RunConfig
from assay.methods import registry
from assay.methods.presets import PRESETS
from assay.protocols import Method

Text = pytest.CaptureFixture[str]


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PAPERS, "sharp-er", "fake_methods:Sharp")


def test_a_class_is_described_by_its_source(papers: None) -> None:
    known = describe("sharp-er")
    assert (known["line"], known["paper"]) == ("Sharpens the advantage", "arXiv 1234.56789, Sharper")
    assert (known["fidelity"], known["page"]) == ("reconstruction", "docs/methods/sharp-er.md")
    assert known["stages"] == ["advantage (reads or rescales)", "needs entropy"]  # bind is none
    assert [tuple(s.values()) for s in known["settings"]] == [
        ("lam", "--sharp-er.lam", "float", 1.0, "how sharp; 0 switches it off (paper: 1)."),
        ("pace", "--sharp-er.pace", "ratio | tanh", "ratio", "what follows the ratio."),
        ("keep_all", "--sharp-er.keep-all", "bool", True, "nothing is thrown away."),
        ("most", "--sharp-er.most", "int | None", None, ""),
    ]


def test_a_class_of_ones_own_is_described_with_what_it_inherits() -> None:
    known = describe("fake_methods:Other")
    assert (known["line"], known["fidelity"], known["page"]) == ("Sets it too", "inferred", "")
    assert known["stages"] == ["advantage (sets it)"]


SOURCE = """
from assay import Method

class Idea(Method):
    '''One.'''
    needs = frozenset({"value"})

    def __init__(self, on: bool = False):
        self.needs = frozenset({"entropy", "value"} if on else ())
        if on:
            self.keep = lambda group: True

    def streams(self, rows, streams, progress):
        advantage = rows.select = 3
        return streams
"""


def test_what_settings_decide_is_said_to_be_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "idea_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert describe("idea_of_mine:Idea")["stages"] == [
        "keeps groups",
        "loss streams",
        "needs a critic",
        "needs entropy (by its settings)",
    ]


def test_every_hook_of_a_method_has_words() -> None:
    hooks = {name for name in vars(Method) if not name.startswith("_") and name not in ("name", "paper", "fidelity")}
    assert hooks - {"needs", "bind", "load_state_dict"} == set(HOOKS) >= set(BY_SETTING)


def test_a_preset_is_described_by_its_slots() -> None:
    known = describe("dapo")
    assert known["differs"] == {"keep": "mixed", "clip_high": 0.28, "dual_clip": 10.0, "denominator": "token"}
    assert known["stages"][0] == "advantage: reward minus group mean, over group std"
    assert "gate: ratio clipped to [0.8, 1.28], at most 10 where the advantage is negative" in known["stages"]
    assert [s["default"] for s in known["settings"] if s["flag"] == "--slots.clip-high"] == [0.28]


@pytest.mark.parametrize("name", names())
def test_what_is_said_of_a_method_is_what_python_says(name: str) -> None:
    known = describe(name)
    assert known["line"] and known["paper"] and known["fidelity"] in registry.FIDELITIES
    assert all(setting["meaning"] for setting in known["settings"])
    if name in PRESETS:
        return
    real = registry.class_of(name)
    assert (real.name, real.paper, real.fidelity) == (name, known["paper"], known["fidelity"])
    taken = inspect.signature(real).parameters
    assert [(p.name, p.default) for p in parameters(registry.PAPERS[name])] == [
        (p.name, p.default) for p in taken.values()
    ]
    assert [s["name"] for s in known["settings"]] == list(taken)  # every setting is a flag
    overridden = [words for hook, words in HOOKS.items() if getattr(real, hook) is not getattr(Method, hook)]
    assert [words for words in known["stages"] if not words.startswith("needs")] == overridden
    made = registry.make(name, {})
    always = [f"needs {NEEDS[need]}" for need in NEEDS if need in made.needs]
    assert set(always) <= {words.removesuffix(" (by its settings)") for words in known["stages"]}


def test_types_in_words() -> None:
    cases = {"steps": "int", "lora_rank": "int | None", "thinking": "off | keep", "env": "str", "budget": "str | None"}
    for name, words in cases.items():
        assert type_name(RunConfig.model_fields[name].annotation) == words


def test_the_list_names_presets_and_papers(capsys: Text) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(names())]] == names()
    assert "arXiv 2605.00425" in next(line for line in lines if line.startswith("aem "))
    assert main(["methods", "--json"]) == 0
    assert [record["name"] for record in only_json(capsys.readouterr().out)] == names()


def test_one_method_with_everything(papers: None, capsys: Text) -> None:
    assert main(["methods", "sharp-er"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "sharp-er: Sharpens the advantage",
        "fidelity  reconstruction: known but for some part",
        "stages    advantage (reads or rescales), needs entropy",
        "docs/methods/sharp-er.md",
        "assay train --env countdown --method grpo,sharp-er",
        "--sharp-er.keep-all  bool, default true",
    ):
        assert text in shown
    assert main(["methods", "sharp-er", "--json"]) == 0
    assert only_json(capsys.readouterr().out) == describe("sharp-er") | {"verdicts": []}
    assert main(["methods", "dapo"]) == 0
    assert "--slots.clip-high  float, default 0.28 (set by this preset)" in capsys.readouterr().out


def test_a_method_that_does_not_exist(capsys: Text) -> None:
    assert main(["methods", "aemm"]) == 2
    assert capsys.readouterr().err == "assay: method 'aemm' does not exist: did you mean 'aem'?\n"


RECIPE = """
a = "one"
b = "two"
[arms.one]
method = ["rloo,sharp-er"]
[arms.two]
method = ["rloo"{more}]
"""


@pytest.mark.parametrize("more", ["", ', "sharp-er"'])
def test_the_last_verdict_on_a_claim_about_a_method(
    more: str, papers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of a paper against another one is about the paper; a preset that both arms share is not the question."""
    monkeypatch.setattr("assay.cli.methods.RECIPES", tmp_path)
    (tmp_path / "mine.toml").write_text(RECIPE.format(more=more))
    verdict = {"name": "mine", "claim": "It helps.", "verdict": "holds", "sentence": "better", "date": "2026-01-01"}
    (tmp_path / "verdicts.json").write_text(json.dumps({"verdicts": [verdict]}))
    assert [v["verdict"] for v in verdicts("sharp-er", tmp_path / "none")] == ["holds"]
    assert verdicts("rloo", tmp_path) == verdicts("grpo", tmp_path) == []
    (own := tmp_path / "results").mkdir()
    (own / "verdicts.json").write_text(json.dumps({"verdicts": [verdict | {"verdict": "reversed"}]}))
    assert [v["verdict"] for v in verdicts("sharp-er", own)] == ["reversed"]


DRY = ["train", *SMALL, "--dry-run", "--method"]


def test_a_dry_run_says_what_methods_say_of_the_run(papers: None, capsys: Text) -> None:
    assert main([*DRY, "sharp-er"]) == 0
    assert "# warnings: sharp-er: one update per batch: nothing to sharpen\n" in capsys.readouterr().out
    assert main([*DRY, "sharp-er", "--updates-per-batch", "2"]) == 0
    assert "# warnings" not in capsys.readouterr().out
    assert main([*DRY, "grpo"]) == 0
    assert "# warnings" not in capsys.readouterr().out


def test_a_dry_run_makes_the_renderer_for_a_method_that_asks_it(policy: Path, capsys: Text) -> None:
    asked = [*DRY, "fake_methods:Reader", "--model"]
    assert main([*asked, str(policy)]) == 0
    assert "Reader: babyai/GoToRedBallNoDists stops at 1 ids, knows" in capsys.readouterr().out
    assert main([*asked, "nobody/a-model-on-the-hub"]) == 0  # nothing is fetched for a dry run
    assert "# warnings" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["sharp-er", "--env", "fake_env:Rest"], "Sharp cannot rest"),
        (["sharp-er", "--sharp-er.lam", "11"], "method 'sharp-er': lam is 11, and must lie in [0, 10]"),
        (["fake_methods:Estimator", "fake_methods:Other"], "two methods set the advantage: Estimator, Other; use one"),
        (["fake_methods:Estimatr"], "fake_methods:Estimatr"),
    ],
)
def test_what_cannot_work_is_refused_by_the_run_and_by_its_dry_run(
    more: list[str], message: str, papers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Text
) -> None:
    (tmp_path / "fake_env.py").write_text(
        "from assay.envs.countdown import Countdown\n\nclass Rest(Countdown):\n    skills = ('rest',)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for dry in ([], ["--dry-run"]):
        out = tmp_path / "run"
        assert main(["train", *SMALL, "--out", str(out), "--method", *more, *dry]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1 and not out.exists()
