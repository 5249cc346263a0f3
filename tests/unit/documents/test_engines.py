"""docs/engines.md lists what fsdp2 does for each key of DeepSpeed; ``python tests/unit/documents/test_engines.py`` writes it."""

from __future__ import annotations

from pathlib import Path

from echelon.engines.deepspeed.config import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"
BEGIN = "<!-- deepspeed keys: made by python tests/unit/documents/test_engines.py -->\n"
END = "<!-- end of deepspeed keys -->\n"


def written() -> str:
    """Return the page with the list as it must be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}{table()}\n{END}{after}"


def test_the_page_lists_every_key() -> None:
    assert PAGE.read_text() == written(), "run python tests/unit/documents/test_engines.py"


if __name__ == "__main__":
    PAGE.write_text(written())
