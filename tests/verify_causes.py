"""``python -m tests.verify_causes --write``: writes the table of causes and remedies of ``docs/verify.md`` from the catalogue."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from echelon.verify.comparison.cause_catalogue import CAUSES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "verify.md"
_CASES = {
    "num_items": "`num_items=` is passed already",
    "compute_loss": "a Trainer with its own `compute_loss()`",
    "compute_loss_func": "a Trainer with `compute_loss_func=`",
    "model": "a Trainer, the model computes the loss",
    "library": "a Trainer, no code of the script computes the loss",
    "Trainer": "a Trainer; this is a note, not a difference",
    "number_of_ranks": "as many micro-steps as ranks",
    "divided_by_ranks": "divided by the number of ranks",
}


def table_of_causes() -> str:
    """Return the table, in Markdown."""
    lines = ["| cause | what happens | what to change |", "|---|---|---|"]
    for name, one in CAUSES.items():
        remedies = [f"{_CASES[case]}: {text}" if case else text for case, text in one.remedies.items()]
        cells = (name, one.meaning, "<br>".join(_escape(text) for text in remedies))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Return ``text`` without marks of Markdown, except in code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_|\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def page_with(table: str, page: str, *, name: str = "causes") -> str:
    """Return the page's text with the table between its two marks."""
    before, begin, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    assert end, name
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main() -> int:
    """Write the table, or print it."""
    table = table_of_causes()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with(table, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
