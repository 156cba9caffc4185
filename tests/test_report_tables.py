"""Tables of methods on the page: the last of each title, and the rows' numbers over the steps."""

import math
import re

import pytest

from assay import charts
from assay.report import write_report
from assay.report_tables import MOST_FOLLOWED, MOST_ROWS, method_tables
from assay.rundir import RunDir

ATTACK = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"


def words(*counts):
    return [{"word": f"w{i}", "uses": n, "length": 4} for i, n in enumerate(counts) if n is not None]


def line(step, **tables):
    return {"step": step, "tables": tables}


def test_the_last_table_of_each_title_is_shown_as_it_stands():
    first, second = method_tables([line(1, A=words(5, 2), B=words(9)), line(2, A=words(None, 7, 1))])
    assert (first["title"], first["columns"]) == ("A", ["word", "uses", "length"])
    assert first["rows"] == [["w1", "7", "4"], ["w2", "1", "4"]]
    assert first["note"] == "As it was after step 2."
    assert (second["title"], second["rows"]) == ("B", [["w0", "9", "4"]])
    assert second["note"] == "As it was after step 1."


def test_only_numbers_that_changed_are_drawn():
    (table,) = method_tables([line(1, A=words(5, 2)), line(2, A=words(5, 3))])
    assert [p["title"] for p in table["pictures"]] == ["uses"]
    (same,) = method_tables([line(1, A=words(5, 2)), line(2, A=words(5, 2))])
    assert same["pictures"] == []
    assert method_tables([]) == []


def test_a_row_is_followed_by_its_name_wherever_it_stands():
    shuffled = [line(3, A=words(8, 6)), line(5, A=words(8, 4)[::-1]), line(9, A=words(None, 2))]
    (picture,) = method_tables(shuffled)[0]["pictures"]
    said = re.findall(r"<title>(.*?)</title>", picture["picture"])
    assert said == ["w0, step 3: 8", "w0, step 5: 8", "w1, step 3: 6", "w1, step 5: 4", "w1, step 9: 2"]
    assert re.findall(r'fill-opacity="(.*?)"', picture["picture"]) == ["1.000", "1.000", "0.750", "0.500", "0.250"]


def test_long_tables_say_what_they_leave_out():
    (table,) = method_tables([line(1, A=words(*range(100))), line(2, A=words(*range(1, 101)))])
    assert len(table["rows"]) == MOST_ROWS and "the first 40 of 100 rows" in table["note"]
    (picture,) = table["pictures"]
    assert picture["picture"].count('text-anchor="end"') == MOST_FOLLOWED + 1  # and the last step
    assert "the 24 rows with the largest numbers of 100" in picture["caption"]
    assert ">w99<" in picture["picture"] and ">w75<" not in picture["picture"]


def test_many_steps_are_averaged_into_few_cells():
    picture = charts.heat_map(range(1, 241), {"a": [float(i) for i in range(240)]})
    assert picture.count("<rect") == 60
    assert "<title>a, steps 1 to 4: 1.5</title>" in picture
    assert charts.heat_map([1, 2], {"a": [math.nan, math.nan]}) == ""
    assert charts.heat_map([], {}) == ""
    assert "var(--c1)" in charts.heat_map([1], {"a": [-1.0]}) and "var(--c1)" not in charts.heat_map([1], {"a": [0.0]})


def test_rows_without_numbers_or_keys_do_no_harm():
    odd = [{"a": None, "b": "x"}, {}, {"a": 2, "b": True}, {"c": math.nan}]
    (table,) = method_tables([line(1, T=odd), line(2, T=odd[::-1])])
    assert table["columns"] == ["c", "a", "b"]
    assert ["nan", "", ""] in table["rows"] and ["", "", "x"] in table["rows"]


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", {"env": "e"}) as run:
        yield run


def test_the_page_shows_them_and_runs_nothing(run):
    for step in (1, 2):
        run.append_tables(step, {ATTACK: [{ATTACK: ATTACK, "n": step}]})
    html = write_report(run).read_text()
    assert "<script" not in html and html.count("&lt;script&gt;alert(1)") >= 5
    assert "As it was after step 2." in html and "<rect" in html


def test_a_damaged_file_is_named_on_the_page(run):
    (run.path / "tables.jsonl").write_text('{"step": 1, "tables": 3}\n')
    assert "tables.jsonl: expected tables of rows at step 1" in write_report(run).read_text()
