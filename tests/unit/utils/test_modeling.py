"""Sizes, ties, saving, compiling, and the options that are given as objects."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon import Accelerator, utils
from echelon.base.warnings import EchelonWarning
from echelon.config.schema import DynamoBackendName
from echelon.utils.ao import filter_linear_layers, find_first_last_linear_layers
from echelon.utils.modeling import compute_module_total_buffer_size, get_non_persistent_buffers


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("dropped", torch.zeros(2), persistent=False)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        result: torch.Tensor = self.head(x)
        return result


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [(7, 7), ("5GB", 5 * 10**9), ("1.5MiB", 1572864), ("8Kb", 1000), ("2kib", 2048), ("200mb", 25_000_000)],
)
def test_sizes_are_read(text: int | str, num_bytes: int) -> None:
    assert utils.convert_file_size_to_int(text) == num_bytes


@pytest.mark.parametrize("text", ["5", "GB", "5 TB", -1, ""])
def test_an_invalid_size_is_rejected(text: int | str) -> None:
    with pytest.raises(ValueError, match="is not a valid size"):
        utils.convert_file_size_to_int(text)


def test_bytes_of_an_element() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool, utils.CustomDtype.INT4)
    assert [utils.dtype_byte_size(dtype) for dtype in dtypes] == [4, 2, 8, 1, 0.125, 0.5]
    with pytest.raises(ValueError, match="'half' is not a dtype"):
        utils.dtype_byte_size("half")


def test_sizes_of_a_model_by_module() -> None:
    sizes = utils.compute_module_sizes(_Tied())
    # 10 x 4 float32 once, 3 int64, 2 float32
    assert dict(sizes) == {"": 192, "embed": 160, "embed.weight": 160, "kept": 24, "dropped": 8}
    assert utils.compute_module_sizes(_Tied(), dtype="float16")[""] == 80 + 24 + 4
    assert utils.compute_module_sizes(_Tied(), special_dtypes={"embed.weight": torch.int8})[""] == 40 + 24 + 8
    assert compute_module_total_buffer_size(_Tied()) == 32


def test_tensors_by_name() -> None:
    model = _Tied()
    assert [name for name, _ in utils.named_module_tensors(model)] == ["kept", "dropped"]
    assert [name for name, _ in utils.named_module_tensors(model, recurse=True, remove_non_persistent=True)] == [
        "embed.weight",
        "kept",
    ]
    assert [name for name, _ in utils.named_module_tensors(model, include_buffers=False, recurse=True)] == [
        "embed.weight"
    ]
    assert get_non_persistent_buffers(nn.Sequential(model), recurse=True, fqns=True) == {"0.dropped"}


def test_ties_are_found_and_restored() -> None:
    model = _Tied()
    ties = utils.find_tied_parameters(model)
    assert ties == [["embed.weight", "head.weight"]]
    model.embed.weight = nn.Parameter(torch.empty(10, 4, device="meta"))
    assert utils.find_tied_parameters(model) == []
    utils.retie_parameters(model, ties)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.device.type == "cpu"


def test_saving_safetensors_stores_shared_tensors_once(tmp_path: Path) -> None:
    state = OrderedDict(_Tied().state_dict())
    state["turned"] = torch.arange(6.0).reshape(2, 3).T
    with pytest.warns(EchelonWarning, match="^head.weight share memory"):
        utils.save(state, tmp_path / "model.safetensors", safe_serialization=True)
    loaded = load_file(tmp_path / "model.safetensors")
    assert sorted(loaded) == ["embed.weight", "kept", "turned"]
    assert loaded["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert "head.weight" in state
    with pytest.raises(ValueError, match="not tensors: note"):
        utils.save({"note": "text"}, tmp_path / "other", safe_serialization=True)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch /tmp/echelon-was-here",))


def test_loading_accepts_arrays_and_rejects_code(tmp_path: Path) -> None:
    before = torch.serialization.get_safe_globals()
    state = {
        "t": torch.ones(2),
        "a": np.arange(3, dtype=np.uint32),
        "o": OrderedDict(n=1.5),
        "rng": np.random.RandomState(3).get_state(),
    }
    utils.save(state, tmp_path / "state.bin")
    loaded = utils.load(tmp_path / "state.bin")
    assert loaded["a"].tolist() == [0, 1, 2]
    assert loaded["rng"][1].tolist() == state["rng"][1].tolist()  # type: ignore[index]
    torch.save(_Evil(), tmp_path / "evil.bin")
    with pytest.raises(Exception, match=r"it contains (posix|nt)\.system, which is not plain data"):
        utils.load(tmp_path / "evil.bin")
    with pytest.raises(ValueError, match=r"load\(weights_only=False\) would run any code"):
        utils.load(tmp_path / "evil.bin", weights_only=False)
    assert set(torch.serialization.get_safe_globals()) == set(before)


def test_the_model_is_unwrapped() -> None:
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(model)
    assert utils.extract_model_from_parallel(wrapped) is model
    compiled = torch.compile(wrapped, backend="eager")
    unwrapped = utils.extract_model_from_parallel(compiled)
    assert utils.is_compiled_module(unwrapped)
    assert unwrapped._orig_mod is model
    assert compiled._orig_mod is wrapped  # what was looked into stays as it was
    accelerator = Accelerator(cpu=True)
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
    assert accelerator.unwrap_model(compiled)._orig_mod is model
    assert (
        utils.extract_model_from_parallel(
            torch.compile(nn.DataParallel(model), backend="eager"), keep_torch_compile=False
        )
        is model
    )
    outer = nn.Sequential(nn.DataParallel(model))
    assert utils.extract_model_from_parallel(outer)[0] is not model
    assert utils.extract_model_from_parallel(outer, recursive=True)[0] is model


def test_repeated_blocks_are_compiled_one_by_one_on_the_same_parameters() -> None:
    model, x = _Stack(), torch.ones(1, 4)
    compiled = utils.compile_regions(model, backend="eager")
    assert [utils.is_compiled_module(block) for block in compiled.blocks] == [True] * 3  # type: ignore[union-attr]
    assert utils.has_compiled_regions(compiled)
    assert not utils.has_compiled_regions(model)
    with torch.no_grad():  # with gradients torch's tracing itself warns, and warnings are errors here
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    assert compiled.head._orig_mod.weight is model.head.weight  # type: ignore[union-attr]
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model


def test_a_dynamo_plugin_reads_the_environment_and_gives_the_arguments_of_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "yes")
    plugin = utils.TorchDynamoPlugin(mode="reduce-overhead", use_regional_compilation=True)
    assert plugin.backend is utils.DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": True}
    assert utils.TorchDynamoPlugin(backend="torchxla_trace_once").to_dict()["backend"] == "torchxla_trace_once"
    assert [backend.value.lower() for backend in utils.DynamoBackend] == list(get_args(DynamoBackendName))
    with pytest.raises(ValueError, match="'torhchxla_trace_once' is not a torch"):
        utils.TorchDynamoPlugin(backend="torhchxla_trace_once")


def test_handlers_return_the_differences_from_the_defaults() -> None:
    ddp = utils.DistributedDataParallelKwargs(static_graph=True, comm_hook=utils.DDPCommunicationHookType.FP16)
    assert ddp.to_kwargs() == {"static_graph": True}
    assert utils.GradientAccumulationPlugin(num_steps=4).to_kwargs() == {"num_steps": 4}
    assert utils.GradScalerKwargs(growth_interval=3).to_dict()["init_scale"] == 65536.0


def test_a_profiler_records_what_the_block_did() -> None:
    with utils.ProfileKwargs(activities=["cpu"], record_shapes=True).build() as profiler:
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert any(event.key == "aten::mm" for event in profiler.key_averages(group_by_input_shape=True))
    with pytest.raises(ValueError, match="'gpu' is not a profiler activity"):
        utils.ProfileKwargs(activities=["gpu"]).build()  # type: ignore[list-item]


def test_a_project_logs_into_its_folder_unless_told_otherwise() -> None:
    assert utils.ProjectConfiguration("/here").logging_dir == "/here"
    assert utils.ProjectConfiguration("/here", logging_dir="/logs").logging_dir == "/logs"
    late = utils.ProjectConfiguration()
    late.set_directories("/there")
    assert (late.project_dir, late.logging_dir) == ("/there", "/there")


def test_enums_print_and_contain_their_values() -> None:
    assert [str(kind) for kind in utils.PrecisionType] == utils.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert "bf16" in utils.PrecisionType
    assert "bf17" not in utils.PrecisionType
    assert len(utils.DistributedType) == 14
    assert utils.DistributedType("MULTI_CPU") == "MULTI_CPU"
    assert utils.RNGType("generator") is utils.RNGType.GENERATOR


def test_fp8_excludes_the_first_and_last_layer_and_unsuitable_sizes() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 30), nn.Linear(32, 16))
    ends = find_first_last_linear_layers(model)
    assert ends == ("0", "3")
    assert [filter_linear_layers(layer, name, list(ends)) for name, layer in model.named_children()] == [
        False,
        True,
        False,
        False,
    ]


def test_submodules_precede_their_parents() -> None:
    from echelon.utils.other import get_module_children_bottom_up, recursive_getattr

    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    assert names.index("0.0") < names.index("0") < names.index("")
    assert recursive_getattr(model, "0.0") is model[0][0]
