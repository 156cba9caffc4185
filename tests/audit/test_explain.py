"""Every check teaches, and the page is what the command says."""

from __future__ import annotations

from pathlib import Path

from assay.audit.checks import CHECKS, documentation
from assay.audit.explain import TEXTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "audit.md"


def test_every_check_has_a_text_with_a_reason_an_example_and_a_cure() -> None:
    assert set(TEXTS) == set(CHECKS)
    for code, text in TEXTS.items():
        assert (
            {"what", "why", "example", "by_hand", "mend"}
            <= set(text)
            <= {"what", "why", "example", "by_hand", "mend", "reported"}
        )
        assert all(len(part) > 12 for part in text.values()), code


def test_the_page_is_made_from_the_texts() -> None:
    assert PAGE.read_text() == documentation()
