"""Files of weights read into models of one process: what fits, what does not, and what has no value in any file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from echelon import (
    Accelerator,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from echelon.base.errors import CheckpointError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.engines.fsdp.meta_device import release_pages


class Rotary(nn.Module):
    """A buffer that no file holds, as of rotary embeddings; ``frozen`` is computed in the constructor alone."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", self.values(), persistent=False)
        if frozen:
            self.register_buffer("frozen", torch.arange(4), persistent=False)

    @staticmethod
    def values() -> torch.Tensor:
        return 1.0 / 10 ** torch.arange(0, 1, 0.25)


class Net(nn.Module):
    base_model_prefix = "body"

    def __init__(self, *, initialises: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"embed": nn.Embedding(6, 4), "rotary": Rotary(frozen=frozen)})
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.body["embed"].weight
        self.register_buffer("count", torch.tensor(7))
        if initialises:
            self._init_weights = self._compute

    def _compute(self, module: nn.Module) -> None:
        """Initialise as models of transformers do, parameters too."""
        if isinstance(module, Rotary):
            module.table.copy_(Rotary.values())
        for parameter in module.parameters():
            nn.init.zeros_(parameter)


class Normed(nn.Module):
    """A module that initialises parameter and buffer in ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("offset", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        self.offset.fill_(5)


WEIGHTS = {"body.embed.weight": torch.arange(24.0).reshape(6, 4), "count": torch.tensor(3)}


def _folder(path: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    save_file(WEIGHTS if tensors is None else tensors, path / "model.safetensors")
    return path


def _on_meta(**options: Any) -> Net:
    with torch.device("meta"):
        return Net(**options)


def test_a_meta_model_gets_all_of_its_values(tmp_path: Path) -> None:
    model = _on_meta()
    assert load_checkpoint_and_dispatch(model, str(_folder(tmp_path))) is model
    assert torch.equal(model.body["embed"].weight, WEIGHTS["body.embed.weight"])
    assert model.head.weight is model.body["embed"].weight
    assert model.count == 3
    assert torch.equal(model.body["rotary"].table, Rotary.values())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_reset_parameters_computes_buffers_and_leaves_the_parameters_of_the_file(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Normed())
    load_checkpoint_in_model(model, _folder(tmp_path, {"0.scale": torch.tensor([1.0, 2, 3])}))
    assert model[0].scale.tolist() == [1, 2, 3]
    assert model[0].offset.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("options", "named"), [({"initialises": False}, "table"), ({"frozen": True}, "frozen")])
def test_the_error_for_a_buffer_without_values_names_it(tmp_path: Path, options: dict[str, bool], named: str) -> None:
    with pytest.raises(CheckpointError, match=rf"buffers body\.rotary\.{named} of Net") as raised:
        load_checkpoint_in_model(_on_meta(**options), _folder(tmp_path))
    assert "init_empty_weights" in str(raised.value.do)
    with init_empty_weights():
        model = Net(**options)
    load_checkpoint_in_model(model, tmp_path)
    assert torch.equal(model.body["rotary"].table, Rotary.values())


def test_empty_weights_have_buffers_and_stay_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    with init_empty_weights():
        model = Net()
    assert model.head.weight is model.body["embed"].weight
    assert model.head.weight.is_meta
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not nn.Linear(1, 1).weight.is_meta
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "1")
    with init_on_device(torch.device("meta")):
        assert all(buffer.is_meta for buffer in Net().buffers())


@pytest.mark.parametrize(
    "kind", ["index", "index file", "index of another name", "one file", "pickle", "a prefix less", "a prefix more"]
)
def test_every_layout_of_files_is_read(tmp_path: Path, kind: str) -> None:
    source = tmp_path
    if kind.startswith("index"):
        save_file({"count": WEIGHTS["count"]}, tmp_path / "a.safetensors")
        save_file({"body.embed.weight": WEIGHTS["body.embed.weight"]}, tmp_path / "b.safetensors")
        names = {"count": "a.safetensors", "body.embed.weight": "b.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        if kind == "index of another name":
            (tmp_path / "model.safetensors.index.json").rename(tmp_path / "weights.index.json")
        source = tmp_path / "model.safetensors.index.json" if kind == "index file" else tmp_path
    elif kind == "pickle":
        torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    else:
        wrapped = {f"module.{name}": value for name, value in WEIGHTS.items()}
        bare = {name.removeprefix("body."): value for name, value in WEIGHTS.items()}
        _folder(tmp_path, {"a prefix less": bare, "a prefix more": wrapped}.get(kind))
        source = tmp_path / "model.safetensors" if kind == "one file" else tmp_path
    model = Net()
    load_checkpoint_in_model(model, source)
    assert torch.equal(model.head.weight, WEIGHTS["body.embed.weight"])
    assert model.count == 3


def test_numbers_are_converted_to_the_models_dtype_or_the_given_one(tmp_path: Path) -> None:
    source = _folder(tmp_path, {**WEIGHTS, "body.embed.weight": WEIGHTS["body.embed.weight"].bfloat16()})
    for dtype in (None, "float64", torch.float16):
        model = _on_meta()
        load_checkpoint_in_model(model, source, dtype=dtype)
        assert model.head.weight.dtype == {None: torch.float32, "float64": torch.float64}.get(dtype, torch.float16)  # type: ignore[call-overload]
        assert model.head.weight.tolist() == WEIGHTS["body.embed.weight"].tolist()
        assert model.count.dtype == torch.int64


_WRONG = {
    "shape": (
        {"body.embed.weight": torch.ones(5, 4)},
        r"body.embed.weight is \[5, 4\] in the file and \[6, 4\] in the",
    ),
    "quantised": ({"body.embed.weight": torch.ones(6, 4, dtype=torch.int8)}, "is I8 in the file and torch.float32"),
    "float8": (
        {"body.embed.weight": torch.ones(6, 4).to(torch.float8_e4m3fn)},
        "is F8_E4M3 in the file and torch.float32",
    ),
    "missing": (
        {"count": torch.tensor(3)},
        "no values for body.embed.weight of the Net, which are on the meta device",
    ),
    "ties": ({**WEIGHTS, "head.weight": torch.ones(6, 4)}, "different values for head.weight and body.embed.weight"),
}


@pytest.mark.parametrize("kind", _WRONG)
def test_the_error_for_weights_of_another_model_names_them(tmp_path: Path, kind: str) -> None:
    tensors, text = _WRONG[kind]
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint_in_model(_on_meta(), _folder(tmp_path, tensors))


def test_a_model_with_values_is_loaded_partially_unless_strict(tmp_path: Path) -> None:
    source = _folder(tmp_path, {"count": torch.tensor(3), "extra": torch.ones(1)})
    model = Net()
    before = model.head.weight.clone()
    with pytest.warns(EchelonWarning, match=r"missing body.embed.weight; unexpected extra"):
        load_checkpoint_in_model(model, source)
    assert model.count == 3
    assert torch.equal(model.head.weight, before)
    with pytest.raises(CheckpointError, match=r"missing body.embed.weight; unexpected extra"):
        load_checkpoint_in_model(Net(), source, strict=True)
    load_checkpoint_in_model(Net(), _folder(tmp_path), strict=True)


def test_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    def error(path: Path) -> str:
        with pytest.raises(CheckpointError) as raised:
            load_checkpoint_in_model(Net(), path)
        return str(raised.value)

    assert "contains neither model.safetensors nor" in error(tmp_path)
    assert "Hugging Face Hub names are not supported" in error(tmp_path / "gpt2")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    assert f"{index} is not a weight index" in error(tmp_path)
    index.write_text(json.dumps({"weight_map": {"count": "lost.safetensors"}}))
    assert re.search(r"the index names .*lost.safetensors, which does not exist", error(tmp_path))
    (tmp_path / "lost.safetensors").write_bytes(b"\x01" * 64)
    assert re.search(r"lost.safetensors cannot be read", error(tmp_path))


@pytest.mark.parametrize("argument", ["max_memory", "offload_folder", "offload_buffers", "broadcast_from_rank0"])
def test_unsupported_arguments_are_refused(tmp_path: Path, argument: str) -> None:
    with pytest.raises(UsageError, match=f"does not support {argument}"):
        load_checkpoint_and_dispatch(Net(), tmp_path, **{argument: "auto"})


def test_prepare_rejects_a_model_without_values_but_accepts_it_after_loading(tmp_path: Path) -> None:
    model = _on_meta()
    with pytest.raises(UsageError, match="Net is on the meta device and has no values") as raised:
        Accelerator(cpu=True).prepare(model)
    assert "load_checkpoint_in_model(model, folder) before prepare()" in str(raised.value.do)
    load_checkpoint_in_model(model, _folder(tmp_path))
    assert Accelerator(cpu=True).prepare(model).count == 3


def test_released_pages_keep_modified_values(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(2**18))
    tensor = torch.from_file(str(path), shared=False, size=2**16)
    tensor[::100] = 3.0
    expected = tensor.tolist()
    release_pages(tensor)
    release_pages(torch.empty(0))
    assert tensor.tolist() == expected
