"""`assay audit` through the real command line: what it prints, and the exit code."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import only_json

from assay.audit.checks import CHECKS
from assay.cli.main import main

Text = pytest.CaptureFixture[str]


def sample(**more: object) -> dict:
    """One TRL-like completion with tokens; groups are runs of one prompt."""
    return {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -1.0], "reward": 1.0, **more}


def written(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def sound(folder: Path) -> str:
    pair = sample(completion_ids=[3, 5], logprobs=[-0.5, -2.0], reward=0.0, advantages=-1.0)
    return written(folder / "sound.jsonl", sample(advantages=1.0), pair)


def unsound(folder: Path) -> str:
    """Log-probs above 0."""
    return written(folder / "unsound.jsonl", sample(logprobs=[0.5, 1.0]), sample(reward=0.0))


def test_a_sound_file_ends_with_0_and_says_what_was_read_and_what_did_not_run(tmp_path: Path, capsys: Text) -> None:
    path = sound(tmp_path)
    assert main(["audit", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"read       {path} as trl\n")
    assert "2 samples, 2 episodes, 1 group, 8 tokens, 4 of them trained" in out
    assert "columns    ids, mask, logprobs, advantages; reward, group" in out
    assert "A204 (no --model)" in out and "no --declare.top-p" in out and out.splitlines()[-1].endswith("found")


def test_an_error_ends_with_1_and_shows_code_sentence_rows_and_advice(tmp_path: Path, capsys: Text) -> None:
    assert main(["audit", unsound(tmp_path), "--codes", "A201"]) == 1
    out = capsys.readouterr().out
    assert f"error A201 {CHECKS['A201'].name}\n" in out
    assert "\n  at   line 1" in out and "\n  try  " in out
    assert out.splitlines()[-1] == "1 check ran: 1 error; 'assay audit --explain A201' says more"


def test_json_is_one_object_with_findings_and_the_same_exit_code(tmp_path: Path, capsys: Text) -> None:
    path = unsound(tmp_path)
    assert main(["audit", path, "--json"]) == 1
    record = only_json(capsys.readouterr().out)
    assert (record["source"], record["format"], record["samples"], record["tokens"]) == (path, "trl", 2, 8)
    assert "A201" in [finding["code"] for finding in record["findings"]] and record["columns"]["tokens"][0] == "ids"
    assert set(record["ran"]) | set(record["skipped"]) == set(CHECKS) and not set(record["ran"]) & set(
        record["skipped"]
    )
    finding = next(f for f in record["findings"] if f["code"] == "A201")
    assert (
        set(finding) == {"code", "severity", "sentence", "count", "rows", "advice"} and finding["severity"] == "error"
    )


def test_what_the_user_declares_reaches_the_checks_and_stands_above_the_file(tmp_path: Path, capsys: Text) -> None:
    declare = ["--declare.top-p", "0.9", "--declare.end-ids", "4", "5", "--declare.reward-range", "0", "0.5"]
    assert main(["audit", sound(tmp_path), *declare, "--json"]) == 1
    record = only_json(capsys.readouterr().out)
    assert record["declared"] == {"top_p": 0.9, "end_ids": [4, 5], "reward_range": [0.0, 0.5]}
    assert {"A206", "A405"} <= {finding["code"] for finding in record["findings"]}
    assert main(["audit", sound(tmp_path), "--limit", "1", "--codes", "A4", "--json"]) == 0
    record = only_json(capsys.readouterr().out)
    assert record["samples"] == 1 and {code[:2] for code in (*record["ran"], *record["skipped"])} == {"A4"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["PATH is missing"]),
        (["absent.jsonl"], ["absent.jsonl", "no file"]),
        (["sound.jsonl", "--format", "tlr"], ["'tlr'", "trl"]),
        (["sound.jsonl", "--format", "verl"], ["sound.jsonl, line 1", "'output'"]),
        (["sound.jsonl", "--codes", "A999"], ["A999"]),
        (["sound.jsonl", "--declare.estimater", "grpo"], ["--declare.estimator"]),
        (["sound.jsonl", "--declare.top-p", "2"], ["top-p"]),
        (["sound.jsonl", "--declare.reward-range", "1"], ["reward-range"]),
        (["sound.jsonl", "--limit", "0"], ["--limit 0"]),
        (["sound.jsonl", "other.jsonl"], ["other.jsonl"]),
        (["sound.jsonl", "--model", "no-such-model"], ["no-such-model"]),
        (["sound.jsonl", "--tokenizer", "no-such-model"], ["no-such-model"]),
        (["a.pkl"], ["pickle", "save_file"]),
        (["--explain", "A999"], ["A999"]),
    ],
)
def test_mistakes_end_with_2_and_one_sentence(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sound(tmp_path)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([1]))
    assert main(["audit", *arguments]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("assay: ") and "Traceback" not in err
    for word in words:
        assert word in last


def test_list_and_explain_need_no_file(capsys: Text) -> None:
    assert main(["audit", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in lines[: len(CHECKS)]] == list(CHECKS) and all(len(line) < 160 for line in lines)
    assert main(["audit", "--list", "--json"]) == 0
    assert [check["code"] for check in only_json(capsys.readouterr().out)] == list(CHECKS)
    assert main(["audit", "--explain", "a201"]) == 0
    assert "A201" in capsys.readouterr().out
    assert main(["audit", "--explain", "A201", "--json"]) == 0
    assert only_json(capsys.readouterr().out)["code"] == "A201"


def test_text_of_a_file_cannot_steer_the_terminal_or_break_the_output(tmp_path: Path) -> None:
    """Escape sequences, newlines and lone surrogates in what is shown: in a real process with a strict encoding."""
    evil = "\x1b[2J\nassay: all is well \ud800"
    record = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.5]}
    (tmp_path / "\x1b[31m.jsonl").write_text(json.dumps(record) + "\n")
    lines = [{"input": evil, "output": "a", "score": s, "uid": f"{evil}_{i}_0"} for i, s in enumerate((1.0, 1.0))]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("\x1b[31m.jsonl", "b.jsonl"):
        command = [sys.executable, "-m", "assay", "audit", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "utf-8:strict", "PATH": ""})
        assert done.returncode in (0, 1) and b"\x1b" not in done.stdout and b"Traceback" not in done.stderr
        assert not any(line.startswith(b"assay: all is well") for line in done.stdout.splitlines())


def test_a_run_audited_with_its_own_model_agrees_to_rounding(finished: Path, policy: Path, capsys: Text) -> None:
    assert main(["audit", str(finished), "--json"]) in (0, 1)
    record = only_json(capsys.readouterr().out)
    assert record["format"] == "assay" and record["declared"]["estimator"] == "grpo" and record["samples"] == 14
    assert (
        main(["audit", str(finished / "traces/before.parquet"), "--model", str(policy), "--codes", "A204", "--json"])
        == 0
    )
    record = only_json(capsys.readouterr().out)
    assert record["ran"] == ["A204"] and record["findings"] == []
    first = str(finished / "traces/step-000001.parquet")
    declare = ["--declare.temperature", "0.25"]  # not that of the run: the same model, another distribution
    assert main(["audit", first, "--model", str(policy), *declare, "--codes", "A204", "--json"]) in (0, 1)
    assert [f["code"] for f in only_json(capsys.readouterr().out)["findings"]] == ["A204"]
