"""Loading weights from files with the sharded engine: correct values, and no rank needs memory for all of them."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from echelon import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model
from echelon.base.errors import CheckpointError, DesyncError, UsageError
from echelon.base.optional import is_available
from echelon.engines.fsdp.fsdp2 import FSDP2Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.utils import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading
from echelon.world.world import World
from tests.harness import ROOT, run_on_ranks

# ---- small models --------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        self.register_buffer("gain", torch.ones(7))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.layer(x)) * self.gain * self.table.sum()
        return out


class _Net(nn.Module):
    """An embedding tied to the output, of sizes that are not divisible by the number of ranks."""

    _no_split_modules = ("_Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, _Block):
            module.reset_parameters()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


_OPTIONS = {
    "stage 3": ShardingOptions(),
    "stage 2": ShardingOptions(reshard_after_forward=False),
    "hybrid": ShardingOptions(replicas=2),
    "offload": ShardingOptions(cpu_offload=True),
    "ignored": ShardingOptions(ignored=r"blocks\.0\.layer"),
    "efficient": ShardingOptions(ram_efficient_loading=True),
    "efficient ignored": ShardingOptions(ram_efficient_loading=True, ignored=r"blocks\.0\.layer"),
}


def _accelerator(kind: str) -> Accelerator:
    return Accelerator(engine=FSDP2Engine(World.current(), options=_OPTIONS[kind]))


def _net(seed: int) -> _Net:
    torch.manual_seed(seed)
    model = _Net()
    for number, block in enumerate(model.blocks):
        block.gain.fill_(number + 1.5)
    return model


def _save(folder: Path) -> dict[str, torch.Tensor]:
    """Write the network with seed 5 to two files and an index."""
    state = {name: value for name, value in _net(5).state_dict().items() if name != "head.weight"}
    halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
    for number, half in enumerate(halves):
        save_file(half, folder / f"{number}.safetensors")
    names = {name: f"{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return state


def _falls(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> list[float]:
    ids = torch.arange(22).reshape(2, 11) % 11
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _read_after_prepare(kind: str, folder: Path) -> tuple[Any, list[bool], list[float], str]:
    accelerator = _accelerator(kind)
    with torch.device("meta"):
        model: Any = _Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    refused = ""
    for use in (lambda: model(torch.zeros(1, 2, dtype=torch.int64)), lambda: accelerator.get_state_dict(model)):
        with pytest.raises(UsageError) as raised:
            use()
        refused += str(raised.value)
    load_checkpoint_in_model(model, folder)
    found = accelerator.get_state_dict(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    facts = [
        held == {id(p) for p in model.parameters()},
        model.head.weight is model.embed.weight,
        all(block.table.tolist() == [2, 2, 2] for block in model.blocks),
        isinstance(model.blocks[0].layer.weight, DTensor) == (kind != "ignored"),
    ]
    losses = _falls(accelerator, model, optimizer)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))  # stage 2 keeps gathered parameters
    load_checkpoint_in_model(model, folder)  # again, replacing trained values
    again = accelerator.get_state_dict(model)
    if found is not None:
        assert again is not None
        assert all(torch.equal(again[name], value) for name, value in found.items())
    return found, facts, losses, refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size"), [("stage 3", 2), ("stage 2", 2), ("offload", 2), ("ignored", 2), ("hybrid", 4)]
)
def test_files_are_read_into_the_shards_of_a_meta_model(tmp_path: Path, kind: str, world_size: int) -> None:
    expected = _save(tmp_path)
    (found, *_), *others = answers = run_on_ranks(_read_after_prepare, kind, tmp_path, world_size=world_size)
    assert set(found) == {*expected, "head.weight"}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(answer[0] is None for answer in others)
    for _, facts, losses, refused in answers:
        assert facts == [True] * 4
        assert losses[-1] < losses[0]
        assert refused.count("tensors have no values yet: embed.weight, blocks.0.layer.weight") == 2


def _values_of_rank_zero(kind: str) -> tuple[Any, list[bool]]:
    accelerator = _accelerator(kind)
    model: Any = _net(seed=dist.get_rank())
    model.register_buffer("same", model.blocks[0].gain)
    given = list(model.parameters())
    optimizer: Any = torch.optim.SGD(given, lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    gc.collect()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    facts = [
        all(parameter.numel() == 0 for parameter in given),  # freed, although the script still refers to them
        held == {id(p) for p in model.parameters()},
        isinstance(model.blocks[0].layer.weight, DTensor) == (kind == "efficient"),
        model.same is model.blocks[0].gain,
    ]
    return accelerator.get_state_dict(model), facts


@pytest.mark.parametrize("kind", ["efficient", "efficient ignored"])
def test_efficient_loading_uses_rank_zeros_values_and_frees_those_of_all_ranks(kind: str) -> None:
    expected = _net(seed=0).state_dict()
    (found, _), *_ = answers = run_on_ranks(_values_of_rank_zero, kind, world_size=2)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [facts for _, facts in answers] == [[True] * 4] * 2


def _one_rank_cannot_read(folder: Path) -> str:
    accelerator = _accelerator("stage 3")
    with torch.device("meta"):
        model: Any = accelerator.prepare(_Net())
    try:
        load_checkpoint_in_model(model, folder if dist.get_rank() == 0 else folder / "elsewhere")
    except (DesyncError, CheckpointError, UsageError) as error:
        return str(error)
    return "no error"


def test_a_rank_that_cannot_read_the_files_is_named_on_all_ranks(tmp_path: Path) -> None:
    _save(tmp_path)
    for text in run_on_ranks(_one_rank_cannot_read, tmp_path, world_size=2):
        assert re.search(
            r"load_checkpoint_in_model failed on some ranks\n +rank 1: CheckpointError: .* does not exist", text
        )


def _only_rank_zero_lacks() -> str:
    with torch.device("meta" if dist.get_rank() == 0 else "cpu"):
        model = _Net()
    with pytest.raises(UsageError) as raised:
        _accelerator("stage 3").prepare(model)
    return str(raised.value)


def test_values_that_only_another_rank_has_are_rejected() -> None:
    for text in run_on_ranks(_only_rank_zero_lacks, world_size=2):
        assert "on the meta device (9 tensors have no values), and rank 1 has values" in text


def _told() -> tuple[Any, ...]:
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    before = [os.environ.get(name) for name in names]
    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True))
    after = [os.environ.get(name) for name in names]
    plain, plugin = Accelerator(), FullyShardedDataParallelPlugin()
    untouched = plain.fsdp_plugin is None and not plugin.cpu_ram_efficient_loading
    enable_fsdp_ram_efficient_loading()  # set by the user, so it is a setting now
    asked = Accelerator().fsdp_plugin
    disable_fsdp_ram_efficient_loading()
    withdrawn = not FullyShardedDataParallelPlugin().cpu_ram_efficient_loading
    return before, after, untouched, asked is not None and asked.cpu_ram_efficient_loading, withdrawn


def test_efficient_loading_is_enabled_in_transformers_for_its_accelerator_only() -> None:
    assert run_on_ranks(_told, world_size=2) == [([None, None], ["true", "true"], True, True, True)] * 2


# ---- GPT-2 of transformers, in separate processes ------------------------------------------------------------------------

_MIB = 2**20
_NUM_RANKS = 2


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _gpt2(folder: str, store: str) -> None:
    """Load GPT-2 in both ways, and print the measurements as JSON."""
    warnings.simplefilter("ignore")
    from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_NUM_RANKS)
    if rank == 0:
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        GPT2LMHeadModel(
            GPT2Config(n_embd=512, n_layer=8, n_head=8, vocab_size=20000, n_positions=128, **tokens)
        ).save_pretrained(folder, max_shard_size="60MB")
    dist.barrier()
    files = sorted(Path(folder).glob("*.safetensors"))
    answer: dict[str, Any] = {"files": len(files), "model": sum(file.stat().st_size for file in files)}
    for way in ("from_pretrained", "load_checkpoint_in_model"):
        answer[way] = _loaded(way, folder, files, AutoConfig, GPT2LMHeadModel)
    print("ANSWER", json.dumps(answer), flush=True)
    dist.destroy_process_group()


def _loaded(way: str, folder: str, files: list[Path], config_class: Any, model_class: Any) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True))
    config = config_class.from_pretrained(folder)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    base = _memory("VmRSS")
    if way == "from_pretrained":
        model = model_class.from_pretrained(folder)
    else:
        with torch.device("meta"):
            model = model_class(config)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if way != "from_pretrained":
        load_checkpoint_in_model(model, folder)
    found: dict[str, Any] = {"peak": _memory("VmHWM") - base}
    state = accelerator.get_state_dict(model)
    found["has_state"] = state is not None
    ids = torch.arange(32).reshape(2, 16) * 7
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
    if state is not None:
        stored = {name: value for file in files for name, value in load_file(file).items()}
        found["equal"] = all(torch.equal(state[name], value) for name, value in stored.items())
        found["tied"] = sorted(state.keys() - stored.keys())
        fresh = model_class(config)
        fresh.load_state_dict(state)
        with torch.no_grad():
            found["logits"] = (fresh.eval()(ids).logits - logits).abs().max().item()
    model.train()
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found["losses"] = losses
    return found


@pytest.mark.soak  # 25 s on an idle machine
@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
def test_loading_gpt2_needs_a_fraction_of_its_size(tmp_path: Path) -> None:
    if not is_available("transformers"):
        pytest.skip("transformers is not installed: pip install -r requirements-dev.txt")
    command = "import sys; sys.path.insert(0, sys.argv[1]); from tests.ranks.accelerator.test_load_pretrained import _gpt2; _gpt2(*sys.argv[2:])"
    arguments = [sys.executable, "-c", command, str(ROOT), str(tmp_path / "gpt2"), str(tmp_path / "store")]
    place = {"WORLD_SIZE": _NUM_RANKS, "LOCAL_WORLD_SIZE": _NUM_RANKS, "OMP_NUM_THREADS": 1}
    # What was freed goes back to the system at once, so that one measurement does not hide in the memory of another.
    place |= {"MALLOC_MMAP_THRESHOLD_": 65536, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            arguments,
            env={**os.environ, **{k: str(v) for k, v in place.items()}, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(_NUM_RANKS)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(texts)
    answers = [json.loads(text.partition("ANSWER ")[2].partition("\n")[0]) for text in texts]
    print(answers)
    assert answers[0]["files"] > 1
    limit = answers[0]["model"] * (1 / _NUM_RANKS + 0.3)
    for way in ("from_pretrained", "load_checkpoint_in_model"):
        for rank, answer in enumerate(answers):
            found = answer[way]
            assert found["peak"] < limit, (way, rank, found["peak"] / _MIB, limit / _MIB)
            assert found["has_state"] == (rank == 0)
            assert found["losses"][-1] < found["losses"][0] - 0.1
        assert answers[0][way]["equal"]
        assert answers[0][way]["tied"] == ["lm_head.weight"]
        # The same numbers, but matrices of one rank: blocked alike, so float32 rounding at most.
        assert answers[0][way]["logits"] < 1e-5
