"""A traced step predicts the memory, the gradients and the states of a real one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from echelon.engines.chunked_loss import chunk_loss
from echelon.plan.facts import StepSettings
from echelon.plan.sources import ModelChoice, ModelStep
from echelon.plan.trace import trace_step
from echelon.precision.policy import PrecisionPolicy


class Counter(TorchDispatchMode):
    """Counts the bytes of the storages that operators have made and that are alive, rounded up to 512 each."""

    def __init__(self, outside: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak: dict[str, int] = {}
        self.phase = "forward"
        self.known = {id(one.untyped_storage()) for one in outside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and id(one.untyped_storage()) not in self.known:
                storage = one.untyped_storage()
                size = (storage.nbytes() + 511) // 512 * 512
                self.known.add(id(storage))
                self.live += size
                weakref.finalize(storage, self.free, id(storage), size)
        self.peak[self.phase] = max(self.peak.get(self.phase, 0), self.live)
        return out

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def measured(model: nn.Module, optimizer: Any, compute_loss: Callable[..., Any], batch: Any) -> dict[str, int]:
    """Return the peak of each phase of a real second step, when the optimizer has its state."""
    compute_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    tensors = [one for one in batch.values() if isinstance(one, torch.Tensor)]
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    with Counter([*model.parameters(), *model.buffers(), *states, *tensors]) as counter:
        loss = compute_loss(model, batch)
        counter.phase = "backward"
        loss.backward()
        del loss
        counter.phase = "optimizer"
        optimizer.step()
    return counter.peak


def predicted(
    model: nn.Module, optimizer: Any, compute_loss: Callable[..., Any], batch: Any, settings: StepSettings
) -> dict[str, int]:
    _facts, trace = trace_step(model, optimizer, compute_loss, batch, settings, device="cpu")
    peaks: dict[str, int] = {}
    for one in trace.moments:
        live = one.activations + one.temporaries + one.gradients + one.weight_copies
        peaks[one.phase] = max(peaks.get(one.phase, 0), live)
    return peaks


class Net(nn.Module):
    """Two layers with a dropout, a tied head and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Linear(64, 200)
        self.outer = nn.Linear(200, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.outer(torch.nn.functional.gelu(self.inner(self.norm(hidden))))
        return self.head(torch.nn.functional.dropout(hidden, 0.1, self.training))


def net_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def net_batch() -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, 100, (8, 50)) for name in ("ids", "labels")}


@pytest.mark.parametrize("foreach", [True, False])
def test_each_phase_takes_the_memory_of_a_real_step(foreach: bool) -> None:
    model, batch = Net(), net_batch()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    expected = predicted(model, optimizer, net_loss, batch, StepSettings(micro_batch=8))
    assert measured(model, optimizer, net_loss, batch) == expected


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_a_loss_in_chunks_takes_the_memory_of_a_real_one(mixed_precision: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=2000, num_attention_heads=4
    )
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, 2000, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}

    def compute_loss(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        return loss

    settings = StepSettings(micro_batch=4, mixed_precision=mixed_precision)
    whole = predicted(model, optimizer, compute_loss, batch, settings)
    peaks = predicted(model, optimizer, compute_loss, batch, replace(settings, loss_chunk=32))
    chunk_loss(model, 32)
    PrecisionPolicy(mode=mixed_precision, device_type="cpu").wrap_forward(model)
    assert peaks == measured(model, optimizer, compute_loss, batch)
    assert max(peaks.values()) < max(whole.values()) - 2 * 4 * tokens.numel() * 2000  # two tensors like the logits


def test_parameters_units_and_states_are_those_of_the_model() -> None:
    model = Net()
    model._no_split_modules = ["Linear"]
    model.norm.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [model.inner.weight]}, {"params": [model.inner.bias]}], 0.1, momentum=0.9)
    facts, trace = trace_step(model, optimizer, net_loss, net_batch(), StepSettings(micro_batch=8))
    by_name = {one.name: one for one in facts.parameters}
    assert facts.units == ("inner", "outer")
    assert by_name["embed.weight"].other_names == ("head.weight",)
    assert by_name["embed.weight"].unit == ""
    assert not by_name["norm.weight"].is_trainable
    assert [one.shape for one in by_name["inner.weight"].state] == [(200, 64)]
    assert (by_name["inner.weight"].group, by_name["inner.bias"].group, by_name["outer.bias"].group) == (0, 1, None)
    # Products of 400 rows: the forward pass once; the backward pass for inputs and weights.
    assert trace.flops == {"": 3 * 2 * 400 * 64 * 100, "inner": 3 * 2 * 400 * 64 * 200, "outer": 3 * 2 * 400 * 64 * 200}


def test_the_model_and_the_random_numbers_are_left_alone() -> None:
    model, batch = Net(), net_batch()
    state, before = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    trace_step(model, optimizer, net_loss, batch, StepSettings(micro_batch=8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.scale = scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * self.outer(torch.nn.functional.gelu(self.inner(self.norm(hidden))))


class Deep(nn.Module):
    """Ten blocks that look equal; with ``odd``, they are not."""

    _no_split_modules = ("Block",)

    def __init__(self, *, odd: str = "") -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.blocks = nn.ModuleList(Block(2.0 if odd == "setting" and n % 2 else 1.0) for n in range(10))
        self.odd = odd

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, kept = self.embed(ids), []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            kept.append(hidden * 2)  # until the end of the forward pass, as a cache of keys
            if self.odd == "loop" and number % 2:
                hidden = hidden.exp()
        return self.head(hidden)


def _short_and_whole(model: nn.Module, settings: StepSettings, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    optimizer, batch = torch.optim.AdamW(model.parameters()), net_batch()
    short = trace_step(model, optimizer, net_loss, batch, settings)
    monkeypatch.setattr("echelon.plan.repeated_blocks._FEWEST", 99)
    return short, trace_step(model, optimizer, net_loss, batch, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["full", "offload", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("none", "selective"))]
)
def test_repeated_blocks_take_the_memory_of_traced_ones(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = StepSettings(8, "bf16", activation_checkpointing=mode)
    (facts, trace), (all_facts, whole) = _short_and_whole(Deep(), settings, monkeypatch)
    assert facts == all_facts
    assert len(facts.units) == 10
    num_steps = sum(one.phase != "optimizer" for one in whole.moments)
    assert len(trace.moments) < len(whole.moments)  # without the operators that make the optimizer's states
    assert trace.moments[:num_steps] == whole.moments[:num_steps]
    assert [trace.flops, trace.outputs] == [whole.flops, whole.outputs]
    peaks = [max(one.temporaries for one in t.moments if one.phase == "optimizer") for t in (trace, whole)]
    assert peaks[0] == peaks[1]
    if mode == "offload":
        assert max(one.offloaded for one in trace.moments) == 10 * 8 * 50 * 32 * 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_repeated_blocks_with_adapters(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    # The first block's input needs no gradient, and a block's input lives until the next block has run.
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 9, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=64, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    choice = ModelChoice(path=str(tmp_path), sequence=16, lora=2)
    settings = StepSettings(1, "bf16", activation_checkpointing=mode)
    trace = ModelStep(choice).trace(settings)
    monkeypatch.setattr("echelon.plan.repeated_blocks._FEWEST", 99)
    whole = ModelStep(choice).trace(settings)
    num_steps = sum(one.phase != "optimizer" for one in whole.moments)
    assert len(trace.moments) < len(whole.moments)  # blocks were left out
    assert trace.moments[:num_steps] == whole.moments[:num_steps]


def test_blocks_in_groups_of_their_own_stay_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep()
    ends = [*model.embed.parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW([{"params": ends}, *({"params": [*block.parameters()]} for block in model.blocks)])
    facts, _trace = trace_step(model, optimizer, net_loss, net_batch(), StepSettings(8))
    monkeypatch.setattr("echelon.plan.repeated_blocks._FEWEST", 99)
    assert facts == trace_step(model, optimizer, net_loss, net_batch(), StepSettings(8))[0]
    assert {p.group for p in facts.parameters} == {*range(11)}


def test_a_model_that_reaches_its_blocks_by_another_way_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep()
    model.again = [*model.blocks]
    (_, trace), (_, whole) = _short_and_whole(model, StepSettings(8), monkeypatch)
    assert trace.moments == whole.moments


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["setting", "loop"])
def test_blocks_that_differ_are_all_traced(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, trace), (_, whole) = _short_and_whole(Deep(odd=odd), StepSettings(8), monkeypatch)
    assert trace.moments == whole.moments
