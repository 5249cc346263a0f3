"""docs/architecture.md names existing files, its diagram matches its table, and the tests are where it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {path.parent.name for path in (ROOT / "src" / "echelon").glob("*/__init__.py")}
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_diagram_matches_the_table() -> None:
    spec = importlib.util.spec_from_file_location("draw_layers", ROOT / "docs" / "draw_layers.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert len(script.rows(PAGE)) == 16
    assert (ROOT / "docs" / "layers.svg").read_text(encoding="utf-8") == script.draw(PAGE)


def test_every_named_file_exists() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.\w+)`", PAGE)
    assert len(named) > 50
    assert [path for path in named if not ((ROOT / path).exists() or (ROOT / "src" / "echelon" / path).exists())] == []


def test_every_folder_has_its_line_of_tests() -> None:
    table = PAGE[PAGE.index("| after a change in |") :].split("\n\n", 1)[0]
    after = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)/`", line.split("|")[1])}
    assert after == PACKAGES
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert set(re.findall(r"FOLDER=(\w+)", table)) <= folders


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_the_name_of_a_unit_test_begins_with_that_of_its_module(package: str) -> None:
    source = ROOT / "src" / "echelon" / package
    modules = {package} | {path.stem for path in source.rglob("*") if path.suffix == ".py" or path.is_dir()}
    tests = [path.stem.removeprefix("test_") for path in (ROOT / "tests" / "unit" / package).glob("test_*.py")]
    assert [name for name in tests if not any(f"{name}_".startswith(f"{module}_") for module in modules)] == []
