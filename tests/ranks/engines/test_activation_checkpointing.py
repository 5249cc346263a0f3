"""Activation checkpointing by blocks: what forward passes keep, and that the updates do not change."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.base.errors import ConfigError
from echelon.engines import activation_checkpointing
from echelon.utils import TorchTensorParallelConfig
from tests.harness import errors_on_ranks, run_on_ranks
from tests.parallel_models import ragged_batches, tiny_llama
from tests.prepared_loop import train_prepared, weights_of
from tests.reference import mean_square

pytestmark = pytest.mark.slow  # 20 s; a quick one of each promise is in tests/unit

B, S, H, LAYERS = 5, 7, 32, 3  # no dimension of a weight is B or B x S
MODES = ["none", "full", "selective", "offload"]
ENGINES = ["ddp", "zero1", "fsdp2", "tp"]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up = nn.Linear(H, 4 * H)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(H, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=1.0)
        return self.head(x) * 2  # type: ignore[no-any-return]


def accelerator_of(engine: str, mode: str, **settings: Any) -> Accelerator:
    if engine == "tp":
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        handler = TorchTensorParallelConfig(plan=plan)
        settings["parallelism_config"] = ParallelismConfig(tp_size=2, tp_handler=handler)
    else:
        settings["engine"] = engine
    if engine == "zero1" and mode != "none":
        settings["activation_checkpointing_blocks"] = ["Block"]  # other engines: those that the model names
    return Accelerator(cpu=True, activation_checkpointing=mode, **settings)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Kept:
    """Counts each storage of activations once, in bytes."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.held: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        tensor = _local(tensor).detach()
        if tensor.dim() and tensor.shape[0] in (B, B * S):
            self.held.append(tensor)  # so that its address is not used again
            self.bytes[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()

    @contextmanager
    def watch(self) -> Iterator[None]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.add(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def _kept_bytes(engine: str, mode: str) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps on the device and those that it moves to the CPU."""
    on_cpu = _Kept()

    class Counting(save_on_cpu):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            pack = self.pack_hook

            def counted(tensor: torch.Tensor) -> Any:
                on_cpu.add(tensor)
                return pack(tensor.clone())  # as if it left the device

            self.pack_hook = counted

    activation_checkpointing.save_on_cpu, before = Counting, activation_checkpointing.save_on_cpu  # type: ignore[attr-defined]
    try:
        accelerator = accelerator_of(engine, mode)
        torch.manual_seed(0)
        model = Model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        x = torch.randn(B, S, H)
        kept = _Kept()
        gc.collect()
        others = {id(one) for one in gc.get_objects()}
        with kept.watch():
            outputs = model(x)
        if mode == "selective":  # torch keeps these itself, not by hooks of autograd
            gc.collect()
            for one in gc.get_objects():
                if isinstance(one, torch.Tensor) and id(one) not in others and one is not outputs:
                    kept.add(one)
        accelerator.backward(outputs.sum())
    finally:
        activation_checkpointing.save_on_cpu = before  # type: ignore[attr-defined]
    return sum(kept.bytes.values()), sum(on_cpu.bytes.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_forward_pass_keeps_what_the_formula_says(engine: str, mode: str) -> None:
    parts = 2 if engine == "tp" else 1  # of the outputs of `up`
    x, inner, statistics = B * S * H * 4, 4 * B * S * H * 4 // parts, 2 * B * S * 4
    of_block = {
        "none": 2 * x + statistics + 2 * inner,  # inputs of norm, up, gelu and down
        "full": x,
        "selective": x + inner + x,  # its input, and the outputs of up and down
        "offload": 0,
    }[mode]
    for device, cpu in run_on_ranks(_kept_bytes, engine, mode, world_size=2):
        assert device == pytest.approx(LAYERS * of_block + 2 * x, rel=0.05)  # and the inputs of first and head
        assert cpu == (LAYERS * x if mode == "offload" else 0)


# ---- updates ---------------------------------------------------------------------------------------------------------


def _updates(engine: str, mode: str, settings: dict[str, Any]) -> list[torch.Tensor]:
    accelerator = accelerator_of(engine, mode, **settings)
    torch.manual_seed(0)
    model = Model(dropout=0.25)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [torch.randn(S, H, generator=torch.Generator().manual_seed(k)) for k in range(16)]
    loader: Any = DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(0 if engine == "tp" else dist.get_rank())
    train_prepared(accelerator, model, optimizer, loader)
    return [*weights_of(accelerator, model), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        *[(engine, {}) for engine in ENGINES],
        ("ddp", {"parity": "exact", "seed": 1, "gradient_accumulation_steps": 2}),
        ("ddp", {"parity": "bitwise", "seed": 1, "canonical_shards": 2}),
        ("fsdp2", {"parity": "bitwise", "seed": 1, "canonical_shards": 2}),
        ("fsdp2", {"mixed_precision": "bf16"}),
    ],
)
def test_updates_and_masks_are_those_without(engine: str, settings: dict[str, Any]) -> None:
    wanted = run_on_ranks(_updates, engine, "none", settings, world_size=2)
    for mode in MODES[1:]:
        found = run_on_ranks(_updates, engine, mode, settings, world_size=2)
        for rank in range(2):
            assert all(map(torch.equal, found[rank], wanted[rank])), mode


def _by_plugin(offloads: bool | None) -> list[torch.Tensor]:
    """Train with the plugin's settings; None: without."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, activation_checkpointing=offloads is not None, activation_checkpointing_offload=bool(offloads)
    )
    return _updates("fsdp2", "none", {"fsdp_plugin": plugin})


def test_the_plugin_of_accelerate_selects_the_same_modes() -> None:
    wanted = run_on_ranks(_by_plugin, None, world_size=2)[0]
    for offloads in (False, True):
        assert all(map(torch.equal, run_on_ranks(_by_plugin, offloads, world_size=2)[0], wanted))


def _llama_gradients(mode: str) -> list[torch.Tensor]:
    """Return the gradients of a model that names its blocks and has a cache of keys by default."""
    accelerator = accelerator_of("ddp", mode)
    model = tiny_llama()
    model.config.use_cache = True
    model = accelerator.prepare(model)
    accelerator.backward(model(**ragged_batches(1, batch_size=4)[0]).loss)
    return [p.grad for p in model.parameters()]


def test_blocks_of_transformers_are_found_and_get_no_cache() -> None:
    wanted = run_on_ranks(_llama_gradients, "none", world_size=2)
    for mode in MODES[1:]:
        found = run_on_ranks(_llama_gradients, mode, world_size=2)
        assert all(map(torch.equal, found[0], wanted[0])), mode


def _on_pipeline() -> None:
    accelerator = Accelerator(
        cpu=True, parity="exact", activation_checkpointing="full", parallelism_config=ParallelismConfig(pp_size=2)
    )
    accelerator.prepare_pipeline(tiny_llama(), loss_fn=lambda logits, _: logits.mean(), count_items=lambda _: 1.0)


def test_a_pipeline_is_referred_to_the_plugin() -> None:
    for text in errors_on_ranks(ConfigError, _on_pipeline, world_size=2, num_errors=2):
        assert "set activation_checkpointing=True in FullyShardedDataParallelPlugin" in text


def _llama_by_tensor_parallelism(mode: str) -> list[torch.Tensor]:
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(tp_size=2), activation_checkpointing=mode, seed=0
    )
    model = tiny_llama(num_layers=2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = [batch["input_ids"] for batch in ragged_batches(2)]
    train_prepared(accelerator, model, optimizer, inputs, loss_of=lambda ids: mean_square(model(ids).logits))
    return weights_of(accelerator, model)


def test_offloaded_inputs_may_come_from_a_collective_that_has_not_ended() -> None:
    """The embedding of a model that is split by columns ends with one."""
    wanted = run_on_ranks(_llama_by_tensor_parallelism, "none", world_size=2)[0]
    assert all(map(torch.equal, run_on_ranks(_llama_by_tensor_parallelism, "offload", world_size=2)[0], wanted))
