"""What a study leaves: study.json, figures as SVG and PNG, and report.html, one page that opens offline."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from assay import __version__
from assay.files import write_file, write_json
from assay.studies.grid import Cell, Finding, Options, Row, Study

DPI = 160  # of the PNG


def write(
    out: Path,
    study: Study,
    options: Options,
    cells: Sequence[Cell],
    rows: Sequence[Row],
    failed: Mapping[str, str],
    command: str,
) -> dict[str, Any]:
    """Findings and figures of what is finished; returns what study.json holds."""
    findings = study.findings(rows, options) if rows else []
    drawn = study.figures(rows, options) if rows else {}
    images = {name: (_images(figure), caption) for name, (figure, caption) in drawn.items()}
    for name, (image, _) in images.items():
        write_file(_inside(out / "figures", f"{name}.svg"), image["svg"])
        write_file(_inside(out / "figures", f"{name}.png"), image["png"])
    done = {(row["name"], row["seed"]) for row in rows}
    record: dict[str, Any] = {
        "study": study.name,
        "title": study.title,
        "paper": study.paper,
        "fidelity": study.fidelity,
        "version": study.version,
        "assay": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "options": options.model_dump(exclude={"jobs", "out"}),
        "seeds": sorted({cell.seed for cell in cells}),
        "cells": len(cells),
        "unfinished": [f"{c.name}, seed {c.seed}" for c in cells if (c.name, c.seed) not in done],
        "failed": dict(failed),
        "cell_seconds": round(sum(row["seconds"] for row in rows), 1),
        "cell_cpu_seconds": round(sum(row.get("cpu_seconds", 0.0) for row in rows), 1),
        "findings": [asdict(finding) for finding in findings],
        "figures": {name: caption for name, (_, caption) in images.items()},
    }
    write_json(out / "study.json", record)
    write_file(out / "report.html", _page(record, findings, images).encode("utf-8", "replace"))
    return record


def _inside(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def _images(figure: Any) -> dict[str, bytes]:
    """The same bytes for the same figure: no dates, stable ids."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "assay", "svg.fonttype": "none"}):
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=DPI)
    return {"svg": svg.getvalue(), "png": png.getvalue()}


def _page(record: Mapping[str, Any], findings: Sequence[Finding], images: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("assay", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = [
        {"name": name, "caption": caption, "data": base64.b64encode(image["svg"]).decode()}
        for name, (image, caption) in images.items()
    ]
    template = environment.get_template("study.html.j2")
    return template.render(record=record, findings=findings, pictures=pictures)
