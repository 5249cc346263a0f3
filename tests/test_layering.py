"""The source follows echelon's own rules (CONTRIBUTING.md), and each rule detects a deliberate violation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_rules import (
    ENVIRONMENT_USERS,
    duplicate_classes,
    engine_branches,
    environment_uses,
    missing_paths,
    module_state,
    more_than_reexports,
    private_reads,
    violations,
)

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "echelon"
SOURCES = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

# Folders and modules that import without torch, so that they start in milliseconds.
TORCH_FREE = (
    "base/",
    "config/",
    "status/",
    "diagnose/",
    "launch/",
    "report/",
    "cli/",
    "world/__init__.py",
    "checkpoint/listing.py",
    "checkpoint/read.py",
    "data/order_state.py",
    "world/environment.py",
    "world/launch_variables.py",
) + tuple(
    f"compat/{name}.py"
    for name in (
        "__init__",
        "constants",
        "machine",
        "probes",
        "reexports",
        "torch_required",
        "unsupported",
        "variables",
    )
)

LOADED_BY_TORCHRUN = ("launch/multinode/torchrun_rendezvous.py",)


@pytest.mark.parametrize("path", SOURCES)
def test_the_source_keeps_the_rules(path: str) -> None:
    assert violations(path, SOURCES[path]) == []


def test_the_torch_free_modules_load_without_torch() -> None:
    modules = [_dotted(path) for path in SOURCES if path.startswith(TORCH_FREE) and path not in LOADED_BY_TORCHRUN]
    assert "echelon.base.errors" in modules
    assert _first_that_loads_torch(modules) is None


def test_no_file_reads_the_private_names_of_another() -> None:
    assert list(private_reads(SOURCES)) == []


def test_a_read_of_a_private_name_is_reported() -> None:
    sources = {
        "a.py": "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, other):\n        return other._x"
    }
    assert list(private_reads(sources)) == []
    sources["b.py"] = "def g(a):\n    return a._x + a.f(a)._replace(x=1) + a.y"
    assert list(private_reads(sources)) == ["b.py:2: reads a._x, which is private to another file"]
    sources |= {
        "trainer/trainer_methods.py": "class TrainerMethods:\n    def _save(self): ...\n    def _own(self): ..."
    }
    reads = {
        "trainer/loop.py": "def f(trainer):\n    trainer._save()\n    trainer._own()",
        "c.py": "def f(trainer):\n    trainer._save()",
    }
    assert sorted(private_reads({**sources, **reads, "b.py": ""})) == [
        "c.py:2: reads trainer._save, which is private to another file",
        "trainer/loop.py:3: reads trainer._own, which is private to another file",
    ]
    assert list(private_reads({**sources, "b.py": "class B:\n    def g(self):\n        return self._x"})) == []


def test_a_public_class_name_is_defined_once() -> None:
    assert duplicate_classes(SOURCES) == []
    assert duplicate_classes({"a.py": "class A: ...\nclass _B: ...", "b.py": "class A: ...\nclass _B: ..."}) == [
        "class A is defined in a.py, b.py"
    ]


@pytest.mark.parametrize("document", [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS])
def test_the_documents_name_paths_that_exist(document: Path) -> None:
    assert missing_paths(document.name, document.read_text(), [ROOT, SOURCE, ROOT / "tests"]) == []


def test_a_missing_path_is_reported() -> None:
    text = "`base/` `launch/local/` `base/environ.py` but `floors/` and `base/nothing.py`; `OUT/model.py`"
    assert missing_paths("a.md", text, [SOURCE]) == ["a.md: there is no base/nothing.py", "a.md: there is no floors/"]


@pytest.mark.parametrize(
    "source",
    [
        "if engine == 'ddp': ...",
        "x = 1 if kind != 'fsdp2' else 2",
        "if name in ('zero1', 'deepspeed'): ...",
        "while 'deepspeed' == self.kind: ...",
        "if engine_name == 'dp': ...",
        "if self.engine.name in {'single'}: ...",
        "match name:\n    case 'ddp' | 'other': ...",
        "match engine:\n    case 'single': ...",
        "if isinstance(engine, DeepSpeedEngine): ...",
        "if self.distributed_type == DistributedType.FSDP: ...",
        "if kind is DistributedType.NO: ...",
        "match state.distributed_type:\n    case other: ...",
    ],
)
def test_a_branch_on_the_engine_is_reported(source: str) -> None:
    assert engine_branches("accelerator/accelerator.py", source) == [
        "accelerator/accelerator.py:1: a branch on the engine outside engines/"
    ]
    assert engine_branches("engines/registry.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "if axis == 'dp': ...",
        "mode = 'single' if count == 1 else 'many'",
        "if kind == 'single': ...",
        "ENGINES = {'ddp': 'echelon.engines.ddp:DDP'}",
        "if isinstance(engine, Engine): ...",
        "if engine.capabilities.shards_gradients: ...",
        "distributed_type = engine.distributed_type",
    ],
)
def test_other_uses_of_engine_names_pass(source: str) -> None:
    assert engine_branches("accelerator/accelerator.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from echelon.base import environ; environ.get('A')",
        "from echelon.base import environ; values = {**environ.snapshot()}",
        "with environ.patch({'A': '1'}): ...",
        "names = filter(environ.own, TABLE)",
        "from echelon.base.environ import get",
        "from echelon.base import environ as variables",
        "from echelon.compat.variables import parse_flag_from_env, str_to_bool",
    ],
)
def test_a_use_of_the_environment_is_reported(source: str) -> None:
    text = "the environment is used outside config/, world/ and launch/"
    assert environment_uses("engines/ddp.py", source) == [f"engines/ddp.py:1: {text}"]
    assert environment_uses("world/environment.py", source) == []


def test_typed_functions_of_the_environment_pass() -> None:
    source = (
        "from echelon.base import environ\nfrom echelon.compat.variables import str_to_bool\nenviron.process_rank()"
    )
    assert environment_uses("base/rank.py", source) == []


def test_each_file_that_may_use_the_environment_does() -> None:
    others = [path for path in ENVIRONMENT_USERS if path in SOURCES and path != "base/environ.py"]
    assert [path for path in others if not environment_uses("engines/ddp.py", SOURCES[path])] == []


def test_a_module_that_loads_torch_through_another_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted_far.py").write_text("import torch\n")
    (tmp_path / "planted_near.py").write_text("import planted_far\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _first_that_loads_torch(["echelon.base.errors", "planted_near", "echelon.base.device"]) == "planted_near"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("cache = {}", "cache is mutable"),
        ("_seen: set[str] = set()", "_seen is mutable"),
        ("if True:\n    hooks = [print]", "hooks is mutable"),
        ("live = weakref.WeakValueDictionary()", "live is mutable"),
        ("class A:\n    _shared_state = {}", "_shared_state is mutable"),
        ("names = [n for n in range(3)]", "names is mutable"),
        ("def f():\n    global count", "global count"),
        ("_TABLE = {}\ndef f():\n    _TABLE['a'] = 1", "_TABLE is a constant but is modified"),
        ("_TABLE = {}\ndef f():\n    del _TABLE['a']", "_TABLE is a constant but is modified"),
        ("SEEN = []\ndef f():\n    SEEN.append(1)", "SEEN is a constant but is modified"),
    ],
)
def test_module_level_state_is_reported(source: str, text: str) -> None:
    assert len(found := module_state("data/sharding/sample_order.py", source)) == 1
    assert text in found[0]


def test_constants_and_values_in_functions_and_classes_pass() -> None:
    source = "__all__ = ['f']\nTABLE = {'a': 1}\npair = (1, 2)\ndef f():\n    seen = []\n    seen.append(1)\nclass A:\n    __slots__ = []"
    assert module_state("data/sharding/sample_order.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "def helper(): ...",
        "class A: ...",
        "if TYPE_CHECKING:\n    x = 1",
        "for a in (): ...",
    ],
)
def test_code_in_a_compatibility_module_is_reported(source: str) -> None:
    assert len(more_than_reexports("state.py", source)) == 1
    assert len(more_than_reexports("utils/__init__.py", source)) == 1
    assert len(more_than_reexports("engines/__init__.py", source)) == 1
    assert len(more_than_reexports("__init__.py", source)) == 1
    assert more_than_reexports("engines/ddp.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from a import b as _b\nc = _b",
        "_unsupported.add_names(globals())",
        "if not TYPE_CHECKING:\n    __all__ = list(f())",
    ],
)
def test_only_compatibility_modules_may_contain_aliases_and_calls_of_compat(source: str) -> None:
    assert more_than_reexports("utils/__init__.py", source) == []
    assert more_than_reexports("__init__.py", source) == []
    assert len(more_than_reexports("engines/__init__.py", "import os\nos.getpid()")) == 1


def _dotted(path: str) -> str:
    return ".".join(["echelon", *path.removesuffix(".py").removesuffix("__init__").strip("/").split("/")])


def _first_that_loads_torch(modules: list[str]) -> str | None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name)\n"
        "        break\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() or None
