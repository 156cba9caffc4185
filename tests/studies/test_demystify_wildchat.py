"""The filter of WildChat rows, and files of them that are not what they should be."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.envs.quote import Quote
from assay.protocols import UserError
from assay.studies.demystify.wildchat import Prompts, keep, prompts, write_prompts


def row(text: Any = "How do bees fly?", role: str = "user", **changes: Any) -> dict[str, Any]:
    turns = [{"role": role, "content": text}, {"role": "assistant", "content": "With wings."}]
    return {"language": "English", "toxic": False, "redacted": False, "conversation": turns} | changes


def test_p12_the_filter_drops_what_the_paper_drops() -> None:
    assert keep(row()) == ("How do bees fly?", "")
    assert keep(row(language="German")) == (None, "not English")
    assert keep(row(toxic=True)) == (None, "toxic")
    assert keep(row(redacted=True)) == (None, "redacted")
    assert keep(row(role="assistant")) == (None, "first turn not the user's")
    for empty in ("", " \n\t"):
        assert keep(row(empty)) == (None, "first turn empty")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ([], "no object"),
        ("text", "no object"),
        ({}, "not English"),
        (row(language="english"), "not English"),
        ({"language": "English", "redacted": False, "conversation": []}, "no mark 'toxic'"),
        (row(toxic="no"), "no mark 'toxic'"),
        (row(redacted=None), "no mark 'redacted'"),
        (row(conversation=[]), "no conversation"),
        (row(conversation="user: hi"), "no conversation"),
        (row(conversation=["hi"]), "no conversation"),
        (row(conversation=[{}]), "first turn not the user's"),
        (row(7), "first turn empty"),
        (row(None), "first turn empty"),
        (row("x" * 20_001), "first turn too long"),
        (row(conversation=[{"role": "user", "content": "hi", "toxic": True}]), "toxic"),
    ],
)
def test_rows_that_are_not_what_they_should_be_are_dropped_with_a_reason(broken: Any, reason: str) -> None:
    assert keep(broken) == (None, reason)


def test_only_the_first_message_is_the_prompt_and_what_is_dropped_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    rows = [row("  One? "), row(toxic=True), row("Two\nlines"), row(language="French"), row(toxic=True), row("Three")]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", "utf-8")
    found = prompts(path)
    assert found == Prompts(("One?", "Two\nlines", "Three"), {"toxic": 2, "not English": 1})
    assert prompts(path, 2).kept == ("One?", "Two\nlines")
    write_prompts(found, tmp_path / "p.txt")
    assert Quote(prompts=str(tmp_path / "p.txt")).lines["train"] == ("One?", "Two lines", "Three")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "has no usable row; left out: nothing, as it is empty"),
        (b'{"language": "German"}\n', "has no usable row; left out: 1 not English"),
        (b"{}\n{\n", "line 2 is not JSON"),
        (b"\xff\xfe\n", "line 1 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "w.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=says):
        prompts(tmp_path / "w.jsonl")


def test_reading_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row("x" * 500)))
    monkeypatch.setattr("assay.studies.demystify.wildchat.ROW_BYTES", 300)
    with pytest.raises(UserError, match="line 2 has more than 300 bytes"):
        prompts(path)
    monkeypatch.setattr("assay.studies.demystify.wildchat.ROW_BYTES", 3000)
    monkeypatch.setattr("assay.studies.demystify.wildchat.ROWS", 1)
    with pytest.raises(UserError, match="has more than 1 lines"):
        prompts(path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        prompts(tmp_path / "none.jsonl")
