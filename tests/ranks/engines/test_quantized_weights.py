"""Quantized weights (bitsandbytes, torchao) under trained adapters: never cast, averaged or changed, on any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from echelon import Accelerator
from echelon.base.warnings import EchelonWarning
from echelon.engines.quantized_weights import flat_state
from tests.harness import run_on_ranks

pytest.importorskip("bitsandbytes")

# torch sums the gradients of two halves of a batch in another order than those of the whole batch.
TOLERANCE = 1e-6


class Adapted(nn.Module):
    """A frozen quantized layer and a trained adapter, as peft's LoRA layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(32, 4, bias=False)
        self.lora_B = nn.Linear(4, 32, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base_layer(x) + self.lora_B(self.lora_A(x)))


def _quantized(kind: str, storage: torch.dtype = torch.uint8) -> nn.Module:
    import bitsandbytes as bnb

    linear = nn.Linear(32, 32, bias=False)
    linear.weight.requires_grad_(False)
    if kind == "int8 of torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        whole = nn.Sequential(linear)
        quantize_(whole, Int8WeightOnlyConfig())
        return whole[0]
    made: Any
    if kind == "8 bits":
        made = bnb.nn.Linear8bitLt(32, 32, bias=False, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(linear.weight.data, has_fp16_weights=False, requires_grad=False)
    else:
        made = bnb.nn.Linear4bit(
            32, 32, bias=False, quant_type="nf4", compute_dtype=torch.float32, quant_storage=storage
        )
        made.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", quant_storage=storage, module=made
        )
    return made.to("cpu")  # type: ignore[no-any-return] # quantizes


def _model(kind: str, seed: int = 0, storage: torch.dtype = torch.uint8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(_quantized(kind, storage)) for _ in range(2)))


def _codes(model: nn.Module) -> list[torch.Tensor]:
    """Return the bytes of all frozen tensors, and those of quantized weights' scales."""
    from echelon.engines.state_dicts import plain_state_dict

    state = flat_state(plain_state_dict(model))
    frozen = [value for name, value in sorted(state.items()) if "lora" not in name and isinstance(value, torch.Tensor)]
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in frozen]
    return [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone() for value in whole]


def _batch(step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(step))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(
    model: nn.Module, optimizer: Any, *, first: int, last: int, rank: int = 0, world_size: int = 1, backward: Any = None
) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = F.mse_loss(model(_batch(step).chunk(world_size)[rank]), torch.ones(()).expand(8 // world_size, 32))
        loss.backward() if backward is None else backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _mean(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.tolist()


def _prepared(kind: str, engine: str, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(engine=engine, cpu=True)
    model = _model(kind, **options)
    return accelerator, *accelerator.prepare(model, _optimizer(model))


def _losses_on_ranks(kind: str, engine: str, folder: str) -> list[float]:
    before = _codes(_model(kind))
    accelerator, model, optimizer = _prepared(kind, engine)
    at = {"rank": accelerator.process_index, "world_size": accelerator.num_processes, "backward": accelerator.backward}
    losses = _train(model, optimizer, first=0, last=3, **at)
    accelerator.save_state(folder)
    losses += _train(model, optimizer, first=3, last=6, **at)
    assert all(map(torch.equal, _codes(accelerator.unwrap_model(model)), before))
    accelerator.load_state(folder)
    again = _train(model, optimizer, first=3, last=6, **at)
    assert again == losses[3:]
    return _mean(losses)


def _resumed(kind: str, engine: str, folder: str) -> list[float]:
    accelerator, model, optimizer = _prepared(kind, engine, seed=1)  # other codes, scales and adapters
    accelerator.load_state(folder)
    assert all(map(torch.equal, _codes(accelerator.unwrap_model(model)), _codes(_model(kind))))
    at = {"rank": accelerator.process_index, "world_size": accelerator.num_processes, "backward": accelerator.backward}
    return _mean(_train(model, optimizer, first=3, last=6, **at))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "int8 of torchao"])
def test_two_ranks_train_adapters_as_one_process_does(kind: str, tmp_path: Path) -> None:
    """Also after a checkpoint is loaded on another engine, into a model with other base weights."""
    model = _model(kind)
    expected = _train(model, _optimizer(model), first=0, last=6)
    for engine, other in (("ddp", "fsdp2"), ("fsdp2", "zero1")):
        folder = str(tmp_path / engine)
        for losses in run_on_ranks(_losses_on_ranks, kind, engine, folder):
            assert losses == pytest.approx(expected, abs=TOLERANCE)
        assert run_on_ranks(_resumed, kind, other, folder)[0] == pytest.approx(expected[3:], abs=TOLERANCE)
        assert run_on_ranks(_resumed, kind, "ddp", folder, world_size=1)[0] == pytest.approx(
            expected[3:], abs=TOLERANCE
        )


def _low_precision_outputs(storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, list[str], bool]:
    import warnings

    from echelon import FullyShardedDataParallelPlugin

    accelerator = Accelerator(
        mixed_precision="bf16", cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)
    )
    model = _model("4 bits", storage=storage)
    alone = _model("4 bits", storage=storage)
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(_batch(0)).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EchelonWarning)
        model, _ = accelerator.prepare(model, _optimizer(model))
    is_sharded = any("base_layer" in name and hasattr(p, "full_tensor") for name, p in model.named_parameters())
    return model(_batch(0)).detach().float(), expected.detach(), [str(one.message) for one in caught], is_sharded


@pytest.mark.parametrize(
    ("storage", "is_sharded"),
    [(torch.float16, False), (torch.float32, False), (torch.bfloat16, True), (torch.uint8, True)],
)
def test_codes_that_fsdp2_would_cast_stay_whole(storage: torch.dtype, is_sharded: bool) -> None:
    """Codes stored as float16 would be cast to bfloat16: other bytes of the same size, so that the layer computes other values."""
    results = run_on_ranks(_low_precision_outputs, storage)
    for outputs, expected, _, sharded in results:
        # bfloat16 has 8 bits, and the values are at most 1.
        assert torch.allclose(outputs, expected, atol=2**-6)
        assert sharded is is_sharded
    assert any("bnb_4bit_quant_storage" in message for message in results[0][2]) is not is_sharded
