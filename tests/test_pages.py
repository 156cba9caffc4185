"""Pages of methods: what is generated is up to date, nothing is without a page, no link leads nowhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from assay.cli.methods import describe, names

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "tools/pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_generated_block_is_stale(pages) -> None:
    assert list(pages.stale()) == [], "run: make pages"


@pytest.mark.parametrize("name", names())
def test_every_method_is_on_its_page_and_in_both_tables(name: str) -> None:
    page = describe(name)["page"]
    assert f"`{name}`" in (ROOT / page).read_text() or f"--method grpo,{name}" in (ROOT / page).read_text()
    assert f"[`{name}`]({page})" in (ROOT / "README.md").read_text()
    assert f"[`{name}`]({Path(page).name})" in (ROOT / "docs/methods/README.md").read_text()


@pytest.mark.parametrize("path", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))])
def test_no_link_leads_nowhere(path: str) -> None:
    links = [link.partition("#")[0] for link in LINK.findall((ROOT / path).read_text())]
    local = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not ((ROOT / path).parent / link).exists()] == []


def test_a_block_is_filled_between_its_markers_and_nothing_else_is_touched(
    pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in [*pages.pages(), "docs/methods/README.md", "README.md"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"# Title\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.main(["--check"]) == 1 and pages.main([]) == 0 and pages.main(["--check"]) == 0
    text = (tmp_path / "docs/methods/aem.md").read_text()
    assert text.startswith(f"# Title\n{pages.BEGIN}\n|") and text.endswith(f"\n{pages.END}\nafter\n")
    assert "| `--aem.lam` | `1` | float | modulation temperature" in text and "old" not in text
    (tmp_path / "docs/methods/aem.md").unlink()
    capsys.readouterr()
    assert pages.main([]) == 1
    assert capsys.readouterr().out.startswith("docs/methods/aem.md has no block to fill")
