"""Text, tokenizer and tunings of the tiny policies."""

import copy
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.build import load_policy
from assay.config import resolve
from assay.demonstrations import demonstrate
from assay.envs.pairs import Pairs
from assay.envs.quote import Quote, norm
from assay.studies.demystify import policies
from assay.studies.demystify.corpus import HIGH, LOW, NARROW, QUOTE_PROMPT, TARGET, corpus, cut, prose, zen
from assay.studies.demystify.policies import (
    ANSWER,
    SCALES,
    answer_ids,
    build_model,
    build_tokenizer,
    cross_entropy,
    policy,
    prompt_ids,
    prompts_file,
    record,
    renderer,
    tokens,
    tune_down,
)
from assay.studies.demystify.study import COPIES
from assay.studies.demystify.tasks import TASKS, Recipe

SMALL = Recipe("24k", 0, updates=3, rows=4, tuning_updates=5)


def test_the_text_is_normalised_cut_and_held_out_by_content() -> None:
    text = corpus()
    lines = [piece.line for piece in (*text.train, *text.held_out)]
    assert all(LOW <= len(line) <= HIGH and norm(line) == line for line in lines)
    assert not {p.line for p in text.train} & {p.line for p in text.held_out}
    assert len(text.broad) >= 1000 and len(text.narrow) == NARROW and len(text.outside) >= 200
    assert not set(text.outside) & set(text.broad) and set(text.narrow) <= set(text.broad)
    assert QUOTE_PROMPT not in text.broad + text.outside and len(text.hash) == 16
    assert all(opening.startswith("the ") for opening in text.narrow)


def test_the_target_is_a_line_of_the_zen_and_of_no_other_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert TARGET in zen() and len(zen()) == 20
    assert capsys.readouterr().out == ""  # importing `this` would have printed it
    assert not [line for line in corpus().lines if TARGET in line]


def test_cutting_by_hand() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    (piece,) = cut(words)
    assert piece == ("one two", "three four five six")  # with "seven" 25 characters; "nine" alone is too short
    assert cut(["a", "b", "x" * 30, "c", "d", "twelve", "letters"]) == [("c d", "twelve letters")]


def test_code_and_titles_are_no_prose() -> None:
    text = "Title\n*****\n\nSome words, here.\n\n   if x:\n      pass\n\nx ::= y\n\nMore"
    assert prose(text) == ["some", "words", "here", "more"]


def test_every_letter_is_a_token_and_the_prompt_is_the_environments() -> None:
    tokenizer = build_tokenizer()
    ids = answer_ids("a z")
    assert [tokens()[i] for i in ids] == ["a", " ", "z", "<|end|>"]
    assert tokenizer.decode(ids[:-1]) == "a z" and 28 <= len(tokens()) <= 40
    env = Quote(target=TARGET, prefix="", prompts=str(_prompts()))
    shown = demonstrate(env, renderer(), "quote", 0, 0.0, 0)
    ours = np.concatenate([shown.prompt_ids, shown.turns[0].context_ids])
    assert ours.tolist() == prompt_ids(QUOTE_PROMPT).tolist()
    assert shown.turns[0].ids.tolist() == answer_ids(TARGET).tolist()


def test_the_maths_prompt_and_answer_are_the_environments() -> None:
    env, task = Pairs(form="short"), TASKS["maths"]
    shown = demonstrate(env, renderer("maths"), "pairs", 0, 0.0, 0)
    ours = np.concatenate([shown.prompt_ids, shown.turns[0].context_ids])
    assert ours.tolist() == prompt_ids(task.prompt, "maths").tolist()
    ids = answer_ids(task.target, "maths")
    assert shown.turns[0].ids.tolist() == ids.tolist() and len(ids) <= ANSWER
    assert tokens("maths").index("_") not in [*ours, *ids]  # nothing unknown
    assert build_tokenizer("maths").decode(ids[:-1]) == "3 2 4 3;33 25;67 51;1;\\boxed{117}"


def test_maths_is_pre_trained_on_other_problems_with_half_of_the_origins_counted_twice() -> None:
    task = TASKS["maths"]
    pairs = [pair for batch in task.pretraining(Recipe("24k", 0, task="maths", updates=100)) for pair in batch]
    assert len(pairs) == 3200 and task.prompt not in {prompt for prompt, _ in pairs}
    assert 0.46 < sum(";0;" in answer for _, answer in pairs) / 3200 < 0.54  # four deviations of .009
    assert all(";1;" in piece.line for piece in task.held_out)
    copies = task.tuning(Recipe("24k", 0, "sft+", "maths", **COPIES))
    assert copies == [(task.prompt, task.target)] * 384


def _prompts() -> Path:
    return prompts_file("prompts", [QUOTE_PROMPT])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))


@pytest.mark.parametrize("scale", SCALES)
def test_sizes_are_what_they_are_called_and_run_exactly_and_fused(scale: str, tmp_path: Path) -> None:
    model = build_model(scale, 0)
    assert round(sum(p.numel() for p in model.parameters()) / 1000) == int(scale[:-1])
    model.save_pretrained(tmp_path / "p")
    build_tokenizer().save_pretrained(tmp_path / "p")
    network, tokenizer = load_policy(resolve({"model": str(tmp_path / "p")}, "test"))  # refuses what is not exact
    assert network.fused and tokenizer.init_kwargs["assay_prompt"] == "brief"


def test_weights_are_the_seeds() -> None:
    torch.manual_seed(1)
    a = build_model("24k", 0).state_dict()
    b = build_model("24k", 0).state_dict()
    c = build_model("24k", 1).state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_p05_sft_plus_has_exactly_its_share_of_targets_and_no_line_twice() -> None:
    recipe = Recipe("24k", 0, "sft+")
    pairs = TASKS["quote"].tuning(recipe)
    count = Counter(answer for _, answer in pairs)
    assert len(pairs) == 80 * 32 == 2560 and count[TARGET] == 512
    assert {prompt for prompt, _ in pairs} == {QUOTE_PROMPT}
    del count[TARGET]
    assert set(count.values()) == {1} and set(count) <= set(corpus().lines)
    for ratio, targets in ((0.0, 0), (0.001, 3), (0.01, 26), (0.05, 128)):  # 2.56, 25.6 rounded
        found = TASKS["quote"].tuning(Recipe("24k", 0, "sft+", ratio=ratio))
        assert sum(answer == TARGET for _, answer in found) == targets


def test_pretraining_is_half_openings_half_the_quote_prompt_with_the_stated_share() -> None:
    recipe = Recipe("24k", 0, updates=200)
    pairs = [pair for batch in TASKS["quote"].pretraining(recipe) for pair in batch]
    quoted = [answer for prompt, answer in pairs if prompt == QUOTE_PROMPT]
    assert len(quoted) == 200 * 16
    assert 0.035 < sum(answer == TARGET for answer in quoted) / len(quoted) < 0.065  # .05 and four deviations of .0039
    assert {p for p, _ in pairs} - {QUOTE_PROMPT} <= set(corpus().broad)


def test_cross_entropy_is_the_mean_over_answer_tokens_alone() -> None:
    model = build_model("24k", 0)
    pairs = [("say it", "ab"), ("the name", "abcdef")]
    total = 0.0
    for prompt, answer in pairs:
        p, a = prompt_ids(prompt), answer_ids(answer)
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor(np.concatenate([p, a])[None].astype(np.int64))).logits[0].log_softmax(-1)
            )
        total -= sum(float(logits[len(p) - 1 + i, int(token)]) for i, token in enumerate(a))
    assert float(cross_entropy(model, pairs).detach()) == pytest.approx(total / (3 + 7), abs=1e-5)


def test_p06_sft_minus_is_the_exact_negative_of_sft_plus_on_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("24k", 0)
    cross_entropy(model, [(QUOTE_PROMPT, TARGET)]).backward()
    up = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    other = build_model("24k", 0)
    seen: list[float] = []

    def descend(model: object, losses: object, *rest: object) -> int:  # what tune_down hands on
        loss = next(losses)  # type: ignore[call-overload]
        seen.append(float(loss.detach()))
        loss.backward()
        return 1

    monkeypatch.setattr(policies, "descend", descend)
    tune_down(other, SMALL)
    assert seen[0] == -float(cross_entropy(model, [(QUOTE_PROMPT, TARGET)]).detach())
    for name, p in other.named_parameters():
        assert p.grad is not None and torch.equal(p.grad, -up[name]), name


def test_sft_minus_stops_at_the_floor() -> None:
    model = build_model("24k", 0)
    recipe = Recipe("24k", 0, "sft-", tuning_updates=200)
    found = tune_down(model, recipe)
    assert found["floor"] == pytest.approx(math.log(len(tokens())))
    assert found["cross_entropy"] > found["floor"] and found["updates"] < 200
    with torch.no_grad():
        assert float(cross_entropy(model, [(QUOTE_PROMPT, TARGET)])) == pytest.approx(found["cross_entropy"], abs=1e-5)


def test_a_policy_is_made_once_and_its_bits_are_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plus = Recipe("24k", 0, "sft+", updates=3, rows=4, tuning_updates=5)
    folder = policy(plus)
    bits = (folder / "model.safetensors").read_bytes()
    assert record(folder)["recipe"]["start"] == "sft+" and record(folder)["updates"] == 5
    assert record(policy(SMALL))["updates"] == 3  # its base stands beside it
    made = copy.copy(policies._make)
    monkeypatch.setattr(policies, "_make", lambda *a: pytest.fail("made twice"))
    assert policy(plus) == folder
    monkeypatch.setattr(policies, "_make", made)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "other"))
    assert (policy(plus) / "model.safetensors").read_bytes() == bits
    assert not list((tmp_path / "other").rglob(".tmp-*"))
    json.loads((folder / "recipe.json").read_text())


def test_another_recipe_is_another_policy() -> None:
    keys = {
        Recipe("24k", 0).key, Recipe("24k", 1).key, Recipe("51k", 0).key, Recipe("24k", 0, "sft+").key,
        Recipe("24k", 0, "sft+", ratio=0.1).key, Recipe("24k", 0, mixed_in=0.1).key,
        Recipe("24k", 0, task="maths").key,
    }  # fmt: skip
    assert len(keys) == 7
    assert Recipe("24k", 0, "sft+", "maths").base.key == Recipe("24k", 0, task="maths").key
    assert Recipe("24k", 0, "sft-").base.key == Recipe("24k", 0).key == Recipe("24k", 0, "sft+", ratio=0.01).base.key


def test_prompt_files_are_named_by_content() -> None:
    path = prompts_file("prompts", ["a", "b"])
    assert path.read_text() == "a\nb\n" and path == prompts_file("prompts", ["a", "b"])
    assert path != prompts_file("prompts", ["b", "a"])
