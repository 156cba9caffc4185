"""Quote: parsing and rewards with numbers by hand and by brute force, then the environment."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from assay.envs.inline import Inline
from assay.envs.quote import (
    PREFIX,
    PROMPT,
    TARGET,
    Quote,
    dense_reward,
    extract,
    find,
    legacy_norm,
    levenshtein,
    norm,
    sparse_reward,
)
from assay.envs.registry import make
from assay.protocols import Env, Reset, Restore, Snapshot, Step, UserError


def texts(n: int) -> list[str]:
    """Strings with what can go wrong: case, punctuation, every kind of white space, letters without ASCII."""
    draws = np.random.default_rng(0)
    letters = list("aB zZ_9-:'\".\t\n\r\x0b\x1c\u00a0\u2003|<>`éÜßİΣςñ日本ʼ\u0301\u200b🙂")
    return ["".join(draws.choice(letters, draws.integers(0, 12))) for _ in range(n)]


def by_recursion(a: str, b: str) -> int:
    """Levenshtein's definition, without a table."""
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return by_recursion(a[1:], b[1:])
    return 1 + min(by_recursion(a[1:], b[1:]), by_recursion(a[1:], b), by_recursion(a, b[1:]))


def reward(text: str, **settings: object) -> float:
    env = Quote(**settings)
    env.reset(options={"task": 0})
    return env.step(text)[1]


def test_the_target_is_as_long_as_the_paper_s() -> None:
    assert len(TARGET) == 68 and len(TARGET.split()) == 14 and norm(TARGET) == TARGET == legacy_norm(TARGET)
    assert Quote().target == TARGET and Quote().prefix == PREFIX


# ------------------------------------------------------------------------------------------------ property 1


def test_p01_norm_of_norm_is_norm() -> None:
    for text in texts(4000):
        assert norm(norm(text)) == norm(text)
        assert not norm(text) or (norm(text)[0] != " " and norm(text)[-1] != " " and "  " not in norm(text))
    assert norm(" Life, like -- IT'S\t1st_ ") == "life like its 1st_"


def test_p01_legacy_norm_strips_first_so_punctuation_at_the_start_leaves_a_space() -> None:
    assert legacy_norm("- a B") == " a b" and norm("- a B") == "a b"
    assert legacy_norm(legacy_norm("- a B")) == "a b", "not idempotent: why there is a norm of ours"
    answer = f"quote: - {TARGET}"
    assert reward(answer) == 1.0
    assert reward(answer, legacy_norm=True) == 1 - 0.5 * (69 - 68) / 69  # 0.99275...
    assert reward(answer, legacy_norm=True) == pytest.approx(0.9928, abs=5e-5)


def test_p01_extraction_drops_case_punctuation_and_the_second_line() -> None:
    assert extract('Quote: "Life is like…"\nfoo') == "life is like"
    assert extract("sure! QUOTE  :  a b | c") == "a b"
    assert extract("quote: a <br> b") == "a"
    assert extract("quote:\n a b \n c") == "a b", "white space behind the colon may be a newline"
    assert extract("quote: one\nquote: two") == "one"


def test_p01_without_the_format_the_first_line_counts_without_a_leading_word() -> None:
    assert extract("\n  \nQuote a b\nc") == "a b"  # no colon
    assert extract("a quote, b") == "a quote b", "only a leading one goes"
    assert extract("") == extract(" \n\t") == extract("quote:") == ""
    assert find("Quote a b") is None and find("quote:") == "" and find("QUOTE : a") == "a"


def test_p01_without_a_prefix_the_whole_answer_is_the_quote() -> None:
    assert extract("Life is\nlike quote: x", prefix="") == "life is like quote x"
    assert find(" \n", prefix="") is None and find("a", prefix="") == "a"


def test_p01_a_prefix_is_text_not_a_pattern() -> None:
    assert find("axb: no", prefix="a.b:") is None and find("A.B : yes", prefix="a.b:") == "yes"
    assert find("say hello", prefix="say") == "hello"


# ------------------------------------------------------------------------------------------------ property 2


def test_p02_levenshtein_is_its_definition() -> None:
    words = ["".join(letters) for n in range(5) for letters in itertools.product("ab", repeat=n)]
    for a, b in itertools.product(words, words):
        assert levenshtein(a, b) == by_recursion(a, b)
    assert levenshtein("kitten", "sitting") == 3 and levenshtein("日本", "日x本") == 1


def test_p02_dense_reward_is_in_0_1_symmetric_and_1_for_equals_only() -> None:
    plain = sorted({norm(text) for text in texts(60)})
    assert "" in plain
    for a, b in itertools.product(plain, plain):
        assert 0.0 <= dense_reward(a, b) <= 1.0
        assert dense_reward(a, b) == dense_reward(b, a)
        assert (dense_reward(a, b) == 1.0) == (a == b != "")
    assert dense_reward(TARGET, TARGET) == 1.0 and dense_reward("", TARGET) == 0.0 == dense_reward("", "")


def test_p02_dense_reward_separates_what_the_sparse_one_cannot() -> None:
    half, near = "life is like a box of chocolates", TARGET.replace("youre", "you")
    assert reward(f"quote: {half}", reward="dense") == 1 - 36 / 68 == pytest.approx(0.471, abs=5e-4)
    assert reward(f"quote: {near}", reward="dense") == 1 - 2 / 68 == pytest.approx(0.971, abs=5e-4)
    assert reward(f"quote: {half}") == reward(f"quote: {near}") == 0.0
    assert reward("", reward="dense") == 0.0


# ------------------------------------------------------------------------------------------------ property 3


def test_p03_sparse_reward_is_0_or_from_a_half_to_1() -> None:
    for target, text in itertools.product(("a", "b z", "9"), map(norm, texts(3000))):
        for credit in (True, False):
            value = sparse_reward(text, target, credit)
            assert value == 0.0 or 0.5 <= value <= 1.0
            assert (value == 1.0) == (text == target)
            assert (value > 0) == (target in text if credit else text == target)


def test_p03_words_around_the_target_cost_half_their_share_of_the_length() -> None:
    text = f"my mama always said {TARGET}"
    assert len(text) == 88
    assert reward(f"quote: {text}") == 1 - 0.5 * 20 / 88 == pytest.approx(0.886, abs=5e-4)
    assert reward(f"quote: {text}", substring_credit=False) == 0.0
    assert sparse_reward("x" * 10_000 + TARGET, TARGET) == pytest.approx(0.5034, abs=1e-4)  # 1 - 0.5 x 10000 / 10068
    assert sparse_reward("", "") == 1.0


# ------------------------------------------------------------------------------------------------ environment


def test_one_turn_ends_the_episode_and_says_what_it_was() -> None:
    env = make("quote")
    assert isinstance(env, Env)
    observation, info = env.reset(options={"task": 3, "split": "iid"})
    assert info["goal"] == PROMPT and info["horizon"] == 1 and len(observation) < 20
    assert TARGET not in norm(info["goal"] + observation + env.instructions)
    assert env.expert() == f"quote: {TARGET}"
    *_, reward, terminated, truncated, info = env.step(env.expert())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["success"] and info["valid"] and not info["noop"]
    for call in (lambda: env.step("again"), env.expert):
        with pytest.raises(UserError, match="no episode is running"):
            call()


@pytest.mark.parametrize(
    ("answer", "valid", "success"),
    [
        (f"quote: {TARGET}", True, True),
        (f"Quote : {TARGET.upper()}!!", True, True),
        (TARGET, False, True),  # compared by its first line, as the released code does, and counted as without format
        (f"quote: oh {TARGET}", True, False),  # credit, no success
        ("quote: may the force be with you", True, False),
        ("I cannot do that", False, False),
        ("", False, False),
    ],
)
def test_a_missing_format_and_a_wrong_quote_are_counted_apart(answer: str, valid: bool, success: bool) -> None:
    env = Quote()
    env.reset(options={"task": 0})
    info = env.step(answer)[4]
    assert (info["valid"], info["success"]) == (valid, success)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_evidence_names_exact_part_and_closeness(kind: str) -> None:
    env = Quote(reward=kind)
    with pytest.raises(UserError, match="no episode has begun"):
        env.evidence()
    env.reset(options={"task": 0})
    assert [c["passed"] for c in env.evidence()["checks"]] == [False] * 3
    env.step(f"quote: oh {TARGET}")
    found = env.evidence()
    assert found["gold"] == [TARGET]
    assert [c["passed"] for c in found["checks"]] == [False, True, False]
    assert found["checks"][2]["value"] == 1 - 3 / 71


def test_without_held_out_splits_share_prompts_and_their_hashes_do_not_say_otherwise_of_panels() -> None:
    env = Quote()
    seen = {split: env.reset(options={"task": 5, "split": split})[1] for split in ("train", "iid", "ood")}
    assert len({info["goal"] for info in seen.values()}) == 1 and len({info["hash"] for info in seen.values()}) == 3
    assert [env.size(split) for split in seen] == [None] * 3
    other = Quote(target="here s looking at you kid").reset(options={"task": 5})[1]["hash"]
    assert other != seen["train"]["hash"]


def test_a_file_of_prompts_is_played_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone ä\r\ntwo\nthree\n".encode())
    env = Quote(prompts=str(path))
    assert [env.reset(options={"task": i})[1]["goal"] for i in range(4)] == ["one ä", "two", "three", "one ä"]
    assert (env.size("train"), env.size("iid"), env.size("ood")) == (3, None, None)
    assert env.version != Quote().version


def test_held_out_lines_are_disjoint_by_content(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n".join(f"prompt {i % 60}" for i in range(80)))  # some lines twice
    env = Quote(prompts=str(path), held_out=True)
    goals, hashes = {}, {}
    for split in ("train", "iid", "ood"):
        infos = [env.reset(options={"task": i, "split": split})[1] for i in range(env.size(split))]
        goals[split], hashes[split] = {i["goal"] for i in infos}, {i["hash"] for i in infos}
    assert sum(env.size(split) for split in goals) == 80 and sum(map(len, goals.values())) == 60
    for a, b in itertools.combinations(goals, 2):
        assert not goals[a] & goals[b] and not hashes[a] & hashes[b]
    path.write_text("prompt 1\n")
    with pytest.raises(UserError, match="held_out leaves no prompt for"):
        Quote(prompts=str(path), held_out=True)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "line 1 is blank"),
        (b"a\n\nb\n", "line 2 is blank"),
        (b"ab\xff\n", "is not UTF-8: byte 2 is 0xff"),
        (b"a\n" + b"x" * 20_001, "line 2 has more than 20000 characters"),
        (b"a\n" * (1 << 23) + b"a", "has more than 16777216 bytes"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "p.txt").write_bytes(data)
    with pytest.raises(UserError, match=says):
        Quote(prompts=str(tmp_path / "p.txt"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward": "denser"}, "one of sparse, dense"),
        ({"target": "?!"}, "target has 2 characters"),
        ({"target": "a" * 1001}, "at most 1000"),
        ({"prefix": " quote"}, "prefix is ' quote'"),
        ({"prompts": "/nowhere/p.txt"}, "cannot be read: No such file"),
        ({"prompts": "/"}, "cannot be read: Is a directory"),
    ],
)
def test_settings_out_of_range_are_the_users_error(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Quote(**settings)
    with pytest.raises(UserError, match="a task id is a number from 0"):
        Quote().reset(options={"task": -1})


def test_it_is_hosted_like_any_other_and_a_snapshot_is_a_state() -> None:
    with Inline("quote", {"reward": "dense", "prefix": ""}) as pool:
        for request, expected in (
            (Reset("train", 0), 0.0),
            (Snapshot(), 1),
            (Step(TARGET), 1.0),
            (Restore(1), None),
            (Step("life is like a box of chocolates"), 1 - 36 / 68),
        ):
            pool.submit(0, request)
            (answer,) = pool.collect([0])
            assert getattr(answer, "reward", answer) == expected
        assert pool.spec["brief"] == "quote" and pool.spec["sizes"] == {"train": None, "iid": None, "ood": None}
