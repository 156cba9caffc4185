"""The tables of methods in a run's report: the last one of each title, and how its numbers changed over the steps.

A table is rows of scalars with the same keys; the first key names the row, so that it can be followed. Nothing here
knows which method wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from assay import charts
from assay.records import Records, is_number

MOST_ROWS = 40  # of a table on the page
MOST_FOLLOWED = 24  # rows of a picture


def method_tables(records: Records) -> list[dict[str, Any]]:
    """{"title", "columns", "rows", "note", "pictures"} of each title; `records` are the lines of tables.jsonl."""
    titles = dict.fromkeys(title for record in records for title in record["tables"])
    return [_table(title, [r for r in records if r["tables"].get(title)]) for title in titles]


def _table(title: str, records: Records) -> dict[str, Any]:
    history = [(record["step"], record["tables"][title]) for record in records]
    step, last = history[-1] if history else (0, [])
    columns = list(dict.fromkeys(key for row in last for key in row))
    numbers = list(dict.fromkeys(key for _, rows in history for row in rows for key in row if is_number(row[key])))
    names = list(dict.fromkeys(key for _, rows in history for row in rows for key in list(row)[:1]))
    pictures = [_picture(key, history) for key in numbers if key not in names]
    note = f"As it was after step {step}"
    if len(last) > MOST_ROWS:
        note += f": the first {MOST_ROWS} of {len(last)} rows, the others are in tables.jsonl"
    return {
        "title": title,
        "columns": columns,
        "rows": [[_written(row.get(key, "")) for key in columns] for row in last[:MOST_ROWS]],
        "note": f"{note}.",
        "pictures": [picture for picture in pictures if picture],
    }


def _picture(key: str, history: Sequence[tuple[float, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """How the rows' numbers under `key` changed; {} where no row's did."""
    values: dict[str, dict[float, float]] = {}  # row -> step -> number, in the order of their first appearance
    for step, rows in history:
        for row in rows:
            if row and is_number(row.get(key)):
                values.setdefault(_written(next(iter(row.values()))), {})[step] = float(row[key])
    if all(len(set(own.values())) < 2 for own in values.values()):
        return {}
    ranked = sorted(values, key=lambda name: -max(map(abs, values[name].values())))[:MOST_FOLLOWED]
    steps = [step for step, _ in history]
    shown = {name: [own.get(step, math.nan) for step in steps] for name, own in values.items() if name in ranked}
    caption = f"Per step, the darkest is {charts.number(max(abs(v) for n in ranked for v in values[n].values()))}; "
    caption += "rows in the order of their first appearance, empty where a table did not have them"
    if len(values) > len(ranked):
        caption += f"; the {len(ranked)} rows with the largest numbers of {len(values)}"
    return {"title": key, "picture": charts.heat_map(steps, shown, key), "caption": f"{caption}."}


def _written(cell: Any) -> str:
    return charts.number(cell) if is_number(cell) else "" if cell is None else str(cell)
