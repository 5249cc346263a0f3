"""Each cause that ``echelon verify`` names has a remedy, which the code and the page share."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from echelon.verify import comparison
from echelon.verify.comparison.cause_catalogue import CAUSES, likely_cause
from tests.verify_causes import PAGE, page_with, table_of_causes

FOLDER = Path(comparison.__file__).parent
PARTS = ("weights", "buffers", "optimizer state", "learning rates", "generators", "position in the data")


def _strings() -> set[str]:
    """Return the strings of the code that compares, without those of the catalogue itself."""
    paths = [path for path in FOLDER.glob("*.py") if path.name != "cause_catalogue.py"]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_page_has_the_remedies_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with(table_of_causes(), page), "run python -m tests.verify_causes --write"


def test_each_cause_of_the_catalogue_can_be_found() -> None:
    composed = {
        f"{how} {drawn}{where}"
        for drawn in ("dropout masks", "random numbers")
        for how, where in (("same", " on every rank"),)
    }
    composed |= {"dropout masks repeat", "random numbers repeat", "schedule ahead", "schedule behind"}
    found = _strings() | composed
    assert [name for name in CAUSES if name not in found] == []


def test_the_causes_of_the_planted_faults_are_in_the_catalogue() -> None:
    rows = PAGE.read_text(encoding="utf-8").partition("<!-- planted faults: begin -->")[2].splitlines()
    named = {row.strip("|").split("|")[-1].strip() for row in rows if row.startswith("| ")} - {"", "cause"}
    assert len(named) > 40
    assert [name for name in named if name not in CAUSES and not name.endswith("not restored")] == []


@pytest.mark.parametrize("name", CAUSES)
def test_a_remedy_is_an_instruction(name: str) -> None:
    for text in CAUSES[name].remedies.values():
        assert len(text) > 30
        assert not text.endswith(".")
        assert not re.search(r"\b(layout|window|engine|the loop)\b", text), text
    shown = likely_cause(name, next(iter(CAUSES[name].remedies)), why="because")
    assert shown.name == ("" if name.startswith("no known cause") else name)
    assert shown.do in CAUSES[name].remedies.values()
