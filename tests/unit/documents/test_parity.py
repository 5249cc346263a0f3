"""docs/parity.md: its pictures are those that its script draws, and the tests that it names are there."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("draw_parity", DOCS / "draw_parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_match_the_script() -> None:
    script = _script()
    curves = json.loads((DOCS / "parity_curves.json").read_text())
    assert (DOCS / "parity_cut.svg").read_text() == script.draw_cut()
    assert (DOCS / "parity_curves.svg").read_text() == script.draw_curves(curves)
    exact, off = ({world: curve[-1][1] for world, curve in curves[parity].items()} for parity in ("exact", "off"))
    assert max(exact.values()) - min(exact.values()) < 1e-6
    assert off["3"] - off["2"] > 0.1 < off["2"] - off["1"]


def test_the_named_tests_exist() -> None:
    named = re.findall(r"\[`(\w+)`\]\((\S+)\)", (DOCS / "parity.md").read_text())
    assert len(named) > 8
    for name, path in named:
        assert f"\ndef {name}(" in (DOCS / path).read_text(), (path, name)
