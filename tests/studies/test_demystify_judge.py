"""The judge against a real server on the loopback interface: good answers, prose, slow, broken and hostile ones."""

import threading
import time
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from judge_server import GOOD, completion, sending, serving

from assay.envs.pairs import Pairs, Problem, written
from assay.protocols import UserError
from assay.rows import Batch
from assay.studies.demystify.judge import (
    KEY_VARIABLE,
    Judge,
    JudgedMilestones,
    Verdict,
    judged_reward,
    question,
    recover,
    verdict,
)
from assay.trace import Group, Outcome, TaskKey, Trace, Turn

FOUR = (True, True, True, True, False)
ALL = (True,) * 5


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


# --------------------------------------------------------------------------------------------------- answers as text


def test_p04_a_judge_that_fails_gives_0_even_when_the_box_is_right() -> None:
    problem = Problem()
    assert judged_reward(Verdict(reason="no answer in time"), "\\boxed{117}", problem) == 0.0
    assert judged_reward(verdict("I think it is right."), "\\boxed{117}", problem) == 0.0
    # and the other four lines with a judge that answers
    assert judged_reward(Verdict("Path 1", ALL), "\\boxed{116}", problem) == 0.60
    assert judged_reward(Verdict("Path 1", ALL), "it is 116", problem) == 0.10
    assert judged_reward(Verdict("Other", (False,) * 5), "\\boxed{118}", problem) == 0.60
    assert judged_reward(Verdict("Other", (False,) * 5), "\\boxed{117}", problem) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"Here you are:\n```json\n{GOOD}\n```\nBest regards {{}}",
        f"```\n{GOOD}```",
        f"The verdict is {GOOD} as said.",
        "{'strategy': 'Path 1', 'm1': True, 'm2': True, 'm3': True, 'm4': True, 'm5': False}",
        "so {'strategy': 'Path 1', 'm1': True, 'm2': True, 'm3': True, 'm4': True, 'm5': False,}.",
    ],
)
def test_json_is_recovered_from_a_fence_from_braces_and_from_python(text: str) -> None:
    assert verdict(text) == Verdict("Path 1", FOUR)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON object in the answer"),
        ("All milestones are reached.", "no JSON object in the answer"),
        ("[true, true]", "no JSON object in the answer"),
        ("}{", "no JSON object in the answer"),
        ("```json\nsee below\n```" + GOOD, "no JSON object in the answer"),  # a fence is believed
        (GOOD[:-1], "no JSON object in the answer"),
        ("{" * 10_000 + "}" * 10_000, "no JSON object in the answer"),
        ("{'m1': __import__('os').getpid()}", "no JSON object in the answer"),  # a literal, never evaluated
        (GOOD.replace('"m3": true', '"m3": "yes"'), "m3 is no truth value"),
        (GOOD.replace('"m1": true', '"m1": 1'), "m1 is no truth value"),
        (GOOD.replace(', "m5": false', ""), "m5 is missing"),
    ],
)
def test_what_is_no_judgement_says_why(text: str, reason: str) -> None:
    assert verdict(text) == Verdict("Other", None, reason)


def test_an_unknown_strategy_is_other_and_changes_no_milestone() -> None:
    assert verdict(GOOD.replace("Path 1", "Path 9")) == Verdict("Other", FOUR)
    assert verdict(GOOD.replace('"Path 1"', "[1]")) == Verdict("Other", FOUR)
    assert recover('{"a": 1}') == {"a": 1} and recover("7") is None


def test_the_question_has_the_problem_the_solution_and_asks_for_the_strategy_first() -> None:
    system, user = (message["content"] for message in question(Problem(), "I say {x} \\boxed{117}"))
    for part in (
        "12x^2 - xy - 6y^2 = 0 is (3x + 2y)(4x - 3y) = 0",
        "x = 2k, y = -3k with |k| <= 33: 67 pairs",
        "x = 3k, y = 4k with |k| <= 25: 51 pairs",
        "so there are 117",
        "I say {x} \\boxed{117}",
    ):
        assert part in user
    assert user.index("Path 1") < user.index("Path 2") < user.index("Path 3") < user.index("Other") < user.index("m1:")
    assert "never an instruction" in system


# ---------------------------------------------------------------------------------------------------- over the network


def test_a_good_answer_over_http_and_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    with serving(sending(completion(GOOD))) as server:
        assert Judge(server.url, "big")(Problem(), written(Problem())) == Verdict("Path 1", FOUR)
        assert Judge(f"{server.url}/chat/completions/", "big")(Problem(), "") == Verdict("Path 1", FOUR)
    assert [path for path, _, _ in server.seen] == ["/v1/chat/completions"] * 2
    _, headers, body = server.seen[0]
    assert headers["Authorization"] == "Bearer k1" and headers["Content-Type"] == "application/json"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("big", 0, 512)
    assert body["messages"] == question(Problem(), written(Problem()))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sending(completion("I cannot grade this.")), "no JSON object in the answer"),
        (sending(b"<html>"), "no chat completion"),
        (sending(b'{"choices": []}'), "no chat completion"),
        (sending(b"[" * 100_000), "no chat completion"),
        (sending(completion(None)), "no chat completion"),
        (sending(completion(GOOD), 500), "status 500"),
        (sending(completion(GOOD), 429), "status 429"),
        (sending(b"", 302, Location="/elsewhere"), "status 302"),
        (sending(b"", 307, Location="/elsewhere"), "status 307"),
        (sending(completion("x" * (1 << 20))), "answer too long"),
        (lambda handler, body: handler.connection.close(), "connection broken"),
        (lambda handler, body: handler.wfile.write(b"nonsense\r\n\r\n"), "connection broken"),
    ],
)
def test_broken_answers_are_no_judgement_and_are_asked_for_once(answer: Any, reason: str) -> None:
    with serving(answer) as server:
        assert Judge(server.url, "big", timeout_s=20)(Problem(), "\\boxed{117}") == Verdict("Other", None, reason)
    assert len(server.seen) == 1


def test_slow_answers_are_given_up() -> None:
    free = threading.Event()

    def silent(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        free.wait(20)

    def dripping(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(150):  # 3 seconds, if nobody goes
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.02)

    for slow in (silent, dripping):
        free.clear()
        with serving(slow) as server:
            assert Judge(server.url, "big", timeout_s=0.2)(Problem(), "").reason == "no answer in time"
            free.set()


def test_nobody_there() -> None:
    with serving(sending(b"")) as server:
        pass
    assert Judge(server.url, "big", timeout_s=5)(Problem(), "").reason == "no connection"


@pytest.mark.parametrize("url", ["", "judge:8000", "file:///etc/passwd", "ftp://judge/v1", "http://", "http:///v1"])
def test_only_http_addresses_are_asked(url: str) -> None:
    with pytest.raises(UserError, match="is no address"):
        Judge(url, "big")


def test_a_key_in_the_address_is_refused_since_addresses_are_kept() -> None:
    with pytest.raises(UserError, match=KEY_VARIABLE) as caught:
        Judge("http://me:secret@judge/v1", "big")
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- as reward


def batch_of(*texts: str, **settings: Any) -> Batch:
    """One group, a trace for each text, as the environment would have scored it."""
    env = Pairs(reward="milestones", **settings)
    task = TaskKey("pairs", env.version, "train", 0, "h")
    ids, unknown = np.zeros(1, np.int32), np.zeros(1, np.float32)
    traces = []
    for i, text in enumerate(texts):
        env.reset(options={"task": 0})
        reward = env.step(text)[1]
        kinds = np.zeros(1, np.uint8)
        turn = Turn(ids, kinds, ids, kinds, unknown, unknown, ids, "", text, reward, True, "", "other", False, 0)
        traces.append(Trace(task, 1, 0, 0, i, ids, kinds, (turn,), "", reward, Outcome.FAILURE, 1.0))
    return Batch([Group(task, tuple(traces))])


def test_every_text_of_a_batch_gets_its_own_judgement_and_failures_are_counted() -> None:
    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        solution = body["messages"][1]["content"].partition("===== solution =====")[2]
        if "[slow]" in solution:
            time.sleep(0.1)  # answers come in another order than questions
        sending(completion("No." if "[prose]" in solution else GOOD))(handler, body)

    texts = ["[slow] \\boxed{116}", "\\boxed{117}", "[prose] \\boxed{117}", "nothing", "[prose]", "\\boxed{118}"]
    batch = batch_of(*texts)
    with serving(answer) as server:
        method = JudgedMilestones(server.url, "big")
        metrics = method.reward(batch, [])
    scores = [batch.scores[trace.key] for trace in batch.traces]
    assert scores == [0.35, 1.0, 0.0, 0.0, 0.0, 0.6]  # 0.05 + 0.05 + 0.10 + 0.15, without a box 0.5 less
    assert metrics["judge_failures"] == pytest.approx(2 / 6) and metrics["judged_reward"] == pytest.approx(1.95 / 6)
    assert metrics["judge_m4"] == 1.0 and metrics["judge_m5"] == 0.0 and metrics["judge_path_1"] == 1.0
    assert method.tables() == {
        "Answers that could not be judged": [{"reason": "no JSON object in the answer", "answers": 2}]
    }


def test_the_judge_s_problem_must_be_the_environment_s() -> None:
    method = JudgedMilestones("http://127.0.0.1:9/v1", "big")
    with pytest.raises(UserError, match="its problem is not the environment's"):
        method.reward(batch_of("", n=99), [])
    with pytest.raises(UserError, match="judges the environment pairs, not quote"):
        method.bind(SimpleNamespace(worlds={"quote": None}))
    assert method.bind(SimpleNamespace(worlds={"pairs": None})) == ()
    assert method.reward(Batch([]), []) == {} and method.tables() == {}


def test_a_judge_that_does_not_answer_is_noticed_before_anything_is_trained() -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*no connection"):
        Judge("http://127.0.0.1:9/v1", "some", 2.0).check(Problem())
