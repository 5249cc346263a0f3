"""Weights of a sharded model in files: from_pretrained reads the same values, and no rank has the whole model in memory."""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.accelerator.models import save_sharded
from echelon.base.errors import CheckpointError, DesyncError, EchelonError
from echelon.base.optional import is_available
from echelon.checkpoint import object_store, storage
from echelon.checkpoint.tensor_file import write_file
from echelon.engines.base import ShardedTensor
from tests import object_server
from tests.harness import errors_on_ranks, import_ahead, run_on_ranks, shut_down
from tests.parallel_models import tiny_llama

import_ahead("transformers.models.llama.modeling_llama", "torch.distributed.pipelining")


def _exported(folder: str, sizes: dict[str, int], max_shard_size: int) -> None:
    config: dict[str, Any] = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
    if not sizes:
        config["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, **config)
    model = tiny_llama(num_layers=4, tied=True)
    if "pp_size" in sizes:
        optimizer = SGD(model.parameters(), lr=0.1)
        accelerator.prepare_pipeline(model, num_micro_batches=2)
        accelerator.prepare(optimizer)
    else:
        model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    accelerator.save_model(model, folder, max_shard_size=max_shard_size)


@pytest.mark.parametrize(
    ("sizes", "max_shard_size"),
    [
        ({"dp_shard_size": 2}, 20_000),
        ({"dp_shard_size": 2}, 10_000_000),
        pytest.param({"dp_shard_size": 3}, 20_000, marks=pytest.mark.slow),
        pytest.param({"dp_shard_size": 2, "tp_size": 2}, 20_000, marks=pytest.mark.slow),
        pytest.param({"dp_replicate_size": 2, "dp_shard_size": 2}, 20_000, marks=pytest.mark.slow),
        pytest.param({"pp_size": 2}, 20_000, marks=pytest.mark.slow),
        pytest.param({"pp_size": 2, "dp_shard_size": 2}, 20_000, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_from_pretrained_reads_the_weights(sizes: dict[str, int], max_shard_size: int, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    original = tiny_llama(num_layers=4, tied=True)
    original.config.save_pretrained(tmp_path)
    run_on_ranks(_exported, str(tmp_path), sizes, max_shard_size, world_size=math.prod(sizes.values()))
    read: Any = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    state = original.state_dict()
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
    files = sorted(tmp_path.glob("model*.safetensors"))
    stored = [name for file in files for name in load_file(file)]
    assert sorted(stored) == sorted(state.keys() - {"lm_head.weight"})  # each once, the tied one too
    assert len(files) == 1 if max_shard_size > 20_000 else len(files) > 3
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in state.items() if n != "lm_head.weight")
        assert all(index["weight_map"][name] == file.name for file in files for name in load_file(file))
        assert all(sum(t.nbytes for t in load_file(file).values()) <= max_shard_size for file in files)


class _Net(nn.Module):
    """Layers of 4 kB, and a buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(16))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _prepared() -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = _Net()
    model.count.fill_(dist.get_rank())
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    return accelerator, model


def _measured(folder: str, part_bytes: int) -> tuple[int, list[str], list[int]]:
    """Return the most bytes of gathered tensors on this rank at a time, the files it wrote, and its order of gathers."""
    accelerator, model = _prepared()
    engine = accelerator.session.engine
    alive: dict[int, int] = {}
    most, written, writers = 0, [], []

    def counted(gather: Any, writer: int) -> Any:
        nonlocal most
        full = gather(writer)
        writers.append(writer)
        if full is not None:
            alive[id(full)] = full.nbytes
            weakref.finalize(full, alive.pop, id(full))
            most = max(most, sum(alive.values()))
        return full

    def state(of: Any) -> Any:
        found = type(engine).sharded_state(engine, of)
        for name, tensor in found.tensors.items():
            gather = tensor.gather
            found.tensors[name] = ShardedTensor(
                dtype=tensor.dtype,
                shape=tensor.shape,
                is_sharded=tensor.is_sharded,
                gather=lambda writer, gather=gather: counted(gather, writer),
            )
        return found

    def write(path: Path, contents: Any) -> Any:
        written.append(path.name)
        return write_file(path, contents)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "sharded_state", state)
        patch.setattr(save_sharded, "write_file", write)
        accelerator.save_model(model, folder, max_shard_size=part_bytes)
    return most, written, writers


@pytest.fixture(scope="module")
def runtime_of_obstore() -> None:
    """Start the threads of obstore, which live as long as the process, before a test's resources are counted."""
    pytest.importorskip("obstore")
    object_store.exists(object_store.ObjectPath("memory://", "none"))


@pytest.mark.slow
@pytest.mark.usefixtures("runtime_of_obstore")
def test_the_ranks_upload_the_weights_to_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    original = tiny_llama(num_layers=4, tied=True)
    state = original.state_dict()
    with object_server.serving() as server:
        for name, value in (*object_server.VARIABLES.items(), ("AWS_ENDPOINT_URL", server)):
            monkeypatch.setenv(name, value)
        for sizes in ({"dp_shard_size": 2}, {"pp_size": 2}):
            (key,) = sizes
            place = object_store.ObjectPath("s3://bucket", key)
            for max_shard_size in (10_000_000, 20_000):  # the index must not stand beside the one file of before
                run_on_ranks(_exported, str(place), sizes, max_shard_size, world_size=2)
            object_store.download(place, tmp_path / key)
            assert not (tmp_path / key / "model.safetensors").exists()
            original.config.save_pretrained(tmp_path / key)
            read: Any = LlamaForCausalLM.from_pretrained(tmp_path / key, dtype=torch.float64)
            assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())


def test_each_rank_writes_files_and_holds_no_more_than_one_part(tmp_path: Path) -> None:
    part_bytes = 3 * 4096
    found = run_on_ranks(_measured, str(tmp_path), part_bytes)
    assert all(0 < most <= part_bytes for most, _, _ in found)
    files = [{*names} for _, names, _ in found]
    assert all(len(names) >= 2 for names in files)
    assert not files[0] & files[1]
    assert found[0][2] == found[1][2]  # the ranks gather in one order
    assert found[0][2][:4] == [0, 1, 0, 1]  # in turns, so that both write
    read = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    wanted = _Net().state_dict()  # with the buffer of rank zero
    assert read.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in read.items())


def _cast(folder: str) -> None:
    accelerator, model = _prepared()
    accelerator.save_model(model, folder, save_dtype="bfloat16", max_shard_size=8192)
    with torch.no_grad():
        model.layers[3].weight.mul_(1e9)
    accelerator.save_model(model, folder + "/none", save_dtype=torch.float16, max_shard_size=8192)


def test_the_dtype_is_chosen_and_must_hold_the_values(tmp_path: Path) -> None:
    for error in errors_on_ranks(EchelonError, _cast, str(tmp_path), num_errors=2):
        assert "layers.3.weight has values up to" in error
    read = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    for name, value in _Net().state_dict().items():
        assert torch.equal(read[name], value.bfloat16()), name
    assert list((tmp_path / "none").iterdir()) == []


def _fills(folder: str) -> list[str]:
    accelerator, model = _prepared()
    accelerator.save_model(model, folder)
    with torch.no_grad():
        model.layers[0].weight.zero_()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(storage, "write", full)
        with pytest.raises((DesyncError, CheckpointError, OSError), match="No space left"):
            accelerator.save_model(model, folder, max_shard_size=8192)
    accelerator.wait_for_everyone()
    return sorted(os.listdir(folder))


def test_a_full_disk_of_one_rank_is_told_on_all_and_keeps_the_earlier_files(tmp_path: Path) -> None:
    assert run_on_ranks(_fills, str(tmp_path)) == [["model.safetensors"]] * 2
    assert torch.equal(load_file(tmp_path / "model.safetensors")["layers.0.weight"], _Net().layers[0].weight)


def _zero3(folder: str) -> None:
    from echelon.utils import DeepSpeedPlugin

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = _Net()
    model.layers[1].requires_grad_(False)
    model, _ = accelerator.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    accelerator.save_model(model, folder, max_shard_size=3 * 4096)


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.skipif(not is_available("deepspeed"), reason="DeepSpeed is not installed")
def test_zero3_writes_the_same_files(tmp_path: Path) -> None:
    shut_down()  # DeepSpeed keeps state in module variables
    run_on_ranks(_zero3, str(tmp_path))
    shut_down()
    read = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert read.keys() == _Net().state_dict().keys()
    assert all(torch.equal(value, _Net().state_dict()[name]) for name, value in read.items())
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
