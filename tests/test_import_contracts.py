"""The contracts and banned names in pyproject.toml detect deliberate violations, and there are no import cycles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import grimp
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
CONTRACTS = {entry["id"]: entry for entry in tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]}
# The folders of each layer, from the top.
LAYERS = [layer.split(" | ") for layer in CONTRACTS["layers"]["layers"]]

# Upper bounds for the modules in import cycles that remain. Lower a number with your change.
CYCLES_LEFT = {"data": 2}

# Folders of one package that import each other, and why.
MUTUAL_IMPORTS: dict[str, str] = {}

PLANTED = {
    "engines/plain.py": "from echelon.accelerator import Accelerator",
    "engines/dotted.py": "import echelon.accelerator.accelerator",
    "engines/package.py": "from echelon import accelerator",
    "engines/in_function.py": "def f():\n    from echelon.accelerator import Accelerator",
    "engines/type_checking.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from echelon.trainer import Trainer",
    "engines/relative.py": "from ..accelerator import Accelerator",
    "engines/launcher.py": "import echelon.launch",
    "base/highest.py": "from echelon.world import World",
    "data/neighbour.py": "from echelon.checkpoint import Manifest",
    "data/around.py": "from echelon.utils import gather",
    "data/of_package.py": "from echelon import World",
    "trainer/deep.py": "from echelon.engines import Engine",
    "stray/module.py": "",
}
ALLOWED = {
    "engines/downward.py": "import torch\nfrom echelon.base import environ\nfrom echelon import distributed",
    "trainer/public.py": "from echelon.accelerator import Accelerator\nfrom echelon.checkpoint import manifest",
    "utils/names.py": "from echelon.trainer import Trainer",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run import-linter with our contracts over a small package of that name."""
    folder = tmp_path_factory.mktemp("contracts")
    (folder / "pyproject.toml").write_text(PROJECT.read_text())
    modules = [*CONTRACTS["layers"]["exhaustive_ignores"], *(name for layer in LAYERS for name in layer)]
    files = {f"{name}/__init__.py": "" for name in modules} | dict.fromkeys(
        ["__init__.py", "accelerator/accelerator.py", "stray/__init__.py"], ""
    )
    for path, source in (files | PLANTED | ALLOWED).items():
        target = folder / "echelon" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source)
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 1, result.stderr
    return result.stdout


@pytest.mark.parametrize("path", PLANTED)
def test_a_forbidden_import_is_reported(path: str, report: str) -> None:
    module = "echelon." + path.removesuffix(".py").replace("/", ".")
    assert module.removesuffix(".module") in report


@pytest.mark.parametrize("path", ALLOWED)
def test_an_allowed_import_passes(path: str, report: str) -> None:
    assert "echelon." + path.removesuffix(".py").replace("/", ".") not in report


def test_the_source_keeps_the_contracts() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [program, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_architecture_page_shows_these_layers() -> None:
    rows = re.findall(
        r"^\| *(\d+) *\| *((?:`\w+/` *)+)\|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE
    )
    table = {int(number): re.findall(r"`(\w+)/`", folders) for number, folders in rows}
    assert table == dict(enumerate(reversed(LAYERS)))


def test_folders_beside_each_other_import_each_other_in_one_direction_only() -> None:
    graph = grimp.build_graph("echelon", cache_dir=None)
    found = _mutual_imports(
        (module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)
    )
    assert found == set(MUTUAL_IMPORTS)


def test_folders_that_import_each_other_are_reported() -> None:
    one_way = [("e.data.exact.a", "e.data.sharding.b"), ("e.data.exact.a", "e.data.c"), ("e.data.c", "e.data.exact.a")]
    assert _mutual_imports(one_way) == set()
    assert _mutual_imports([*one_way, ("e.data.sharding.d", "e.data.exact.deep.e")]) == {"data/exact data/sharding"}


def test_there_are_no_import_cycles() -> None:
    graph = grimp.build_graph("echelon", cache_dir=None)
    found = [module.split(".")[1] for module in graph.modules if _is_in_cycle(graph, module)]
    counts = {folder: found.count(folder) for folder in found}
    assert {folder: count for folder, count in counts.items() if count > CYCLES_LEFT.get(folder, 0)} == {}


def test_modules_imported_by_their_names_are_in_lower_layers_too() -> None:
    """import-linter does not see ``import_module("echelon.trainer")``."""
    heights = {folder: number for number, layer in enumerate(reversed(LAYERS)) for folder in layer}
    found = []
    for path, name in _named_imports(ROOT / "src" / "echelon"):
        ours, theirs = path.parts[0], name.split(".")[1]
        if ours in heights and ours != theirs and heights.get(theirs, 0) >= heights[ours]:
            found.append(f"{path}: {name}")
    assert found == []


def test_a_module_imported_by_its_name_is_found(tmp_path: Path) -> None:
    source = (
        "import importlib\ndef f(name):\n    importlib.import_module('echelon.trainer.loop')\n    import_module(name)\n"
    )
    (tmp_path / "a.py").write_text(source)
    assert list(_named_imports(tmp_path)) == [(Path("a.py"), "echelon.trainer.loop")]


def test_an_import_cycle_is_reported() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        graph.add_import(importer=importer, imported=imported)
    assert {module for module in graph.modules if _is_in_cycle(graph, module)} == {"a", "b", "c"}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A'] = '1'",
        "import os\nprint(os.environ.get('A'))",
        "import os as _os\n_os.getenv('A')",
        "import os.path\nos.putenv('A', '1')",
        "import posix\nposix.environ",
        "\nfrom os import environ",
        "\nfrom os import getenv as ask",
        "import torch\ntorch.cuda.synchronize()",
        "import torch as t\nt.cuda.is_available()",
        "\nimport torch.cuda",
        "\nfrom torch import cuda",
        "\nfrom torch.cuda import amp",
        "\nfrom torch.cuda.amp import GradScaler",
    ],
)
def test_a_banned_name_is_reported(source: str) -> None:
    assert "TID251" in _lint(source, "src/echelon/world/environment.py")
    assert "TID251" not in _lint(source, "src/echelon/base/" + ("device.py" if "cuda" in source else "environ.py"))


def test_other_names_pass() -> None:
    source = "import os\nimport torch\nfrom echelon.base import environ\nos.getpid()\nenviron.get('A')\ntorch.accelerator.synchronize()\nx.cuda()"
    assert "TID251" not in _lint(source, "src/echelon/world/environment.py")


def _named_imports(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the module of each ``import_module`` call in ``folder`` with the name of one of echelon's modules."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
                name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
                if isinstance(name, str) and name.startswith("echelon."):
                    yield path.relative_to(folder), name


def _is_in_cycle(graph: grimp.ImportGraph, module: str) -> bool:
    return bool(graph.find_upstream_modules(module) & graph.find_downstream_modules(module))


def _mutual_imports(imports: Iterable[tuple[str, str]]) -> set[str]:
    """Return the pairs of folders in one package that import each other."""
    pairs = set()
    for importer, imported in imports:
        ours, theirs = importer.split("."), imported.split(".")
        same = sum(1 for _ in takewhile(lambda names: names[0] == names[1], zip(ours, theirs, strict=False)))
        if same > 1 and min(len(ours), len(theirs)) > same + 1:  # both are in folders beside each other
            pairs.add(("/".join(ours[1 : same + 1]), "/".join(theirs[1 : same + 1])))
    return {" ".join(sorted(pair)) for pair in pairs if pair[::-1] in pairs}


@cache
def _lint(source: str, path: str) -> str:
    command = [
        Path(sys.executable).with_name("ruff"),
        "check",
        "--output-format",
        "concise",
        "--stdin-filename",
        path,
        "-",
    ]
    return subprocess.run(
        command, cwd=ROOT, input=source, capture_output=True, text=True, check=False, timeout=60
    ).stdout
