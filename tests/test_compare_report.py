"""A comparison reads the same in all four outputs, whatever the arms are called and however little is there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.compare import _finite
from assay.compare import plain as as_json
from assay.compare_charts import COLOURS, WIDTH, curves, forest, interval, matrix, seed_plot
from assay.compare_report import latex, markdown, replicate_table, terminal, write_page
from assay.compare_words import MOST_SENTENCES, arm_rows, headlines, pair_rows
from assay.judge import judge

METRICS = ("iid sampled", "iid greedy", "ood sampled", "ood greedy")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
TRICKY = r"a&b_c%d$e#f~g^h\i{j} | `k` *l* [m](javascript:alert(3))"
LONG = "grpo --slots.denominator token " * 8
NAMES = [HOSTILE, TRICKY, LONG, "[0pt] first", "esc\x1b[31m\u202eevil\nline"]


def comparison(
    arms: Mapping[str, Sequence[float]], metrics: Sequence[str] = METRICS, deciding: str = "iid sampled", **changed: Any
) -> dict[str, Any]:
    """compare.json of arms whose figures over seeds 0, 1, ... are given; every metric has the same ones."""
    figures = {arm: dict(enumerate(values)) for arm, values in arms.items()}
    seeds = sorted({seed for values in figures.values() for seed in values})
    mean = {
        arm: {"estimate": sum(v) / len(v), "low": min(v), "high": max(v), "n": len(v), "over": "seeds", "method": "bca"}
        for arm, v in arms.items()
        if v
    }
    line = {"x": [1000.0, 2000.0, 3000.0], "iqm": [0.25, 0.5, 0.75], "low": [0.2, 0.4, 0.7], "high": [0.3, 0.6, 0.8]}
    pairs = [as_json(pair) for pair in judge(figures, effect=0.05)]
    spent = {"seconds": 120.0, "env_steps": 41234, "tokens": 90000}
    result = {
        "schema": 1,
        "assay": "0.1.0",
        "title": f"{', '.join(arms)} on babyai/GoToLocal",
        "env": "babyai/GoToLocal",
        "environment_version": "ed19971e",
        "model": "tiny-1m",
        "budget": "env-steps:200k",
        "metric": deciding,
        "metrics": list(metrics),
        "effect": 0.05,
        "alpha": 0.05,
        "looks": 1,
        "seeds": seeds,
        "panel": {"iid": "aa11", "ood": "bb22", "tasks": 200},
        "start": {metric: {"success": 0.25, "low": 0.2, "high": 0.3, "n": 200} for metric in metrics},
        "arms": {
            arm: {
                "method": ["grpo"],
                "differs": {"slots.denominator": "token"} if i else {},
                "fidelity": "paper",
                "seeds": {str(s): {metric: v for metric in metrics} | spent for s, v in values.items()},
                "mean": {metric: mean[arm] for metric in metrics if arm in mean},
            }
            for i, (arm, values) in enumerate(figures.items())
        },
        "pairs": [{"metric": metric, **pair} for metric in metrics for pair in pairs],
        "noise": [],
        "curves": {axis: {arm: line | {"n": 8} for arm in arms} for axis in ("env_steps", "tokens", "seconds")},
        "unfinished": [],
        "command": "assay compare grpo dr-grpo --env babyai/GoToLocal",
        "date": "2026-12-01",
        "machine": "Linux x86_64",
    }
    found: dict[str, Any] = _finite(result | changed)
    return found


BASE = [0.80, 0.85, 0.90, 0.82]
AHEAD = [0.91, 0.94, 1.00, 0.95]  # differences 0.11, 0.09, 0.10, 0.13
UNSURE = [0.95, 0.70, 0.99, 0.80]


def said(result: Mapping[str, Any], width: int = 80) -> str:
    console = Console(width=width, highlight=False, force_terminal=True, color_system=None)
    with console.capture() as capture:
        for renderable in terminal(result):
            console.print(renderable)
    return capture.get()


def html(result: Mapping[str, Any], tmp_path: Path) -> str:
    write_page(result, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


class Page(HTMLParser):
    """Well-formed as far as tags go, and what it holds."""

    EMPTY = frozenset({"meta", "rect", "circle", "path", "polygon", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)
        self.close()
        self.said = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def soundness(result: Mapping[str, Any], tmp_path: Path) -> None:
    """What must hold of every output of every result."""
    text = html(result, tmp_path)
    page = Page(text)
    assert not page.wrong and not page.open
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in page.tags for name in attrs)
    assert not re.search(r"\b(nan|inf|None|undefined)\b", page.said)
    assert not any(
        re.search(r"nan|inf|None", attrs.get(k) or "") for _, attrs in page.tags for k in ("d", "cx", "x", "y")
    )
    for table in re.findall(r"(?:^\|.*\n)+", markdown(result), re.M):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    tex = latex(result)
    assert tex.count(r"\begin{") == tex.count(r"\end{") and "%" not in re.sub(r"\\%", "", tex)
    bare = re.sub(r"\\[\\{}&%$#_]", "", tex)
    assert bare.count("{") == bare.count("}")
    assert not re.search(r"[<>|\"~^`#\x1b]", bare) and "_" not in bare
    for body in re.findall(r"\\midrule\n(.*?)\n\\bottomrule", tex, re.S):
        rows = re.sub(r"\\&", "", body).splitlines()
        assert len({row.count("&") for row in rows}) == 1 and not any(row.lstrip()[:1] in ("[", "*") for row in rows)
    for output in (text, markdown(result), tex, said(result)):
        assert "\x1b[31m" not in output and "\u202e" not in output and "significant" not in output.lower()


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(comparison({"grpo": BASE, "rloo": AHEAD}), id="two arms"),
        pytest.param(comparison({"grpo": [0.8], "rloo": [0.9]}), id="one seed"),
        pytest.param(comparison({f"m{i}": [v - i / 20 for v in BASE] for i in range(10)}), id="ten arms"),
        pytest.param(comparison({"grpo": BASE, "rloo": BASE}), id="all equal"),
        pytest.param(comparison({"grpo": [0.0] * 4, "rloo": [1.0] * 4}), id="none and all"),
        pytest.param(comparison({"grpo": BASE, "rloo": [0.9, float("nan"), 0.7, 0.8]}), id="a seed without a figure"),
        pytest.param(
            comparison({"grpo": [], "rloo": []}, unfinished=[{"arm": "grpo", "seed": 0, "error": HOSTILE}]),
            id="nothing",
        ),
        pytest.param(comparison({"grpo": BASE, "rloo": AHEAD}, curves={}), id="no curves"),
        pytest.param(
            comparison({"grpo": BASE, "rloo": AHEAD}, curves={"env_steps": None, "tokens": {"rloo": None}}),
            id="null curves",
        ),
        pytest.param(
            comparison({"grpo": BASE, "rloo": AHEAD}, METRICS[:2], panel={"iid": "aa11", "tasks": 200}), id="no ood"
        ),
        pytest.param(
            comparison({"grpo": [900.0, 1200.0], "rloo": [-3.0, 4.5]}, ["tokens last third"], "tokens last third"),
            id="no rate",
        ),
        pytest.param(
            comparison(dict.fromkeys(NAMES, BASE), command=HOSTILE + TRICKY, model=TRICKY), id="hostile names"
        ),
    ],
)
def test_every_output_is_sound_whatever_is_in_the_result(result: dict[str, Any], tmp_path: Path) -> None:
    before = copy.deepcopy(result)
    soundness(json.loads(json.dumps(result)), tmp_path)
    assert result == before


def test_a_name_that_is_html_is_shown_as_text(tmp_path: Path) -> None:
    page = Page(html(comparison({HOSTILE: BASE, "rloo": AHEAD}), tmp_path))
    assert HOSTILE in page.said and "49" not in page.said.replace("0.49", "")


def test_numbers_that_are_not_known_never_reach_a_page_as_numbers(tmp_path: Path) -> None:
    """A result that did not go through JSON has NaN where the file has null."""
    result = comparison({"grpo": [0.8], "rloo": [0.9]})
    nothing = {"estimate": float("nan"), "low": float("nan"), "high": float("inf"), "n": 0, "method": "too few"}
    unknown = dict.fromkeys(("p", "p_permutation", "p_corrected", "noise_floor", "mde"), float("nan"))
    for pair in result["pairs"]:
        pair |= {"difference": nothing, "bootstrap": nothing} | unknown
    result["arms"]["grpo"]["seeds"]["0"]["iid sampled"] = float("nan")
    result["noise"] = [{"arm": "grpo", "difference": nothing}]
    soundness(result, tmp_path)


# --------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("value", "signed", "text"),
    [
        ({"estimate": 0.0312, "low": 0.0124, "high": 0.0501, "n": 8}, True, "+0.031 [0.012, 0.050]"),
        ({"estimate": 0.0312, "low": -0.0124, "high": 0.0501, "n": 8}, False, "0.031 [-0.012, 0.050]"),
        ({"estimate": -0.0002, "low": -0.0003, "high": 0.02, "n": 8}, False, "0.000 [0.000, 0.020]"),
        ({"estimate": 0.0002, "low": 0.0001, "high": 0.0004, "n": 8}, False, "0.000200 [0.000100, 0.000400]"),
        ({"estimate": 512.34, "low": 400.0, "high": 600.0, "n": 8}, False, "512.3 [400.0, 600.0]"),
        ({"estimate": 0.9, "low": 0.9, "high": 0.9, "n": 1, "method": "point"}, False, "0.900 (1 seed)"),
        ({"estimate": 0.9, "low": 0.9, "high": 0.9, "n": 4, "method": "point"}, False, "0.900 (all equal)"),
        ({"estimate": 0.1, "low": None, "high": None, "n": 4, "method": "all equal"}, True, "+0.100 (all equal)"),
        ({"estimate": 0.1, "low": None, "high": 0.2, "n": 3}, True, "+0.100 (no interval)"),
        ({"estimate": None, "low": None, "high": None, "n": 0}, True, "-"),
        (None, True, "-"),
    ],
)
def test_an_interval_says_what_is_known_and_no_more(value: dict[str, Any] | None, signed: bool, text: str) -> None:
    assert interval(value, signed) == text


def test_the_verdict_comes_first_in_every_output(tmp_path: Path) -> None:
    result = comparison({"grpo": BASE, "rloo": AHEAD})
    sentence = result["pairs"][0]["sentence"]
    assert sentence.startswith("rloo beats grpo by +0.107")
    assert " ".join(said(result).split()).startswith(sentence)
    assert markdown(result).splitlines()[2].startswith("- **better**: rloo beats grpo by +0.107")
    page = Page(html(result, tmp_path))
    assert page.said.index(sentence.replace(", ", "\N{NO-BREAK SPACE}", 1)[:30]) < page.said.index("Arms")
    classes = [attrs.get("class") or "" for tag, attrs in page.tags if tag == "p"]
    assert classes[0] == "verdict better"


def test_an_inconclusive_result_says_what_it_would_take(tmp_path: Path) -> None:
    result = comparison({"grpo": BASE, "rloo": UNSURE})
    assert result["pairs"][0]["verdict"] == "inconclusive" and result["pairs"][0]["seeds_needed"] > 0
    words = f"about {result['pairs'][0]['seeds_needed']} more seeds needed"
    assert (
        words in headlines(result)[0][1] and words in Page(html(result, tmp_path)).said and words in said(result, 200)
    )


def test_many_pairs_are_summed_up_and_none_is_lost(tmp_path: Path) -> None:
    arms = {"a": BASE, "b": [v - 0.1 - d for v, d in zip(BASE, (0.01, 0, 0.02, 0), strict=True)], "c": UNSURE}
    arms |= {"d": [v + 0.001 * i for i, v in enumerate(BASE)], "e": [0.0, 0.01, 0.0, 0.02]}
    result = comparison(arms)
    verdicts = [pair["verdict"] for pair in result["pairs"] if pair["metric"] == "iid sampled"]
    assert len(verdicts) == 10 > MOST_SENTENCES
    ((_, headline),) = headlines(result)
    apart = verdicts.count("better") + verdicts.count("worse")
    assert f"10 pairs of 5 arms: {apart} apart, {verdicts.count('no difference')} without" in headline
    assert f"{verdicts.count('inconclusive')} inconclusive" in headline
    assert re.search(r"beaten by no other: a, c, d$", headline)
    page = Page(html(result, tmp_path)).said
    for pair in result["pairs"][:10]:
        assert pair["sentence"] in page
    assert len(pair_rows(result)) == 10


def test_a_matrix_reads_the_same_pair_from_both_sides() -> None:
    result = comparison({"a": BASE, "b": AHEAD, "c": UNSURE})
    rows = {
        row["name"]: dict(zip(result["arms"], row["cells"], strict=True)) for row in matrix(result, result["pairs"][:3])
    }
    assert rows["b"]["a"] == {"mark": "▲", "text": "+0.11", "verdict": "better"}
    assert rows["a"]["b"] == {"mark": "▼", "text": "-0.11", "verdict": "worse"}
    assert rows["c"]["a"]["mark"] == rows["a"]["c"]["mark"] == "?" and rows["a"]["a"]["text"] == ""


def test_figures_that_do_not_decide_get_no_verdict(tmp_path: Path) -> None:
    result = comparison({"grpo": BASE, "rloo": AHEAD})
    page = html(result, tmp_path)
    before, after = page.split("Exploratory: other figures, without a verdict")
    exploratory = after.split("What is the same")[0]
    assert 'class="row better"' in before and "+0.107" in exploratory
    assert "better" not in exploratory and "var(--good)" not in exploratory
    assert 'class="floor"' not in exploratory and 'class="effect"' not in exploratory
    assert "exploratory, no verdict" in said(result) and "Exploratory, without a verdict" in markdown(result)


def test_unfinished_runs_are_named_in_red(tmp_path: Path) -> None:
    gap = {"arm": "rloo", "seed": 7, "error": "out of memory\x1b[31m " + "x" * 1000}
    result = comparison({"grpo": BASE, "rloo": AHEAD}, unfinished=[gap])
    assert '<p class="bad">unfinished: rloo, seed 7: out of memory' in html(result, tmp_path)
    assert "unfinished: rloo, seed 7: out of memory" in markdown(result) and "x" * 400 not in markdown(result)
    assert terminal(result)[-1].style == "red" and "seed 7" in terminal(result)[-1].plain


def test_how_it_was_tested_names_correction_looks_and_panel(tmp_path: Path) -> None:
    words = Page(html(comparison({"a": BASE, "b": AHEAD, "c": UNSURE}, looks=2), tmp_path)).said
    for part in (
        "same 4 training seeds",
        "200 held-out tasks a split: iid aa11, ood bb22",
        "Holm's method over the 3 pairs",
    ):
        assert part in words
    assert "multiplied by the 2 looks" in words and "90 % interval lies within ±0.05" in words
    alone = Page(html(comparison({"a": BASE, "b": AHEAD}), tmp_path)).said
    assert "Holm" not in alone and "looks at" not in alone


def test_what_differs_is_not_said_to_be_the_same(tmp_path: Path) -> None:
    result = comparison({"grpo": BASE, "rloo": AHEAD})
    assert "<dt>model</dt><dd>tiny-1m</dd>" in html(result, tmp_path)
    result["arms"]["rloo"]["differs"] = {"model": "tiny-300k", "slots.clip_high": None}
    text = html(result, tmp_path)
    assert "<dt>model</dt>" not in text and "<code>model = tiny-300k</code>" in text
    assert "<code>slots.clip_high = absent</code>" in text


# -------------------------------------------------------------------------------------------------------------- tables


def test_a_row_of_an_arm_has_the_mean_over_seeds_and_what_one_seed_spent() -> None:
    result = comparison({"grpo": [0.8, 0.9]}, METRICS[:1])
    result["arms"]["grpo"]["seeds"]["1"] |= {"seconds": 240.0, "env_steps": None}
    assert arm_rows(result, METRICS[:1]) == [
        ["grpo", "0.850 [0.800, 0.900]", "2", "41.2k", "90k", "3.0", "paper"]
    ]  # (120 + 240) / 2 seconds are 3 minutes; steps of the one seed that knows them


def test_a_row_of_a_pair_has_every_number_that_decided() -> None:
    result = comparison({"grpo": BASE, "rloo": AHEAD})
    (row,) = pair_rows(result)
    pair = result["pairs"][0]  # differences 0.11, 0.09, 0.10, 0.13: mean 0.1075, sd 0.0170783, t(3, 0.975) = 3.18245
    assert row[:3] == ["rloo", "grpo", "+0.107 [0.080, 0.135]"]
    assert row[5] == "0.125"  # sign flips: 2 of 16 patterns are as far
    assert row[6] == f"{pair['p_corrected']:.3f}" and row[7] == f"{pair['noise_floor']:.3f}"
    assert row[9] == "4" and row[11] == "better"


def test_terminal_tables_fit_eighty_columns_and_keep_their_numbers_whole() -> None:
    result = comparison({"grpo": BASE, "rloo --slots.denominator token --slots.clip-high 0.28": AHEAD})
    lines = said(result, 80).splitlines()
    assert max(map(len, lines)) <= 80
    for text in ("+0.107 [0.080, 0.135]", "0.950 [0.910, 1.000]", "sign flips 0.125", "fidelity", "MDE"):
        assert any(text in line for line in lines), text


def test_markdown_cannot_be_left_through_a_name() -> None:
    text = markdown(comparison({TRICKY: BASE, "# rloo": AHEAD}))
    assert "[m](" not in text and "`k`" not in text.replace(r"\`", "") and r"\| \`k\`" in text
    assert r"\<script\>" in markdown(comparison({HOSTILE: BASE, "rloo": AHEAD}))


def test_latex_says_unit_interval_n_and_panel_and_writes_a_minus() -> None:
    text = latex(comparison({"grpo": AHEAD, "dr_grpo --x": BASE}))
    caption = re.findall(r"\\caption\{(.*)\}\n", text)[0]
    for part in ("share of tasks", r"95 \% interval over seeds", "n = 4", "iid aa11", r"babyai/GoToLocal"):
        assert part in caption
    assert "$-$0.107 [$-$0.135, $-$0.080]" in text and r"dr\_grpo -{}-x" in text
    assert r"\toprule" in text and r"\bottomrule" in text


# -------------------------------------------------------------------------------------------------------------- charts


def numbers(pattern: str, text: str) -> list[float]:
    return [float(v) for v in re.findall(pattern, text)]


def test_a_forest_draws_estimate_interval_floor_and_effect_on_one_scale() -> None:
    result = comparison({"grpo": BASE, "rloo": AHEAD})
    pair = result["pairs"][0]
    (row,) = forest(result, [pair])["rows"]
    picture = str(row["picture"])
    reach = 1.06 * max(pair["difference"]["high"], pair["noise_floor"], 0.13, 0.05)

    def x(value: float) -> float:
        return 14 + (value / reach + 1) / 2 * (WIDTH - 28)

    assert numbers(r'cx="([\d.]+)" cy="12.0"', picture) == [pytest.approx(x(0.1075), abs=0.06)]
    assert numbers(r'cx="([\d.]+)" cy="26.0"', picture) == pytest.approx(
        [x(d) for d in (0.11, 0.09, 0.10, 0.13)], abs=0.06
    )
    assert numbers(r'M([\d.]+) 0V34" class="effect"', picture) == pytest.approx([x(-0.05), x(0.05)], abs=0.06)
    assert numbers(r'M([\d.]+) 0V34" class="axis"', picture) == [pytest.approx(x(0), abs=0.06)]
    ((left, width),) = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)"', picture)
    assert float(left) == pytest.approx(x(-pair["noise_floor"]), abs=0.06)
    assert float(left) + float(width) == pytest.approx(x(pair["noise_floor"]), abs=0.12)
    ((low, high),) = re.findall(r"M([\d.]+) 12H([\d.]+)", picture)
    ends = pair["difference"]
    assert (float(low), float(high)) == pytest.approx((x(ends["low"]), x(ends["high"])), abs=0.06)


def test_a_method_against_itself_is_a_row_of_the_forest() -> None:
    itself = {"estimate": 0.015, "low": -0.01, "high": 0.04, "n": 16, "over": "seeds", "method": "welch"}
    result = comparison({"grpo": BASE, "rloo": AHEAD}, noise=[{"arm": "grpo", "difference": itself}])
    rows = forest(result, result["pairs"][:1])["rows"]
    assert (rows[1]["a"], rows[1]["b"], rows[1]["text"]) == ("grpo", "itself, other seeds", "+0.015 [-0.010, 0.040]")
    assert ("noise", "grpo differs from itself with other seeds by +0.015 [-0.010, 0.040]") in headlines(result)


def test_dots_of_a_seed_are_joined_and_a_seed_of_one_arm_is_not() -> None:
    result = comparison({"grpo": [0.5, 0.6], "rloo": [0.7, 0.8, 0.9]})
    picture = str(seed_plot(result))
    assert picture.count('class="pairing"') == 2 and picture.count("<circle") == 5
    assert "grpo, seed 1: 0.600" in picture and "50 %" in picture


def test_curves_are_broken_where_a_value_is_not_known_and_drawn_unsmoothed() -> None:
    steps = [float(i) for i in range(60)]
    wave = [0.5 + 0.1 * (-1) ** i for i in range(60)]
    wave[30] = None  # type: ignore[call-overload]
    line = {"x": steps, "iqm": wave, "low": [None] * 60, "high": [None] * 60, "n": 1}
    slow = line | {"x": [60 * step for step in steps]}
    result = comparison({"grpo": BASE}, curves={"env_steps": {"grpo": line}, "seconds": {"grpo": slow}})
    (steps_name, picture), (time_name, _) = curves(result)
    assert steps_name == "environment steps" and time_name == "minutes of training"  # 59 minutes
    (path,) = re.findall(r'<path d="(M[^"]*)" fill="none" stroke="var\(--c0\)"', picture)
    assert path.count("M") == 2 and path.count("L") == 57  # 29 + 28 segments of 30 and 29 points
    assert "polygon" not in picture  # no band of one run


def test_ten_arms_have_ten_colours_and_the_eleventh_is_no_error(tmp_path: Path) -> None:
    result = comparison({f"m{i}": [0.5, 0.6 + i / 100] for i in range(11)}, METRICS[:1])
    (_, picture), *_ = curves(result)
    assert {f"var(--c{i})" for i in range(COLOURS)} <= set(re.findall(r"var\(--c\d+\)", picture))
    text = html(result, tmp_path)
    assert all(text.count(f"--c{i}:") == 2 for i in range(COLOURS))  # light and dark


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before")
    result = comparison({"grpo": BASE, "rloo": AHEAD})
    del result["pairs"][0]["sentence"]
    with pytest.raises(KeyError):
        write_page(result, path)
    assert path.read_text() == "the one before"


# ----------------------------------------------------------------------------------------------------------- replicate


def verdict(**changed: Any) -> dict[str, Any]:
    difference = {"estimate": -0.031, "low": -0.05, "high": -0.012, "n": 8, "over": "seeds", "method": "paired t"}
    return {
        "name": "dr-grpo",
        "claim": "It costs no success.",
        "paper": "arXiv 2503.20783",
        "fidelity": "reconstruction",
        "scale": "tiny",
        "arms": ["dr-grpo", "grpo"],
        "seeds": 8,
        "metric": "iid sampled",
        "difference": difference,
        "verdict": "does not hold",
        "sentence": "dr-grpo falls behind grpo by -0.031 [-0.050, -0.012] (8 paired seeds)",
        "decision_rule": "holds if not more than 0.05 below",
        "secondary": [
            {"metric": "entropy last third", "difference": difference | {"estimate": 0.2, "low": 0.1, "high": 0.3}}
        ],
        "command": "assay replicate dr-grpo | tee log",
        "date": "2026-12-01",
        "assay": "0.1.0",
        "env": "babyai/GoToLocal",
        "model": "tiny-1m",
    } | changed


def test_every_claim_has_a_row_whatever_came_out() -> None:
    outcomes = ("holds", "does not hold", "inconclusive", "reversed")
    text = replicate_table([verdict(verdict=v, name=v) for v in outcomes])
    for outcome in outcomes:
        assert text.count(f"| {outcome} |") == 1 and f"## {outcome} (tiny): {outcome}" in text
    row = next(line for line in text.splitlines() if "| reversed |" in line)
    assert "dr-grpo against grpo | 8 | iid sampled | -0.031 [-0.050, -0.012]" in row
    assert r"`assay replicate dr-grpo \| tee log`" in row
    head = text.splitlines()[next(i for i, line in enumerate(text.splitlines()) if line.startswith("| claim"))]
    assert len(re.findall(r"(?<!\\)\|", row)) == head.count("|")


def test_a_section_has_rule_sentence_and_the_figures_that_do_not_decide() -> None:
    means = {
        arm: {"iid sampled": {"estimate": e, "low": e - 0.1, "high": e + 0.1, "n": 8}}
        for arm, e in (("grpo", 0.8), ("dr-grpo", 0.769))
    }
    text = replicate_table(
        [verdict(means=means, about="a laptop", notes="Note *this*.", panel={"iid": "aa", "tasks": 9})]
    )
    assert "- Rule, written before the runs: holds if not more than 0.05 below." in text
    assert "- Found: dr-grpo falls behind grpo by -0.031 [-0.050, -0.012] (8 paired seeds)." in text
    assert r"Note \*this\*." in text and "9 held-out tasks a split: iid aa" in text
    assert "| figure | grpo | dr-grpo | dr-grpo against grpo |" in text
    decides = "| iid sampled: decides | 0.800 [0.700, 0.900] | 0.769 [0.669, 0.869] | -0.031 [-0.050, -0.012] |"
    assert decides in text and "| entropy last third | - | - | +0.200 [0.100, 0.300] |" in text


def test_a_verdict_with_nothing_optional_and_a_hostile_claim_stays_in_its_row() -> None:
    text = replicate_table([verdict(claim=HOSTILE + TRICKY, secondary=[], difference={"estimate": None})])
    assert "<script" not in text.replace(r"\<script", "")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "arXiv" in line]
    assert len(rows) == 1 and len(re.findall(r"(?<!\\)\|", rows[0])) == 11
    assert "exploratory" not in text
    ahead = verdict(difference={"estimate": 0.031, "low": 0.012, "high": 0.05, "n": 8}, secondary=[])
    assert replicate_table([ahead]).count("+0.031 [0.012, 0.050]") == 2  # row and section
    assert "No claim has been put to the test yet" in replicate_table([])
