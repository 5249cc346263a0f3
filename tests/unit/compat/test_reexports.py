"""Every public module path of accelerate 1.15.0 exists under echelon and has its names; using an unsupported one raises an error.

``accelerate_names.json`` lists what each module of accelerate defines (its packages: what they re-export).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from echelon.base.errors import UsageError
from echelon.compat import unsupported

NAMES: dict[str, list[str]] = json.loads((Path(__file__).parents[2] / "data" / "accelerate_names.json").read_text())[
    "names"
]

# (module, names): why they are left out.
OMITTED: dict[str, tuple[set[str], str]] = {
    "commands.config": (
        {"config_command_parser", "default_command_parser", "get_config_parser", "main", "update_command_parser"},
        "argparse parsers of another command line",
    ),
    "commands.config.config_args": (
        {"cache_dir", "default_json_config_file", "default_yaml_config_file", "hf_cache_home"},
        "paths of another library's files, fixed when it is imported",
    ),
    "commands.config.default": (
        {"default_command_parser", "default_config_command", "description"},
        "argparse parsers of another command line",
    ),
    "data_loader": ({"MpDeviceLoaderWrapper"}, "of a TPU"),
    "launchers": ({"test_launch"}, "the child's side of accelerate's own launcher"),
    "optimizer": ({"patch_optimizer_step"}, "how accelerate notices skipped steps; nothing is patched here"),
    "state": (
        {"SharedDict", "ThreadLocalSharedDict", "do_nothing"},
        "the process-wide dictionaries behind accelerate's states; there are none here",
    ),
    "utils.dataclasses": (
        {"AmaxComputeAlgorithm", "Backend", "FP8Format", "MODEL_CONFIGS_TO_MEGATRON_PARSERS", "OptLevel"},
        "annotations of Transformer Engine's and MS-AMP's recipes, a table of Megatron's; not offered",
    ),
    "utils.imports": ({"USE_TORCH_XLA"}, "the environment as it was at import; ask is_torch_xla_available()"),
    "utils.operations": (
        {"TENSOR_INT_TO_DTYPE", "TENSOR_TYPE_TO_INT", "gather_tensor_shape", "is_torch_xpu_tensor"},
        "how accelerate sends a shape; and a function that always raises (isinstance with eight arguments)",
    ),
    "utils.other": ({"TORCH_SAFE_GLOBALS", "np_core"}, "the allow list of load(), which is not for others to change"),
}


@pytest.mark.parametrize("module", sorted(NAMES))
def test_a_module_has_the_names_of_accelerates(module: str) -> None:
    omitted = OMITTED.get(module, (set(), ""))[0]
    compatible = import_module(f"echelon.{module}")
    assert {name for name in NAMES[module] if not hasattr(compatible, name)} - omitted == set()
    imported: dict[str, object] = {}
    exec(f"from echelon.{module} import *", imported)
    assert set(NAMES[module]) - omitted - set(imported) == set()


def test_what_is_omitted_is_a_name_of_accelerate() -> None:
    for module, (names, reason) in OMITTED.items():
        assert names <= set(NAMES[module]), module
        assert reason


@pytest.mark.parametrize("name", sorted(unsupported.ALTERNATIVES))
def test_using_an_unsupported_name_raises_with_the_alternative(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^{name} is not supported by this version of echelon\n  do:    \w"
    ) as caught:
        getattr(unsupported, name)()
    assert caught.value.do


def test_an_unsupported_class_can_be_subclassed_but_not_instantiated() -> None:
    from echelon.utils import MegatronLMPlugin, TorchTensorParallelPlugin

    class MyPlugin(TorchTensorParallelPlugin):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            raise AssertionError("the plugin was made")

    assert not isinstance(object(), MegatronLMPlugin)
    assert issubclass(MegatronLMPlugin, unsupported.UnsupportedClass)
    with pytest.raises(UsageError, match="MyPlugin is not supported"):
        MyPlugin()


def test_one_object_has_one_identity_under_all_its_paths() -> None:
    import echelon
    from echelon.accelerator import DistributedType
    from echelon.memory_utils import find_executable_batch_size
    from echelon.utils import DistributedType as of_utils, find_executable_batch_size as of_utils_too
    from echelon.utils.dataclasses import DistributedType as of_dataclasses

    assert DistributedType is of_utils is of_dataclasses is echelon.DistributedType
    assert find_executable_batch_size is of_utils_too


def test_import_star_takes_names_and_no_submodule() -> None:
    names: dict[str, object] = {}
    exec("from echelon.utils import *\nfrom echelon import *", names)
    assert {"gather", "Accelerator", "distributed", "tqdm"} <= set(names)
    assert not {"random", "dataclasses", "logging", "TYPE_CHECKING", "ModuleType"} & set(names)


@pytest.mark.slow
def test_modules_are_attributes_without_an_import_of_their_own() -> None:
    program = """
import warnings
warnings.simplefilter("error")
from echelon.utils.launch import prepare_tpu
import echelon
import echelon.utils.megatron_lm as megatron
assert megatron.initialize is echelon.utils.megatron_lm_initialize and not hasattr(echelon.utils, "initialize")
assert echelon.utils.prepare_tpu is prepare_tpu is echelon.utils.launch.prepare_tpu
print(echelon.utils.str_to_bool("yes"), echelon.utils.memory.__name__, echelon.data_loader.__name__, echelon.state.__name__)
from echelon.utils.tqdm import tqdm
import echelon.utils.tqdm
print(echelon.utils.tqdm is tqdm)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (result.stdout.splitlines(), result.stderr) == (
        ["1 echelon.utils.memory echelon.data_loader echelon.state", "True"],
        "",
    )
