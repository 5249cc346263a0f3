"""Models with parts on the CPU and on disk, against the same model in one place."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from echelon import (
    Accelerator,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from echelon.base.errors import CheckpointError, UsageError
from echelon.hooks import remove_hook_from_submodules
from echelon.utils import OffloadedWeightsLoader, get_state_dict_from_offload, get_state_dict_offloaded_model
from echelon.utils.modeling import load_state_dict

PROGRAM = Path(__file__).parents[2] / "programs" / "big_model_from_disk.py"


class Tied(nn.Module):
    """Has tied weights, a parameter and buffers of its own, and a buffer that no file stores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.head(self.body(self.embed(x)) * self.scale + self.shift)
        return {"logits": logits}


X = torch.tensor([0, 3, 6, 3])


def _model() -> Tied:
    torch.manual_seed(4)
    model = Tied().eval()
    model.body[1].running_mean.uniform_()
    return model


def _expected() -> torch.Tensor:
    logits: torch.Tensor = _model()(X)["logits"]
    return logits


def _meta_names(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if tensor.is_meta}


def _checkpoint(folder: Path) -> Path:
    """A checkpoint of two files, in which tied weights are stored once, as by ``save_pretrained``."""
    state = {name: tensor.detach().clone() for name, tensor in _model().state_dict().items() if name != "head.weight"}
    folder.mkdir(exist_ok=True)
    parts = [dict(list(state.items())[:4]), dict(list(state.items())[4:])]
    index = {}
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


MAPS: list[dict[str, Any]] = [
    {"": "disk"},
    {"embed": "cpu", "body.0": "disk", "body.1": "cpu", "body.3": "disk", "head": "cpu", "scale": "cpu"},
    {"embed": "disk", "body": "disk", "head": "disk", "scale": "disk"},
    {"embed": "cpu", "body": "disk", "head": "disk", "scale": "cpu"},
]


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("device_map", MAPS)
def test_a_dispatched_model_computes_the_same(
    tmp_path: Path, device_map: dict[str, Any], offload_buffers: bool
) -> None:
    model = _model()
    found = dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=offload_buffers)
    assert found is model
    assert model.hf_device_map == device_map
    offloaded = _meta_names(model)
    assert "body.0.weight" in offloaded
    assert ("body.1.running_mean" in offloaded) == (offload_buffers and "body.1" not in device_map)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(X)["logits"], _expected())
        # Weights that are tied to others are tied to these until their module runs.
        assert _meta_names(model) | {"head.weight"} == offloaded | {"head.weight"}
    state = get_state_dict_offloaded_model(model)
    for name, tensor in _model().state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert list(state) == list(_model().state_dict())
    part = {"body.0.weight": torch.empty(0), "other": torch.empty(0)}
    get_state_dict_from_offload(model.body[0], "body.0.weight", part)
    assert torch.equal(part["body.0.weight"], _model().body[0].weight)
    remove_hook_from_submodules(model)
    assert not _meta_names(model)
    (tmp_path / "index.json").unlink()
    assert torch.equal(model(X)["logits"], _expected())


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_weights_stay_on_the_cpu_or_on_disk(tmp_path: Path, offload_buffers: bool) -> None:
    on_cpu = cpu_offload(_model(), offload_buffers=offload_buffers)
    on_disk = disk_offload(_model(), tmp_path, offload_buffers=offload_buffers)
    for model in (on_cpu, on_disk):
        assert ("body.1.running_mean" in _meta_names(model)) == offload_buffers
        assert torch.equal(model(X)["logits"], _expected())
    # The folder is used as it is.
    empty = Tied().eval()
    disk_offload(empty, tmp_path, offload_buffers=True)
    if offload_buffers:
        empty.shift = torch.arange(4.0)
        assert torch.equal(empty(X)["logits"], _expected())
    given = {name: torch.zeros_like(tensor) for name, tensor in _model().state_dict().items()}
    assert cpu_offload(_model(), state_dict=given)(X)["logits"].tolist() == torch.zeros(4, 7).tolist()
    model, hook = cpu_offload_with_hook(_model())
    assert torch.equal(model(X)["logits"].cpu(), _expected())
    hook.offload()
    assert model.scale.device.type == "cpu"


def test_a_single_device_needs_no_hooks() -> None:
    model = dispatch_model(_model(), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}
    hooked = dispatch_model(_model(), {"": "cpu"}, force_hooks=True)
    assert hooked._hf_hook.io_same_device
    assert torch.equal(hooked(X)["logits"], _expected())
    assert hooked.head.weight is hooked.embed.weight


def test_a_model_with_offloaded_parts_cannot_be_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = dispatch_model(_model(), {"": "disk"}, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), model.cuda):
        with pytest.raises(RuntimeError, match="Tied cannot be moved, because parts of it are offloaded") as raised:
            move()
        assert isinstance(raised.value, UsageError)
    whole = dispatch_model(_model(), {"": "cpu"}, force_hooks=True)
    whole.to(torch.float32)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        whole.to("cpu")
    assert "was placed on devices by dispatch_model(), and to() moves it" in caplog.text


def test_a_map_that_does_not_fit_the_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the device map has no device for scale"):
        dispatch_model(_model(), {"embed": "cpu", "body": "cpu", "head": "cpu"})
    with pytest.raises(UsageError, match="puts body on disk, but no folder was given"):
        dispatch_model(_model(), {"": "cpu", "body": "disk"})
    left_out = _model()
    left_out._no_placement_params = {"scale"}
    dispatch_model(left_out, {"embed": "cpu", "body": "disk", "head": "cpu"}, offload_dir=tmp_path)
    assert torch.equal(left_out(X)["logits"], _expected())


def test_tied_weights_are_tied_again_and_trained_once() -> None:
    model = dispatch_model(_model(), {"": "cpu"}, force_hooks=True)
    model(X)["logits"].sum().backward()
    reference = _model()
    reference(X)["logits"].sum().backward()
    assert torch.equal(model.embed.weight.grad, reference.embed.weight.grad)
    assert model.head.weight.grad is model.embed.weight.grad


def test_gradients_flow_through_offloaded_modules() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    body = _model().body
    body(x).sum().backward()
    offloaded = cpu_offload(_model().body)
    y = x.detach().clone().requires_grad_()
    offloaded(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("dtype", [None, "float64"])
def test_a_checkpoint_is_loaded_into_its_places(tmp_path: Path, device_map: dict[str, Any], dtype: str | None) -> None:
    folder = _checkpoint(tmp_path / "checkpoint")
    with init_empty_weights():
        model = Tied().eval()
    offload = tmp_path / "offload"
    found = load_checkpoint_and_dispatch(model, folder, device_map, offload_folder=offload, dtype=dtype)
    expected = _model().to(torch.float64 if dtype else torch.float32)
    if dtype:
        model.shift = expected.shift
    with torch.no_grad():
        assert torch.equal(found(X)["logits"], expected(X)["logits"])
    weights = OffloadedWeightsLoader(save_folder=offload)
    assert {str(tensor.dtype) for tensor in weights.values()} <= {f"torch.{dtype or 'float32'}", "torch.int64"}
    assert {name for name in weights if "running" in name} == set()
    if "head.weight" in weights and "embed.weight" in weights:
        assert torch.equal(weights["head.weight"], weights["embed.weight"])


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_map_is_computed_from_the_memory(tmp_path: Path, device_map: str) -> None:
    folder = _checkpoint(tmp_path / "checkpoint")
    with init_empty_weights():
        model = Tied().eval()
    # Room for the embedding and the head (112 bytes each time), but not for the rest with its reserve.
    memory: dict[int | str, int | str] = {"cpu": 420}
    found = load_checkpoint_and_dispatch(
        model, folder, device_map, max_memory=memory, offload_folder=tmp_path / "offload"
    )
    assert set(found.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(found(X)["logits"], _expected())
    with pytest.raises(UsageError, match="'even' is not a device map"):
        load_checkpoint_and_dispatch(model, folder, "even")


def test_weights_of_old_torch_files_are_loaded_without_running_code(tmp_path: Path) -> None:
    torch.save(_model().state_dict(), tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        model = Tied().eval()
    load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu", "body": "disk"}, offload_folder=tmp_path / "offload")
    assert torch.equal(model(X)["logits"], _expected())
    torch.save({"a": copy.deepcopy}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="could run code"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    with pytest.raises(CheckpointError, match="could run code"):
        load_state_dict(str(tmp_path / "pytorch_model.bin"))


def test_modules_may_stay_in_float32(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "checkpoint")
    with init_empty_weights():
        model = Tied().eval()
    load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype=torch.float16, keep_in_fp32_modules=["body.1"])
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items() if tensor.dtype.is_floating_point}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    assert model.head.weight is model.embed.weight


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match=r"parts of the model on disk, but no folder was given"):
        load_checkpoint_in_model(_model(), folder, {"": "disk"})
    with pytest.raises(UsageError, match=r"has no device for embed.weight"):
        load_checkpoint_in_model(_model(), folder, {"body": "cpu"})
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1.safetensors, which does not exist"):
        load_checkpoint_in_model(_model(), folder, {"": "cpu"})


def test_a_file_is_read_to_the_devices_of_a_map(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(1), "a.b.w": torch.ones(1), "c": torch.ones(1)}, tmp_path / "x.safetensors")
    found = load_state_dict(str(tmp_path / "x.safetensors"), {"a": "meta", "a.b": "disk"})
    assert {name: tensor.device.type for name, tensor in found.items()} == {"a.w": "meta", "a.b.w": "cpu", "c": "cpu"}


def test_an_offloaded_model_is_saved_with_its_weights(tmp_path: Path) -> None:
    model = dispatch_model(_model(), {"": "disk"}, offload_dir=tmp_path / "offload")
    Accelerator(cpu=True).save_model(model, tmp_path / "saved")
    found = Tied().eval()
    load_checkpoint_in_model(found, tmp_path / "saved")
    assert torch.equal(found(X)["logits"], _expected())


@pytest.mark.slow
def test_the_accelerator_loads_none_of_this_and_hooks_load_no_compiler() -> None:
    """Importing torch._dynamo takes seconds."""
    program = """
import sys, torch, echelon
echelon.Accelerator(cpu=True)
print([name for name in sys.modules if "big_models" in name])
from echelon.hooks import *
echelon.cpu_offload(torch.nn.Linear(2, 2))(torch.ones(2))
print([name for name in sys.modules if name == "torch._dynamo"])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.stdout.split(), ended.stderr) == (["[]", "[]"], "")


def _run_from_disk(folder: Path, num_layers: int, width: int) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), str(folder), str(num_layers), str(width)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert found["close"] == [True, True]
    return found


@pytest.mark.slow
def test_a_model_runs_from_disk_with_a_fraction_of_its_memory(tmp_path: Path) -> None:
    found = _run_from_disk(tmp_path, 50, 1024)
    assert found["size_mb"] > 200
    # The peak before is that of torch and of one layer, 4 MB, from which the checkpoint was written.
    assert found["peak_mb"] - found["before_mb"] < 40


@pytest.mark.soak
def test_two_gigabytes_run_in_600_megabytes(tmp_path: Path) -> None:
    found = _run_from_disk(tmp_path, 128, 2048)
    assert found["size_mb"] > 2048
    assert found["peak_mb"] < 600
