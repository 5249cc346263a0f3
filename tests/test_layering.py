"""The layers and the other rules of the source (CONTRIBUTING.md), and that each rule sees a planted violation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layering import (
    FACES,
    LAYERS,
    ROOT_FILES,
    eager_torch,
    engine_branches,
    environment_access,
    is_torch_free,
    layer_of,
    module_state,
    more_than_reexports,
    torch_cuda,
    upward_imports,
    violations,
)

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "echelon"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES)
def test_the_source_keeps_the_rules(path: str) -> None:
    assert violations(path, (SOURCE / path).read_text()) == []


def test_the_torch_free_modules_load_without_torch() -> None:
    modules = [_dotted(path) for path in FILES if is_torch_free(path)]
    assert "echelon.base.errors" in modules
    assert _first_that_loads_torch(modules) is None


def test_the_architecture_page_shows_these_layers() -> None:
    rows = re.findall(
        r"^\| *(\d+) *\| *((?:`\w+/` *)+)\|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE
    )
    table = {int(number): tuple(re.findall(r"`(\w+)/`", folders)) for number, folders in rows}
    assert table == dict(enumerate(LAYERS))


def test_every_layer_has_its_folders_and_every_folder_its_layer() -> None:
    there = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {folder for layer in LAYERS for folder in layer} == there - FACES


def test_no_folder_is_on_two_layers_or_is_a_face() -> None:
    folders = [folder for layer in LAYERS for folder in layer]
    assert len(folders) == len(set(folders))
    assert not FACES & set(folders)


@pytest.mark.parametrize("path", [*sorted(ROOT_FILES), "utils/operations.py", "state.py"])
def test_what_is_outside_the_lines_may_import_anything(path: str) -> None:
    assert upward_imports(path, "from echelon.trainer import Trainer\nfrom echelon import cli") == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engines/ddp.py", "from echelon.accelerator import Accelerator"),
        ("engines/ddp.py", "import echelon.accelerator.accelerator"),
        ("engines/ddp.py", "from echelon import accelerator"),
        ("engines/ddp.py", "def f():\n    from echelon.accelerator import Accelerator"),
        ("engines/ddp.py", "if TYPE_CHECKING:\n    from echelon.accelerator import Accelerator"),
        ("engines/ddp.py", "from ..accelerator import Accelerator"),
        ("engines/ddp.py", "from .. import accelerator"),
        ("engines/ddp.py", "import_module('echelon.accelerator')"),
        ("engines/ddp.py", "importlib.import_module('echelon.accelerator.accelerator')"),
        ("base/device.py", "from echelon.world.world import World"),
        ("launch/spawn.py", "from echelon.distributed.setup import setup"),
    ],
)
def test_an_import_of_a_higher_layer_is_seen(path: str, source: str) -> None:
    assert len(found := upward_imports(path, source)) == 1, found
    assert found[0].startswith(f"{path}:{source.count(chr(10)) + 1}: ")
    assert found[0].endswith("up")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("world/world.py", "from echelon.config.schema import RunConfig"),
        ("data/loader.py", "from echelon.checkpoint.manifest import Manifest"),
        ("trackers/wandb.py", "import echelon.precision.policy"),
    ],
)
def test_an_import_of_a_neighbour_is_seen(path: str, source: str) -> None:
    assert "both are on layer" in upward_imports(path, source)[0]


@pytest.mark.parametrize(
    "source",
    [
        "from echelon import World",
        "import echelon",
        "from echelon.utils import gather",
        "from echelon.helpers import f",
    ],
)
def test_an_import_around_the_layers_is_seen(source: str) -> None:
    assert "name the module itself" in upward_imports("accelerator/accelerator.py", source)[0]


def test_a_file_outside_every_layer_is_seen() -> None:
    assert upward_imports("helpers.py", "") == ["helpers.py:1: 'helpers' is no folder of the layers and no face"]
    assert upward_imports("common/tools.py", "") == [
        "common/tools.py:1: 'common' is no folder of the layers and no face"
    ]


def test_the_trainer_sees_the_accelerator_checkpoints_compat_and_base_only() -> None:
    allowed = "from echelon.accelerator import Accelerator\nfrom echelon.base.errors import UsageError\nimport echelon.trainer.args"
    assert upward_imports("trainer/trainer.py", allowed) == []
    assert (
        "it may use accelerator, base, checkpoint, compat only"
        in upward_imports("trainer/trainer.py", "from echelon.engines.base import Engine")[0]
    )
    assert "private name" in upward_imports("trainer/trainer.py", "from echelon.accelerator._steps import Step")[0]


def test_imports_downward_and_of_the_own_folder_pass() -> None:
    source = "import os\nimport torch\nfrom echelon import __version__, distributed\nfrom echelon.engines.base import Engine\nfrom echelon.base import environ"
    assert upward_imports("engines/ddp.py", source) == []
    assert upward_imports("engines/ddp.py", "from .base import Engine\nfrom ..data import sampler") == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A'] = '1'",
        "import os\nprint(os.environ.get('A'))",
        "import os as _os\n_os.getenv('A')",
        "import os.path\nos.putenv('A', '1')",
        "import posix\nposix.environ",
        "import os\ngetattr(os, 'environ')",
        "import torch\nfrom os import environ",
        "import torch\nfrom os import getenv as ask",
    ],
)
def test_the_environment_outside_its_file_is_seen(source: str) -> None:
    assert environment_access("world/environment.py", source) == [
        "world/environment.py:2: the environment is read and written in base/environ.py only"
    ]
    assert environment_access("base/environ.py", source) == []


def test_the_rest_of_os_and_our_own_environ_pass() -> None:
    source = "import os\nfrom echelon.base import environ\nos.getpid()\nenviron.get('A')\nself.environ"
    assert environment_access("world/environment.py", source) == []


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.cuda.synchronize()", "import torch as t\nt.cuda.is_available()", "\nimport torch.cuda"]
    + ["\nfrom torch import cuda", "\nfrom torch.cuda import amp", "\nfrom torch.cuda.amp import GradScaler"],
)
def test_torch_cuda_outside_the_device_table_is_seen(source: str) -> None:
    assert torch_cuda("precision/autocast.py", source)[0].startswith("precision/autocast.py:2: torch.cuda")
    assert torch_cuda("base/device.py", source) == []


def test_a_tensors_cuda_and_torch_accelerator_pass() -> None:
    assert (
        torch_cuda("precision/autocast.py", "import torch\ntorch.accelerator.synchronize()\nx.cuda()\n'torch.cuda'")
        == []
    )


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
def test_a_branch_on_the_engine_is_seen(source: str) -> None:
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
def test_what_is_no_branch_on_the_engine_passes(source: str) -> None:
    assert engine_branches("accelerator/accelerator.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import torch.distributed as dist",
        "from torch import nn",
        "try:\n    import torch\nexcept ImportError: ...",
        "class A:\n    import torch",
        "if TYPE_CHECKING: ...\nelse:\n    import torch",
    ],
)
def test_an_eager_import_of_torch_is_seen(source: str) -> None:
    assert len(eager_torch("config/schema.py", source)) == 1
    assert len(eager_torch("world/environment.py", source)) == 1
    assert eager_torch("world/group.py", source) == []


@pytest.mark.parametrize(
    "source", ["def f():\n    import torch", "if TYPE_CHECKING:\n    import torch", "import torchrun_like"]
)
def test_a_deferred_import_of_torch_passes(source: str) -> None:
    assert eager_torch("config/schema.py", source) == []


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
        ("_TABLE = {}\ndef f():\n    _TABLE['a'] = 1", "_TABLE is a constant and is changed"),
        ("_TABLE = {}\ndef f():\n    del _TABLE['a']", "_TABLE is a constant and is changed"),
        ("SEEN = []\ndef f():\n    SEEN.append(1)", "SEEN is a constant and is changed"),
    ],
)
def test_module_level_state_is_seen(source: str, text: str) -> None:
    assert len(found := module_state("data/sharding/sample_order.py", source)) == 1
    assert text in found[0]


def test_constants_and_what_lives_in_functions_and_classes_pass() -> None:
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
def test_code_in_a_face_is_seen(source: str) -> None:
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
def test_aliases_and_calls_of_compat_stand_in_compatibility_modules_only(source: str) -> None:
    assert more_than_reexports("utils/__init__.py", source) == []
    assert more_than_reexports("__init__.py", source) == []
    assert len(more_than_reexports("engines/__init__.py", "import os\nos.getpid()")) == 1


def test_layers_are_counted_from_base() -> None:
    assert layer_of("base") == 0
    assert layer_of("compat") + 1 == layer_of("config") == layer_of("world") == 2
    assert layer_of("cli") == len(LAYERS) - 1 == 12
    assert layer_of("utils") is None


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
