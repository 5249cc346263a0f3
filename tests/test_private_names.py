"""docs/architecture.md lists every private name of another library that the source uses, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.source_rules import foreign_private_reads

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "echelon"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
_HEAD = "| names | files |"


def _rows() -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield the names, files and tests of each line of the table."""
    table = PAGE[PAGE.index(_HEAD) :].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        cells = [re.findall("`([^`]+)`", cell) for cell in line.strip("|").split("|")]
        yield cells[0], cells[1], cells[-1]


def _uses() -> set[tuple[str, str]]:
    sources = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    return set(foreign_private_reads(sources))


def test_every_private_name_of_another_library_is_in_the_table() -> None:
    listed = {(name, file) for names, files, _ in _rows() for name in names for file in files}
    assert sorted(_uses() - listed) == []


def test_the_table_lists_nothing_that_is_gone() -> None:
    uses = _uses()
    gone = []
    for names, files, _ in _rows():
        gone += [name for name in names if not any((name, file) in uses for file in files)]
        gone += [file for file in files if not any((name, file) in uses for name in names)]
    assert gone == []


def test_each_line_names_tests_that_exist() -> None:
    tests = [path for *_, found in _rows() for path in found]
    assert all(found for *_, found in _rows())
    assert [path for path in tests if not (ROOT / path).is_file()] == []


def _found(source: str, **others: str) -> set[str]:
    sources: Mapping[str, str] = {"a.py": source, **{f"{name}.py": text for name, text in others.items()}}
    return {name for name, path in foreign_private_reads(sources) if path == "a.py"}


def test_each_way_to_use_a_private_name_is_found() -> None:
    assert _found("from torch.nn.modules.batchnorm import _BatchNorm") == {"_BatchNorm"}
    assert _found("from torch._utils import x") == {"_utils"}
    assert _found("import torch._dynamo.config") == {"_dynamo"}
    assert _found("import_module('torch.distributed.tensor._redistribute')") == {"_redistribute"}
    assert _found("import ctypes") == {"ctypes"}
    assert _found("def f(loader):\n    return loader._iterator") == {"_iterator"}
    assert _found("def f(x):\n    return getattr(x, '_hook', None)") == {"_hook"}
    assert _found("class A(Optimizer):\n    def f(self):\n        return self._of_torch") == {"_of_torch"}
    assert _found("import torch.distributed as dist\ndist.distributed_c10d._world", b="_world = 1") == {"_world"}


def test_names_of_echelon_and_of_named_tuples_are_not_counted() -> None:
    assert _found("def f(a):\n    return a._x", b="class A:\n    def __init__(self):\n        self._x = 1") == set()
    assert _found("class A:\n    def f(self):\n        return self._replace(x=1)") == set()
    assert _found("class A:\n    def f(self):\n        return self._modules", b="_modules = 1") == set()
