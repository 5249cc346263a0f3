"""docs/architecture.md names existing files, and its diagram matches its table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_diagram_matches_the_table() -> None:
    spec = importlib.util.spec_from_file_location("draw_layers", ROOT / "docs" / "draw_layers.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert len(script.rows(PAGE)) == 15
    assert (ROOT / "docs" / "layers.svg").read_text(encoding="utf-8") == script.draw(PAGE)


def test_every_named_file_exists() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)`", PAGE)
    assert len(named) > 50
    assert [path for path in named if not ((ROOT / path).exists() or (ROOT / "src" / "echelon" / path).exists())] == []
