"""Makes docs/accelerate_compat.md from compat.txt, and checks that what it says is so.

``python tests/side_by_side/compat.py``: say what is wrong; ``--write``: write the page.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from echelon.compat.unsupported import ALTERNATIVES  # noqa: E402 - a program as well
from tests.unit.test_compat_modules import OMITTED  # noqa: E402

DATA = Path(__file__).with_name("compat.txt")
EXCEPTIONS = Path(__file__).with_name("upstream_exceptions.yaml")
PAGE = ROOT / "docs" / "accelerate_compat.md"
BESIDE = "Different on purpose, beside the rows"
NAMES = json.loads((ROOT / "tests" / "unit" / "accelerate_names.json").read_text())
COMPAT_TESTS = ROOT / "tests" / "unit" / "test_compat_modules.py"
MARKS = {"C": "core", "M": "common", "R": "rare", "H": "hardware"}
# By section: what must be in it, as modules and classes of accelerate_names.json.
MODULES = {
    "1.5": ("data_loader",),
    "1.6": ("optimizer", "scheduler"),
    "1.7": ("utils", "memory_utils", "parallelism_config"),
    "1.8": ("logging", "tracking", "local_sgd", "launchers", "big_modeling", "hooks", "inference", "checkpointing"),
}
CLASSES = {
    "1.3": ("accelerator:Accelerator",),
    "1.4": ("state:PartialState", "state:AcceleratorState", "state:GradientState"),
    "1.5": ("data_loader:DataLoaderShard", "data_loader:DataLoaderDispatcher"),
    "1.6": ("optimizer:AcceleratedOptimizer", "scheduler:AcceleratedScheduler"),
    "1.8": ("tracking:GeneralTracker", "local_sgd:LocalSGD"),
}
HEAD = """# What of Accelerate is here

A script written for Hugging Face Accelerate 1.15.0 runs after replacing the package's name in its imports. This page lists
every public name of it: what is offered, the test of its behaviour, and where the behaviour differs on purpose. What a
later version brings can be imported already; using it raises an error that says so.

Made by `python tests/side_by_side/compat.py --write` from `tests/side_by_side/compat.txt`; a test holds the two together,
and `tests/unit/test_signatures.py` holds every signature to accelerate's. Marks: C core, M common, R rare. Every name marked
H (TPU, Megatron-LM, Transformer Engine, MS-AMP, SageMaker) can be imported, and says that it is not offered.
"""
BESIDE_HEAD = "Values of both packages, side by side: [side_by_side.md](side_by_side.md)."
SCRIPTS_HEAD = """Its wheel holds `test_script`, `test_sync`, `test_ops`, `test_cli` and `test_distributed_data_loop`. With the module's name
pointed at echelon, every function of them passes on 1 and on 2 processes (`make side-by-side`), but these; each must fail as it
is known to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    section: str
    mark: str
    names: tuple[str, ...]
    where: str
    """Tests with spaces between, or ``later: <piece>``, ``not offered``, ``raises``."""
    difference: str

    @property
    def tests(self) -> list[str]:
        return [] if self.where.startswith(("later: ", "not offered", "raises")) else self.where.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One that is no single name's."""

    about: str
    tests: tuple[str, ...]
    text: str


def rows() -> list[Row]:
    return [
        Row(section=section, mark=mark, names=tuple(names.split()), where=where, difference=difference)
        for section, parts in _lines()
        if section != BESIDE
        for mark, names, where, difference in [parts]
    ]


def differences() -> list[Difference]:
    return [
        Difference(about=about, tests=tuple(tests.split()), text=text)
        for section, parts in _lines()
        if section == BESIDE
        for about, tests, text in [parts]
    ]


def _lines() -> Iterator[tuple[str, list[str]]]:
    section = ""
    for line in DATA.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line and not line.startswith("#"):
            yield section, [part.strip() for part in line.split("|")]


def problems(table: list[Row], beside: list[Difference]) -> Iterator[str]:
    """Say what is wrong: tests that are not there or do not name what they stand for, names that are nowhere."""
    for difference in beside:
        label = f"{BESIDE}, {difference.about[:60]}"
        if not difference.tests:
            yield f"{label}: no test"
        for test in difference.tests:
            file, _, name = test.partition("::")
            if name not in words_of_tests(file):
                yield f"{label}: there is no test {test}"
    for row in table:
        label = f"{row.section}, {' '.join(row.names)[:60]}"
        if row.mark not in MARKS:
            yield f"{label}: no mark {row.mark!r}"
        words: set[str] = set()
        for test in row.tests:
            file, _, name = test.partition("::")
            known = words_of_tests(file)
            if name not in known:
                yield f"{label}: there is no test {test}"
            words |= known.get(name, set())
        if row.tests:
            yield from (f"{label}: its tests do not mention {name}" for name in row.names if not mentions(name, words))
        # Arguments, and attributes of states, may have the name of what they hold.
        for name in () if row.section.startswith(("1.1", "1.4", "1.5")) else _expanded(row.names):
            is_later = name in ALTERNATIVES
            if is_later == (bool(row.tests) or row.where == "not offered"):
                yield f"{label}: {name} is {'not ' if is_later else ''}offered"
    for section, expected in _expected().items():
        listed = {
            name
            for row in table
            if row.section.startswith(section) or row.mark == "H" or section not in ("1.3", "1.4")
            for name in _expanded(row.names)
        }
        if missing := expected - listed:
            yield f"section {section} lacks {', '.join(sorted(missing))}"


def _expected() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for section, modules in MODULES.items():
        found[section] = {
            name for module in modules for name in set(NAMES["names"][module]) - OMITTED.get(module, (set(), ""))[0]
        }
    for section, owners in CLASSES.items():
        methods = {k.partition(".")[2] for k in NAMES["signatures"] if k.partition(".")[0] in owners} - {""}
        properties = {name for owner in owners for name in NAMES["properties"].get(owner, ())}
        # Those of the Accelerator are 1.2.
        found[section] = found.get(section, set()) | methods | (properties if section != "1.3" else set())
    found["1.1"] = {text.partition("=")[0] for text in NAMES["signatures"]["accelerator:Accelerator"]} - {
        "self",
        "megatron_lm_plugin",
    }
    found["1.2"] = set(NAMES["properties"]["accelerator:Accelerator"])
    return found


def _expanded(names: tuple[str, ...]) -> set[str]:
    """Return ``names``, those with a star as all names of ``accelerate.utils`` that fit."""
    return {
        found
        for name in names
        for found in (
            [name] if "*" not in name else [known for known in NAMES["names"]["utils"] if fnmatch(known, name)]
        )
    }


def mentions(name: str, words: set[str]) -> bool:
    """Tell whether ``name`` is in ``words``; of a name with a star, or of a file, its parts."""
    return set(re.findall(r"\w+", name)) <= words


@cache
def words_of_tests(file: str) -> dict[str, set[str]]:
    """Return, by test, the names in it and in what it uses of its module."""
    path = ROOT / "tests" / file
    if not path.exists():
        return {}
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts[node.name] = node
        elif isinstance(node, ast.Assign):
            parts.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
    own = {name: _words(node) for name, node in parts.items()}
    found = {}
    for name in own:
        if name.startswith("test_"):
            words: set[str] = set()
            open_names = [name]
            while open_names:
                new = own[open_names.pop()] - words
                words |= new
                open_names += [word for word in new if word in own]
            found[name] = words
    return found


def _words(node: ast.AST) -> set[str]:
    words: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            words.add(part.id)
        elif isinstance(part, ast.Attribute):
            words.add(part.attr)
        elif isinstance(part, ast.keyword) and part.arg:
            words.add(part.arg)
        elif isinstance(part, ast.FunctionDef):
            words.add(part.name)
        elif isinstance(part, ast.alias):
            words.update(part.name.split("."))
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            words.update(re.findall(r"\w+", part.value))
    return words


def page(table: list[Row], beside: list[Difference]) -> str:
    lines = [HEAD]
    for section in dict.fromkeys(row.section for row in table):
        lines += [f"## {section}", "", "| | name | test, or where it comes | differs on purpose |", "|---|---|---|---|"]
        for row in (row for row in table if row.section == section):
            names = ", ".join(f"`{name}`" for name in row.names)
            where = "<br>".join(f"`{test}`" for test in row.tests) or row.where
            if row.where == "raises":
                where = f"`{COMPAT_TESTS.relative_to(ROOT / 'tests')}::test_using_an_unsupported_name_raises_with_the_alternative`"
            lines.append(f"| {row.mark} | {names} | {where} | {row.difference} |")
        lines.append("")
    lines += [f"## {BESIDE}", "", BESIDE_HEAD, "", "| what | here, and why | test |", "|---|---|---|"]
    for difference in beside:
        tests = "<br>".join(f"`{test}`" for test in difference.tests)
        lines.append(f"| {difference.about} | {difference.text} | {tests} |")
    lines += ["", "## Accelerate's own test scripts", "", SCRIPTS_HEAD, "", "| script | functions | processes | why |"]
    lines.append("|---|---|---|---|")
    for entry in yaml.safe_load(EXCEPTIONS.read_text()):
        given = ", ".join(f"{name}={value}" for name, value in entry.get("arguments", {}).items())
        functions = ", ".join(f"`{name}({given})`" for name in entry["functions"])
        numbers = ", ".join(map(str, entry["processes"]))
        lines.append(f"| `{entry['script']}` | {functions} | {numbers} | {entry['reason']} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/accelerate_compat.md")
    options = parser.parse_args()
    table, beside = rows(), differences()
    wrong = list(problems(table, beside))
    print("\n".join(wrong))
    if options.write:
        PAGE.write_text(page(table, beside))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
