"""Weights in a folder: written and read bit by bit, checksummed, mapped, and folders that accelerate wrote."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.base.errors import CheckpointError, UsageError
from echelon.big_models import offload_store
from echelon.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2] + [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _state() -> dict[str, torch.Tensor]:
    """Tensors of all dtypes and of unusual shapes; odd sizes, so that files would be misaligned in this order."""
    numbers = torch.arange(15).reshape(3, 5) % 2
    state = {f"of.{str(dtype).removeprefix('torch.')}": numbers.to(dtype) for dtype in DTYPES}
    whole = torch.randn(6, 4)
    return {
        **state,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": whole.T,
        "part": whole[1:3, ::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().resolve_conj().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape, _bits(found)) == (expected.dtype, expected.shape, _bits(expected))


def test_a_state_dict_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    state = _state()
    offload_state_dict(tmp_path, state)
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(weights) == list(json.loads((tmp_path / "index.json").read_text()))
    assert set(weights) == set(state)
    assert len(weights) == len(state)
    for name, tensor in state.items():
        _assert_same(weights[name], tensor)
    assert sorted(os.listdir(tmp_path)) == ["index.json", "weights-00001.safetensors"]
    # Any reader of safetensors reads the file.
    _assert_same(load_file(tmp_path / "weights-00001.safetensors")["of.bfloat16"], state["of.bfloat16"])
    with pytest.raises(KeyError):
        weights["nothing"]


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    offload_state_dict(tmp_path, {"embed": weight, "head": weight, "view": weight[:2]})
    assert (tmp_path / "weights-00001.safetensors").stat().st_size < 2 * 4 * 12 + 800
    assert list(load_file(tmp_path / "weights-00001.safetensors")) == ["embed", "view"]
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    _assert_same(weights["head"], weight)
    # peft looks up each name under itself.
    entry = {**weights.index["head"], "weight_name": "head"}
    _assert_same(OffloadedWeightsLoader(index={"head": entry})["head"], weight)


def test_large_state_dicts_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_store, "SHARD_BYTES", 100)
    state = {str(i): torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    offload_state_dict(tmp_path, state)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"weights-0000{i}.safetensors" for i in (1, 2, 3)
    ]
    for name, tensor in OffloadedWeightsLoader(save_folder=tmp_path).items():
        _assert_same(tensor, state[name])


def test_new_weights_replace_old_ones_and_keep_others(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(2)})
    offload_state_dict(tmp_path, {"b": torch.ones(2)})
    in_use = OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    offload_state_dict(tmp_path, {"a": torch.full((3,), 7.0)})
    assert in_use.tolist() == [0, 0]  # its file was replaced, not overwritten
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert (weights["a"].tolist(), weights["b"].tolist()) == ([7, 7, 7], [1, 1])
    assert len(os.listdir(tmp_path)) == 3


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="w cannot be offloaded, because they are on the meta device"):
        offload_state_dict(tmp_path, {"w": torch.empty(2, device="meta")})
    assert os.listdir(tmp_path) == []


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "here", {"a": torch.ones(2)})
    (tmp_path / "here").rename(tmp_path / "there")
    assert OffloadedWeightsLoader(save_folder=tmp_path / "there")["a"].tolist() == [1, 1]


def test_single_weights_are_written_and_found_by_the_names_that_callers_build(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in _state().items() if name != "empty"}
    index: dict[str, Any] = {}
    for name, tensor in state.items():
        assert offload_weight(tensor, name, tmp_path, index) is index
    assert offload_weight(torch.ones(1), "x/y", str(tmp_path)) is None
    save_offload_index(index, tmp_path)
    save_offload_index({}, tmp_path / "nowhere")
    save_offload_index(None, tmp_path / "nowhere")
    for source in (OffloadedWeightsLoader(save_folder=tmp_path), OffloadedWeightsLoader(index=index)):
        for name, tensor in state.items():
            _assert_same(source[name], tensor)
    _assert_same(load_offloaded_weight(tmp_path / "of.int8.dat", index["of.int8"]), state["of.int8"])
    assert load_offloaded_weight(os.fspath(tmp_path / "scalar.safetensors"), index["scalar"]).item() == 3.5


def test_a_mapped_weight_can_be_written_without_changing_the_file(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(3)})
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    weights["a"].add_(1)
    assert weights["a"].tolist() == [1, 1, 1]


def test_pages_are_released_with_the_tensor(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(2**16)})
    mapped = "weights-00001.safetensors"
    tensor = OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    view = tensor.reshape(256, 256)[3]
    del tensor
    assert mapped in Path("/proc/self/maps").read_text()
    assert view.sum() == 256
    del view
    assert mapped not in Path("/proc/self/maps").read_text()


def test_damage_is_found_when_a_weight_is_read_first(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(3), "b": torch.zeros(3)})
    path = tmp_path / "weights-00001.safetensors"
    intact = path.read_bytes()
    flipped = bytearray(intact)
    flipped[-1] ^= 1  # the last byte of b
    path.write_bytes(flipped)
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert weights["a"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"b in .* is corrupted") as raised:
        weights["b"]
    assert "offload the weights again" in str(raised.value.do)
    path.write_bytes(intact[:-1])
    with pytest.raises(CheckpointError, match=r"is not a safetensors file: .*file not fully covered"):
        weights["a"]
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: .*No such file"):
        weights["a"]


def test_an_interrupted_write_leaves_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(3)})

    def fail(_: torch.Tensor) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(offload_store, "checksum", fail)
    with pytest.raises(OSError, match="disk full"):
        offload_state_dict(tmp_path, {"a": torch.zeros(3)})
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["index.json", "weights-00001.safetensors"]
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}'])
def test_a_wrong_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json is not an index of offloaded weights"):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_folders_of_accelerate_are_read(tmp_path: Path) -> None:
    """Its format: the plain bytes of each tensor; a bfloat16 is written as int16, an fp8 number as int8."""
    tensors = {
        "w": torch.randn(3, 2),
        "half": torch.randn(2).bfloat16(),
        "small": torch.randn(4).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(5),
    }
    index = {}
    for name, tensor in tensors.items():
        (tmp_path / f"{name}.dat").write_bytes(_bits(tensor))
        index[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    (tmp_path / "index.json").write_text(json.dumps(index))
    for name, tensor in OffloadedWeightsLoader(save_folder=tmp_path).items():
        _assert_same(tensor, tensors[name])
    (tmp_path / "w.dat").write_bytes(b"123")
    with pytest.raises(
        CheckpointError, match=r"expected 24 bytes in .*w.dat for a torch.float32 of shape \[3, 2\], but got 3"
    ):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])
    with pytest.raises(CheckpointError, match="unknown dtype: 'float99'"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float99", "shape": [3]})


def test_entries_may_name_files_of_other_libraries(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    save_file({"inner.w": weight}, tmp_path / "model.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "model.safetensors")  # as in the cache of the Hub
    entry = {"safetensors_file": str(tmp_path / "link.safetensors"), "weight_name": "inner.w", "dtype": "float16"}
    weights = OffloadedWeightsLoader(index={"w": entry, "inner.w": {"safetensors_file": entry["safetensors_file"]}})
    _assert_same(weights["w"], weight.half())
    _assert_same(weights["inner.w"], weight)


def test_tensors_that_are_not_aligned_are_copied(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\x01" + np.array([1.5, -2], "<f4").tobytes())
    assert OffloadedWeightsLoader(index={"b": {"safetensors_file": str(path)}})["b"].tolist() == [1.5, -2]


def test_weights_in_memory_take_precedence(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)})
    kept = torch.zeros(1)
    weights = OffloadedWeightsLoader({"b": kept, "c": kept}, tmp_path, device="cpu")
    assert list(weights) == ["b", "c", "a"]
    assert weights["b"] is kept
    assert weights["a"].item() == 1
    with pytest.raises(UsageError, match=r"OffloadedWeightsLoader\(\) has no weights"):
        OffloadedWeightsLoader()


def test_a_prefix_is_added_to_names() -> None:
    view = PrefixedDataset({"a.x": 1, "a.y": 2, "b": 3}, "a.")
    assert (view["x"], list(view), len(view), "y" in view) == (1, ["a.x", "a.y"], 3, True)


def test_the_parts_of_modules_are_selected_by_name() -> None:
    state = {name: torch.empty(0) for name in ("h.1.w", "h.10.w", "h.1", "w")}
    assert list(extract_submodules_state_dict(state, ["h.1", "w"])) == ["h.1.w", "h.1", "w"]
    assert extract_submodules_state_dict(state, [""]) == state


def test_weights_of_an_index_are_put_into_a_model(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 1)
    index: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        offload_weight(tensor, name, tmp_path, index)
    load_offloaded_weights(empty, index, tmp_path)
    load_offloaded_weights(empty, None, tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    _assert_same(empty.weight.detach(), model.weight.detach())
