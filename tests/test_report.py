import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from assay import charts
from assay.charts import Line
from assay.protocols import UserError
from assay.records import anomalies
from assay.report import curve_png, difference, dropped, held_out, outcomes, page, time_shares, write_report
from assay.rundir import RunDir
from assay.stats import wilson
from assay.trace import Outcome, Provenance, TaskKey, Trace, Turn
from assay.transcripts import episode, paired_examples, tokens

ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
P = Provenance


def decode(ids):
    """One byte per id: as with a byte-level vocabulary, several ids may make one character."""
    return bytes(int(i) for i in ids).decode("utf-8", "replace")


def encode(text):
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)


def make_turn(observation="a red ball", action="forward", valid=True, answer=None):
    context, ids = encode(observation), encode(action if answer is None else answer)
    return Turn(
        context_ids=context,
        context_provenance=np.full(len(context), P.ENVIRONMENT, np.uint8),
        ids=ids,
        provenance=np.full(len(ids), P.SAMPLED, np.uint8),
        logprobs=np.full(len(ids), -0.5, np.float32),
        entropies=np.full(len(ids), 0.25, np.float32),
        closing_ids=np.zeros(0, np.int32),
        observation=observation,
        action=action,
        reward=0.0,
        valid=valid,
        anchor="a",
        skill="forward",
        noop=False,
        policy_version=0,
    )


def make_trace(task=0, outcome=Outcome.SUCCESS, turns=None, final="the end", reward=1.0, error=""):
    key = TaskKey("babyai/GoToLocal", "1", "iid", task, f"hash{task}")
    turns = (make_turn(),) if turns is None else tuple(turns)
    prompt = encode("Goal")
    return Trace(
        key, -1, 0, task, 0, prompt, np.full(4, P.TEMPLATE, np.uint8), turns, final, reward, outcome, 1.0, error=error
    )


def rate(successes, n):
    interval = wilson(successes, n)
    return {"success": interval.estimate, "low": interval.low, "high": interval.high, "n": n}


@pytest.fixture
def run(tmp_path):
    config = {"env": "babyai/GoToLocal", "method": ["grpo", "aem"], "model": "tiny-1m", "seed": 3}
    with RunDir.create(tmp_path / "run", config) as run:
        yield run


def fill(run, steps=5):
    for step in range(1, steps + 1):
        interval = wilson(min(step, 10), 10)
        metrics = {"success": interval.estimate, "success_low": interval.low, "success_high": interval.high}
        metrics |= {"entropy": 1.0, "kl": 0.1 * step, "my_metric": 2.0, "kept_groups": 3, "dropped_groups": 1}
        metrics |= {"episodes": 10.0, "outcome_success": float(step), "outcome_horizon": 10.0 - step}
        run.append_metrics(step, metrics)
        timings = {"model_s": 2.0, "env_wait_s": 1.0, "update_s": 4.0, "step_s": 8.0, "tokens_per_s": 100.0}
        run.append_timings(step, timings)
    before = {"sampled": rate(2, 20), "greedy": rate(3, 20), "ood": {"sampled": rate(1, 20)}}
    after = {"sampled": rate(18, 20), "greedy": rate(17, 20), "ood": {"sampled": rate(2, 20)}}
    run.write_evaluation({"before": before, "after": after})
    run.write_traces("before", [make_trace(0, Outcome.HORIZON, reward=0.0)])
    run.write_traces("after", [make_trace(0)])


class Page(HTMLParser):
    """Tags that were opened, their attributes, and the text between them; fails on a tag that is not closed."""

    VOID = ("meta", "path", "circle", "rect", "polygon", "br")

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(html)
        assert self.open == [], "tags that were not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(run, **keywords):
    return Page(write_report(run, **keywords).read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_shows_the_run_and_needs_no_network(run):
    fill(run)
    shown = read(run, decode=decode)
    figures = ("seed 3", "10.0 %", "90.0 %", "+80.0", "n = 20", "Entropy", "my_metric", "a red ball", "grpo, aem")
    for text in ("babyai/GoToLocal · grpo + aem · tiny-1m", "Before training", "After training", *figures):
        assert text in shown.text, text
    assert not {"script", "link", "img", "iframe"} & set(shown.tags)
    assert not [value for name, value in shown.attributes if name in ("src", "href") or (value and "//" in value)]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in shown.attributes


def test_text_of_models_and_environments_can_run_nothing(run):
    fill(run)
    attacker = make_trace(0, turns=[make_turn(ATTACK, ATTACK, answer=ATTACK)], final=ATTACK, error=ATTACK)
    run.write_traces("before", [attacker])
    run.replace_config({"env": ATTACK, "method": [ATTACK], ATTACK: ATTACK})
    run.append_metrics(6, {"success": 0.5, ATTACK: 1.0, "entropy": math.nan})
    table = {"title": ATTACK, "columns": [ATTACK], "rows": [[ATTACK]]}
    shown = read(run, decode=decode, context={"tables": [table], "anomalies": [ATTACK]})
    assert not {"script", "img"} & set(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert shown.text.count(ATTACK) > 8
    assert ("aria-label", ATTACK) in shown.attributes


SECTIONS = {
    "metrics.jsonl": ["Learning", "What was not learnt from", "Everything else"],
    "timings.jsonl": ["Where the time went", "Tokens per second"],
    "evaluation.json": ["Held-out success"],
    "traces/before.parquet": ["Before training"],
    "traces/after.parquet": ["After training"],
}


@pytest.mark.parametrize("missing", [*SECTIONS, "everything"])
def test_what_is_missing_leaves_its_section_out(run, missing):
    if missing != "everything":
        fill(run)
        (run.path / missing).unlink()
    text = read(run, decode=decode).text
    for path, sections in SECTIONS.items():
        for section in sections:
            assert (section in text) == (missing not in (path, "everything")), section


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "timings.jsonl", "evaluation.json", "traces/after.parquet", "config.toml"]
)
def test_what_cannot_be_read_is_named_on_the_page(run, name):
    fill(run)
    (run.path / name).write_text("\x00 damaged\n")
    assert name in read(run, decode=decode).text.split("Worth a look")[1]


@pytest.mark.parametrize(
    "evaluation",
    [
        {"before": 3, "after": {"sampled": {"success": "x"}}},
        {"before": {"sampled": 3}, "after": {"sampled": "x", "ood": []}},
        {"before": {"sampled": {"success": None, "low": None, "high": None, "n": 0}}},
    ],
)
def test_an_evaluation_without_rates_shows_none(evaluation):
    assert held_out(evaluation) == []
    assert anomalies([], evaluation) == []


def test_half_characters_of_a_model_do_not_stop_the_report(run):
    fill(run)
    run.write_traces("after", [make_trace(0, turns=[make_turn("\ud83d torn", "ok", answer="é")])])
    assert "? torn" in read(run, decode=decode).text


def test_without_a_decoder_the_examples_show_texts_only(run):
    fill(run)
    shown = read(run)
    assert "a red ball" in shown.text
    assert "as the policy saw it" not in shown.text


# ------------------------------------------------------------------------------------------------------------- figures


def test_the_difference_of_two_rates_has_newcombes_interval():
    # Newcombe 1998, table II, example (a): 56/70 - 48/80 = 0.20 [0.0524, 0.3339]
    change = difference(rate(48, 80), rate(56, 70))
    assert change == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_shares_of_time_add_up_to_the_whole_step(run):
    fill(run)
    legend = time_shares(run.read_timings())["legend"]
    assert [(name, seconds, share) for name, seconds, share, _ in legend] == [
        ("model", "10 s", "25 %"),
        ("environment", "5 s", "12 %"),
        ("update", "20 s", "50 %"),
        ("rest", "5 s", "12 %"),
    ]


def test_outcomes_are_counted_over_the_run(run):
    fill(run)
    totals = outcomes(run.read_metrics())["totals"]
    assert [total[:3] for total in totals] == [("success", "15", "30 %"), ("horizon", "35", "70 %")]


def test_dropped_groups_are_a_share_of_all_groups():
    records = [{"step": 1, "kept_groups": 6, "dropped_groups": 2}, {"step": 2, "kept_groups": 3, "dropped_groups": 1}]
    assert dropped(records) == [("groups dropped by the filter or as surplus", "3", "25 %")]


def test_anomalies_are_found_and_a_quiet_run_has_none():
    fine = {
        "kl": 0.1,
        "grad_norm": 1.0,
        "entropy": 1.0,
        "success": 0.5,
        "episodes": 100,
        "kept_groups": 4,
        "outcome_cut": 5.0,
    }
    quiet = [{"step": step, **fine} for step in range(1, 21)]
    assert anomalies(quiet, {}) == []
    odd = [dict(record) for record in quiet]
    odd[3]["kl"] = math.nan
    odd[4]["kept_groups"] = 0
    odd[5]["grad_norm"] = 11.0
    del odd[9]
    for record in odd:
        record["outcome_environment_error"] = 2.0
        record["outcome_cut"] = 6.0
    for record in odd[-3:]:
        record["entropy"], record["success"] = 0.01, 0.2
    panels = {"before": {"sampled": {"panel": "a"}}, "after": {"sampled": {"panel": "b"}}}
    found = "\n".join(anomalies(odd, panels))
    for text in (
        "kl was not finite at step 4.",
        "jump: 9 to 11",
        "No group was kept at step 5:",
        "ten times its median (1) at step 6.",
        "2 % of the episodes ended in an environment error",
        "6 % of the episodes were cut",
        "Entropy fell from 1 to 0.01",
        "success fell from 50 % (from step 2) to 20 %",
        "different panels",
    ):
        assert text in found, text


def test_the_curve_is_a_picture(run, tmp_path):
    with pytest.raises(UserError, match="expected training success"):
        curve_png(run, tmp_path / "curve.png")
    fill(run, steps=40)
    data = curve_png(run, tmp_path / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [1200, 675]


# ------------------------------------------------------------------------------------------------------------ examples


def test_examples_are_of_the_same_task_one_learnt_and_one_not():
    before = [make_trace(i, Outcome.SUCCESS if i == 0 else Outcome.FAILURE) for i in range(5)]
    after = [make_trace(i, Outcome.HORIZON if i == 3 else Outcome.SUCCESS) for i in (4, 3, 2, 1, 0)]
    pairs = paired_examples(before, after)
    assert [(pair["before"].task.id, pair["after"].task.id) for pair in pairs] == [(1, 1), (3, 3)]
    assert [list(pair) for pair in paired_examples(before, [])] == [["before"], ["before"]]
    assert paired_examples([], []) == []


def test_each_token_says_where_it_comes_from_and_what_is_known_of_it():
    ids = encode("ab€c")  # the euro sign is three ids
    provenance = np.array([P.SAMPLED] * 5 + [P.FORCED], np.uint8)
    logprobs = np.array([-1, -2, -3, -1, -1, np.nan], np.float32)
    shown = tokens(ids, provenance, decode, {"log-prob": logprobs})
    assert [(t["text"], t["origin"]) for t in shown] == [
        ("a", "sampled"),
        ("b", "sampled"),
        ("€", "sampled"),
        ("c", "forced"),
    ]
    assert shown[2]["said"] == "sampled, id 226, 130, 172\nlog-prob -3.000, -1.000, -1.000"
    assert shown[3]["said"] == "forced, id 99"
    assert shown[0]["surprise"] == round(1 / math.log(100), 2)
    assert shown[2]["surprise"] == 1.0  # a probability of e^-5
    assert "".join(t["text"] for t in tokens(encode("é")[:1], np.zeros(1, np.uint8), decode)) == "\ufffd"


def test_no_token_is_lost_or_doubled_whatever_the_ids():
    draws = np.random.default_rng(0)
    for _ in range(50):
        ids = draws.integers(0, 256, 40).astype(np.int32)
        provenance = draws.integers(0, 3, 40).astype(np.uint8)
        shown = tokens(ids, provenance, decode)
        said = [int(i) for t in shown for i in re.findall(r"\d+", t["said"])]
        assert said == ids.tolist()
        origins = [t["origin"] for t in shown for _ in re.findall(r"\d+", t["said"])]
        assert origins == [P(p).name.lower() for p in provenance]


def test_advantages_fall_on_the_policy_tokens():
    turn = make_turn(answer="abc")
    turn.provenance[1] = P.FORCED
    shown = episode(make_trace(turns=[turn, make_turn(answer="d")]), decode, [1.0, -1.0, 0.0])
    assert [t["credit"] for t in shown["turns"][0]["answer"]] == ["up", "", "down"]
    assert [t["credit"] for t in shown["turns"][1]["answer"]] == [""]
    with pytest.raises(ValueError, match="3 policy tokens, not 1 advantages"):
        episode(make_trace(turns=[turn, make_turn(answer="d")]), decode, [1.0])


def test_an_episode_without_turns_and_an_environment_error_are_shown(run):
    run.write_traces("before", [make_trace(0, Outcome.ENVIRONMENT_ERROR, turns=[], reward=math.nan, error="it hung")])
    text = read(run, decode=decode).text
    assert "environment error" in text
    assert "it hung" in text


def test_a_long_episode_says_how_many_turns_are_not_shown():
    shown = episode(make_trace(turns=[make_turn()] * 43), decode)
    assert (len(shown["turns"]), shown["hidden"], shown["length"]) == (40, 3, 43)


# -------------------------------------------------------------------------------------------------------------- charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.3, 9.2, [0, 2.5, 5, 7.5, 10]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (2, 2, [1, 1.5, 2, 2.5, 3]),
    ],
)
def test_ticks_are_round_and_cover_the_data(low, high, expected):
    assert charts.ticks(low, high) == expected


@pytest.mark.parametrize("scale", [1e-12, 3e-5, 0.7, 12345.0, 1e15])
def test_ticks_cover_any_scale(scale):
    marks = charts.ticks(-scale, 2 * scale)
    assert marks[0] <= -scale * (1 - 1e-6) and marks[-1] >= 2 * scale * (1 - 1e-6)
    assert 3 <= len(marks) <= 7


def test_a_line_goes_through_its_points_and_breaks_where_none_is_known():
    picture = str(charts.line_chart([Line("x", [(0, 0.0), (1, 1.0), (2, math.nan), (3, 0.5), (4, 1.0)])], percent=True))
    path = re.search(r'<path d="(M[^"]*)" fill="none"', picture)[1]
    # the axis goes from x = 46 to 350 and from y = 176 (0 %) to 10 (100 %)
    assert path == "M46.0 176.0L122.0 10.0M274.0 93.0L350.0 10.0"


def test_a_chart_without_a_finite_value_is_left_out():
    assert charts.line_chart([Line("x", [(1, math.nan), (2, math.inf)])]) == ""
    assert charts.line_chart([]) == ""
    assert charts.line_chart([Line("x", [(1, 3.0)])]) != ""


def test_long_lines_are_thinned_to_means_of_neighbours():
    line = charts.thin(Line("x", [(float(i), float(i)) for i in range(1000)]))
    assert len(line.points) <= charts.MOST_POINTS
    assert line.points[0] == (3.0, 3.0)  # of 0 to 6
    assert charts.mean([y for _, y in line.points[:-1]]) == pytest.approx(charts.mean(range(994)))


def test_stacked_bars_fill_the_height_exactly():
    picture = str(charts.stacked_bars([1, 2], {"won": [3, 0], "lost": [1, 5]}, {"won": "good", "lost": "bad"}))
    heights = [float(h) for h in re.findall(r'<rect[^>]* height="([\d.]+)"', picture)]
    whole = charts.WIDE[1] - charts.TOP - charts.BOTTOM
    assert heights == pytest.approx([whole * 0.75, whole * 0.25, whole], abs=0.06)


def test_the_page_is_a_function_of_the_run(run):
    fill(run)
    assert page(run, decode, {}) == page(run, decode, {})
