"""The full-size protocol: its cells, its starts, its rules; as a whole on a policy of 300 thousand parameters (slow)."""

import copy
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge_server import GOOD, completion, sending, serving

from assay.build import Bench, build
from assay.config import resolve
from assay.envs.pairs import Problem, written
from assay.envs.quote import TARGET
from assay.episode import Job
from assay.learner.torch_learner import TorchLearner
from assay.protocols import UserError
from assay.rows import Stream
from assay.studies.demystify import full, full_policies
from assay.studies.demystify.full_options import FullOptions
from assay.studies.demystify.full_policies import example_rows, fingerprint, run_values, tune_down, tune_up, whole_text
from assay.studies.grid import Cell


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"Some line, number {i}!" for i in range(300)))
    return path


def small(lines: Path | None = None, **changes: Any) -> FullOptions:
    """The protocol at 2 steps, 8 samples."""
    values = {"model": "tiny-300k", "steps": 2, "samples": 8, "rollouts": 4, "sft_steps": 2, "max_tokens": 24}
    return FullOptions(**(values | ({"lines": str(lines)} if lines else {"task": "maths"}) | changes))


def settings_of(options: FullOptions, start: str = "sft+", reward: str = "sparse") -> dict[str, Any]:
    (cell,) = [c for c in full.cells(options, [0]) if c.name.endswith(f"-{start}-{reward}")]
    return cell.settings


# --------------------------------------------------------------------------------------------------------------- cells


def test_absent_options_are_the_paper_s_values(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("\n".join(f"line {i}" for i in range(6400)))
    quote = settings_of(FullOptions(model="tiny-300k", lines=str(tmp_path / "l.txt")))
    maths = settings_of(FullOptions(model="tiny-300k", task="maths"))
    names = ("steps", "rollouts", "epochs", "sft_steps", "samples", "max_tokens", "lora_rank")
    assert [quote[name] for name in names] == [128, 32, 4, 500, 10_000, 75, 16]
    assert [maths[name] for name in names] == [54, 32, 4, 24, 128, 1500, 16]
    names = ("learning_rate", "sft_learning_rate", "temperature", "eval_temperature")
    assert [quote[name] for name in names] == [2e-5, 2e-5, 0.4, 0.9]
    assert [maths[name] for name in names] == [5e-5, 5e-5, 0.7, 0.7]
    (tmp_path / "l.txt").write_text("\n".join(f"line {i}" for i in range(6399)))
    with pytest.raises(UserError, match="SFT\\+ takes 6400 different lines, and there are 6399"):
        full.cells(FullOptions(model="tiny-300k", lines=str(tmp_path / "l.txt")), [0])


def test_without_a_file_there_are_as_many_lines_as_the_paper_s_sft_takes() -> None:
    cells = full.cells(FullOptions(model="tiny-300k"), [0])
    assert len(cells) == 6
    usable = full.lines_of("", full.TARGET).usable
    assert len(set(usable)) == len(usable) >= 6400


def test_a_run_is_what_the_paper_s_tables_say(lines: Path, tmp_path: Path) -> None:
    quote = resolve(full.rl_values(settings_of(small(lines), "base", "dense"), 3, "tiny-300k", tmp_path), "test")
    assert (quote.env, quote.env_args) == ("quote", {"reward": "dense"})
    assert (quote.method, quote.tasks_per_step, quote.rollouts_per_task, quote.epochs) == (["ppo"], 1, 4, 4)
    assert (quote.slots.kl, quote.slots.kl_coefficient, quote.slots.advantage_norm) == ("reward", 0.01, "mean")
    assert (quote.slots.gamma, quote.slots.lam, quote.slots.clip_low, quote.slots.clip_high) == (1, 1, 0.2, 0.2)
    assert (quote.lora_rank, quote.lora_alpha, quote.temperature, quote.seed) == (16, 32, 0.4, 3)
    maths = resolve(full.rl_values(settings_of(small(algorithm="grpo"), "sft-", "dense"), 0, "m", tmp_path), "test")
    assert maths.env_args == {"reward": "milestones", "form": "short"}
    assert (maths.method, maths.slots.kl_coefficient, maths.temperature) == (["grpo"], 1e-4, 0.7)


def test_cells_differ_where_their_numbers_do(lines: Path) -> None:
    cells = full.cells(small(lines), [0, 1])
    names = [f"full-quote-{start}-{reward}" for start in ("base", "sft+", "sft-") for reward in ("sparse", "dense")]
    assert [(c.name, c.seed) for c in cells] == [(name, seed) for seed in (0, 1) for name in names]
    assert all(full.is_full(json.loads(json.dumps(c.settings))) for c in cells)
    assert len(full.cells(small(lines, reward="dense"), [0])) == 3
    before = {c.name: c.settings for c in cells if c.seed == 0}
    lines.write_text(lines.read_text().replace("Some", "Another"))
    changed = [c.name for c in full.cells(small(lines), [0]) if before[c.name] != c.settings]
    assert changed == ["full-quote-sft+-sparse", "full-quote-sft+-dense"]
    tuned = [c.name for c in full.cells(small(lines, sft_steps=3, mask_prompt=True), [0])]
    assert tuned == names and settings_of(small(lines, sft_steps=3), "base") == before["full-quote-base-sparse"]


def test_the_judge_is_a_setting_of_dense_maths_cells_only() -> None:
    options = small(judge="http://127.0.0.1:1/v1", judge_model="big")
    judged = {c.name for c in full.cells(options, [0]) if c.settings["judge"]}
    assert judged == {f"full-maths-{start}-dense" for start in ("base", "sft+", "sft-")}
    assert {c.settings["form"] for c in full.cells(options, [0])} == {"words"}
    assert {c.settings["form"] for c in full.cells(small(), [0])} == {"short"}
    values = full.rl_values(settings_of(options, "base", "dense"), 0, "tiny-300k", Path("x"))
    assert values["method"] == ["ppo", full.JUDGED] and values["method_args"][full.JUDGED]["model"] == "big"
    resolve(values, "test")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": ""}, "full size needs --model"),
        ({"judge": "http://127.0.0.1:1/v1", "task": "quote"}, "--judge is for --task maths"),
        ({"judge": "ftp://x"}, "is no address"),
        ({"task": "quote", "lines": "/nowhere"}, "cannot be read"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(
    changes: dict[str, Any], says: str, lines: Path
) -> None:
    base = {"lines": str(lines)} if changes.get("task") == "quote" else {}
    with pytest.raises(UserError, match=says):
        full.cells(small(**(base | changes)), [0])


def test_another_model_at_the_same_path_is_another_cell(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a" * 100)
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(str(tmp_path))
    assert first == fingerprint(str(tmp_path)) and fingerprint("tiny-300k") not in ("", first)
    (tmp_path / "model.safetensors").write_bytes(b"a" * 99 + b"b")
    assert fingerprint(str(tmp_path)) != first
    assert fingerprint("somebody/some-model") == ""


# ------------------------------------------------------------------------------------------------------------- starts


def bench_of(settings: dict[str, Any], **changes: Any) -> Bench:
    return build(resolve(run_values(settings, 0, "tiny-300k") | changes, "test"))


def test_examples_have_the_very_format_of_a_run(lines: Path) -> None:
    for settings in (settings_of(small(lines)), settings_of(small())):
        with closing(bench_of(settings)) as bench:
            (trace,) = bench.driver(1.0, 0).collect([Job(0)])
            (row,) = example_rows(bench, ["quote: hi"])
            context = np.concatenate([trace.prompt_ids, trace.turns[0].context_ids])
            np.testing.assert_array_equal(row.ids[: len(context)], context)
            np.testing.assert_array_equal(row.at, np.arange(len(context), len(row.ids)))
            assert bench.renderer.action(row.targets) == "quote: hi" and row.targets[-1] in bench.renderer.stop_ids
            np.testing.assert_array_equal(whole_text(row).targets, row.ids[1:])


def test_p06_sft_minus_is_sft_plus_with_the_opposite_gradient(lines: Path) -> None:
    """AdamW's first step is odd in the gradient: opposite gradients move every weight by opposite amounts."""
    with closing(bench_of(settings_of(small(lines)))) as bench:
        moved = []
        rows = [whole_text(row) for row in example_rows(bench, ["quote: " + TARGET])]
        for weight in (1.0, -1.0):
            network = copy.copy(bench.network)
            network.model = copy.deepcopy(bench.network.model)
            learner = TorchLearner(network, learning_rate=1e-3)
            before = {name: p.detach().clone() for name, p in learner.parameters.items()}
            loss = learner.update([Stream("sft", rows, "nll", "token", weight=weight)], 0.0)["loss"]
            moved.append((loss, {name: p.detach() - before[name] for name, p in learner.parameters.items()}))
        (up, ascent), (down, descent) = moved
        assert up == -down and up > 1
        for name, change in ascent.items():
            torch.testing.assert_close(change, -descent[name], rtol=0, atol=2e-7)  # rounding of the sums w + d, w - d
        assert max(float(change.abs().max()) for change in ascent.values()) > 9e-4


def test_sft_minus_stops_where_nothing_is_known_any_more_and_without_that_at_its_steps() -> None:
    options = small(sft_steps=40, sft_learning_rate=1e-2, lora_rank=0)
    for changes, tuned in (({}, False), ({"sft_steps": 1}, True)):
        with closing(bench_of(settings_of(options))) as bench:
            if tuned:
                tune_up(bench, settings_of(options), 0)
            record = tune_down(bench, settings_of(options, "sft-") | changes, 0)
            assert record["floor"] == pytest.approx(np.log(2048)) and record["updates"] < 40
            assert tuned == (record["cross_entropy"] < record["floor"])


def test_sft_plus_lowers_the_cross_entropy_and_counts_what_it_learnt_from(lines: Path) -> None:
    options = small(lines, sft_steps=5, sft_learning_rate=3e-3, lora_rank=0)
    with closing(bench_of(settings_of(options))) as bench:
        first = example_rows(bench, ["quote: " + TARGET])
        learner = TorchLearner(bench.network, learning_rate=1.0)
        learner.score(first, frozenset({"target"}))
        before = float(np.mean(first[0].columns["target"]))
        record = tune_up(bench, settings_of(options), 0)
        learner.score(first, frozenset({"target"}))
        assert float(np.mean(first[0].columns["target"])) > before + 1
        assert (record["examples"], record["updates"], record["lines"], record["blank"]) == (80, 5, 300, 0)


# ------------------------------------------------------------------------------------------------------------ findings


def row(start: str, reward: str, seed: int, before: float, after: float) -> dict[str, Any]:
    settings = {"scale": "full", "start": start, "reward": reward, "steps": 10, "rollouts": 32, "model": "m"}
    what = {"near": 0.0, "invalid": 0.5, "samples": 100, "entropy": 1.0}
    result = {"before": {"exact": before} | what, "before_rl": {"exact": 0.01} | what, "after": {"exact": after} | what}
    return {"name": f"full-quote-{start}-{reward}", "seed": seed, "settings": settings, "seconds": 1, "result": result}


def verdicts(rows: list[dict[str, Any]], **options: Any) -> dict[str, str]:
    return {found.name: found.verdict for found in full.findings(rows, FullOptions(model="m", **options))}


def test_verdicts_follow_the_intervals_over_seeds() -> None:
    afters = {  # start, reward: exact after RL by seed
        ("base", "sparse"): (0.1, 0.12, 0.08),
        ("base", "dense"): (0.5, 0.55, 0.45),
        ("sft+", "sparse"): (0.99, 0.98, 1.0),
        ("sft+", "dense"): (0.7, 0.72, 0.69),
        ("sft-", "sparse"): (0.0, 0.0, 0.0),
        ("sft-", "dense"): (0.3, 0.31, 0.32),
    }
    rows = [
        row(start, reward, seed, 0.0 if start == "sft-" else 0.2, value)
        for (start, reward), values in afters.items()
        for seed, value in enumerate(values)
    ]
    assert verdicts(rows) == {
        "coverage": "holds",
        "crushed, sparse": "holds",
        "crushed, dense": "does not hold",
        "dense lifts base": "holds",
        "proxy": "holds",
    }
    assert "proxy" not in verdicts(rows, task="maths")
    nothing = [row("sft+", reward, seed, 0.0, 0.0) for reward in ("sparse", "dense") for seed in range(3)]
    assert verdicts(nothing)["proxy"] == verdicts(nothing)["crushed, sparse"] == "no claim"
    (first, *_) = full.findings(rows, FullOptions(model="m"))
    assert "+0.7900" in first.sentence and "over 3 seeds" in first.sentence and len(first.table) == 6
    assert first.table[1] == {
        "start": "base", "reward": "dense", "seeds": 3, "before": 0.2, "before, RL": 0.01,
        "P(hit)": round(1 - 0.99**320, 4), "after": 0.5, "near": 0.0, "invalid": 0.5, "H before": 1.0, "H after": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((0.5, 0.5), (0.1, 0.11), "reversed"),
        ((0.5, 0.5), (0.1, 0.95), "inconclusive"),
        ((0.3, 0.2), (0.3, 0.2), "does not hold"),
        ((0.0, 0.0), (0.9, 0.8), "no claim"),  # not a start that samples the target
        ((0.1,), (0.9,), "no claim"),
        ((), (), "no claim"),
    ],
)
def test_a_rise_that_is_not_there_is_said(before: Any, after: Any, verdict: str) -> None:
    rows = [row("sft+", "sparse", seed, *values) for seed, values in enumerate(zip(before, after, strict=True))]
    assert verdicts(rows)["coverage"] == verdict


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((0.0, 0.1), (0.0, 0.0), "no claim"),
        ((0.0,), (0.0,), "no claim"),
        ((0.0, 0.0), (0.0, 0.0), "holds"),
        ((0.0, 0.0), (0.0, 0.3), "inconclusive"),
        ((), (), "no claim"),
    ],
)
def test_a_prior_that_was_not_crushed_makes_no_claim(before: Any, after: Any, verdict: str) -> None:
    rows = [row("sft-", "sparse", seed, *values) for seed, values in enumerate(zip(before, after, strict=True))]
    assert verdicts([*rows, row("base", "sparse", 0, 0.3, 0.3)])["crushed, sparse"] == verdict
    assert verdicts([*rows, row("base", "sparse", 0, 0.0, 0.0)])["crushed, sparse"] == (
        verdict if any(before) else "no claim"
    )


def test_figures_show_whatever_cells_there_are() -> None:
    options = FullOptions(model="m")
    assert full.figures([], options) == {}
    figure, caption = full.figures([row("base", "sparse", seed, 0.1, 0.2) for seed in range(2)], options)["full-matrix"]
    assert [axis.get_title() for axis in figure.axes] == ["sparse reward", "dense reward"] * 2 and "Look for" in caption


# ----------------------------------------------------------------------------------------------------- as a whole, slow


def finite(value: Any) -> bool:
    json.dumps(value, allow_nan=False)
    return True


@pytest.mark.slow
def test_the_whole_protocol_on_a_tiny_model(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, rows, made = small(lines), [], []
    monkeypatch.setattr(full_policies, "_make", _counting(full_policies._make, made))
    for cell in full.cells(options, [0]):
        result = full.run(cell, tmp_path / "work" / cell.name)
        rows.append({"name": cell.name, "seed": 0, "settings": cell.settings, "seconds": 1.0, "result": result})
        assert finite(result) and len(result["curve_reward"]) == 2 and result["after"]["samples"] == 8
        assert (result["before"]["temperature"], result["before_rl"]["temperature"]) == (0.9, 0.4)
    assert len(made) == 2, "SFT+ and SFT- are made once each, for both rewards"
    assert rows[2]["result"]["before"] == rows[3]["result"]["before"] and rows[2]["result"]["sft"]["examples"] == 32
    assert {found.verdict for found in full.findings(rows, options)} == {"no claim"}  # one seed
    assert set(full.figures(rows, options)) == {"full-matrix"}
    again = full.run(full.cells(options, [0])[3], tmp_path / "elsewhere" / "cell")
    assert again == rows[3]["result"], "same seed, same bits, wherever it runs"


def _counting(function: Any, calls: list[Any]) -> Any:
    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return counted


@pytest.mark.slow
def test_a_cell_that_was_killed_goes_on_from_its_last_checkpoint(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.train import Trainer

    (cell,) = [c for c in full.cells(small(lines, steps=13, epochs=1), [0]) if c.name == "full-quote-sft--dense"]
    whole = full.run(cell, tmp_path / "a" / "cell")
    step, played = Trainer.step, []

    def killed(self: Trainer) -> Any:
        played.append(self.spent["steps"])
        if self.spent["steps"] == 11 and len(played) < 13:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        full.run(cell, tmp_path / "b" / "cell")
    assert full.run(cell, tmp_path / "b" / "cell") == whole
    assert played == [*range(12), 10, 11, 12], "from the checkpoint of step 10"


@pytest.mark.slow
def test_sft_plus_makes_a_prior_and_sparse_rl_raises_it(tmp_path: Path) -> None:
    options = small(
        steps=25, samples=128, rollouts=32, sft_steps=40, sft_learning_rate=5e-3, learning_rate=4e-4, epochs=2,
        max_tokens=64, lora_rank=0, algorithm="grpo",
    )  # fmt: skip
    (cell,) = [c for c in full.cells(options, [0]) if c.name == "full-maths-sft+-sparse"]
    result = full.run(cell, tmp_path / "cell")
    assert 0.05 < result["before"]["exact"] < 0.5 and result["after"]["exact"] > result["before"]["exact"] + 0.25
    assert result["after"]["invalid"] < result["before"]["invalid"]


@pytest.mark.slow
def test_dense_maths_is_trained_on_what_a_judge_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(sending(completion(GOOD))) as server:
        (cell,) = [c for c in full.cells(small(judge=server.url, epochs=1), [0]) if c.name == "full-maths-sft+-dense"]
        result = full.run(cell, tmp_path / "cell")
    assert len(server.seen) == 1 + 2 * 4 and result["judge_failures"] == [
        0.0,
        0.0,
    ]  # asked once before, with a worked solution
    assert (
        result["sft"]["cross_entropy"] > 0
        and written(Problem())[:20] not in server.seen[0][2]["messages"][0]["content"]
    )
    config = (tmp_path / "cell" / "run" / "config.toml").read_text()
    assert "JudgedMilestones" in config and isinstance(cell, Cell)
