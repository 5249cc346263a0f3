"""Activation checkpointing in one process: which blocks, what is refused, and compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.engines.activation_checkpointing import blocks_of, checkpoint_activations
from echelon.utils import TorchDynamoPlugin

MODES = ["full", "selective", "offload"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.layer(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, **_given: Any) -> torch.Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_only_the_outermost_blocks_are_found() -> None:
    model = Model()
    assert blocks_of(model, ("Inner", "Block"), where="here") == list(model.blocks)
    assert blocks_of(model, ("Inner",), where="here") == [block.inner for block in model.blocks]  # type: ignore[union-attr]
    names = [name for name, _ in model.named_parameters()]
    checkpoint_activations(model.blocks, "full", where="here")
    assert [name for name, _ in model.named_parameters()] == names


def _with(module: nn.Module) -> nn.Module:
    model = Model()
    model.blocks[1].inner = module
    return model


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        (Model(), {}, "Model does not name its blocks (_no_split_modules)"),
        (Model(), {"activation_checkpointing_blocks": "Layer"}, "Model has no module of class Layer"),
        (
            _with(nn.BatchNorm1d(8)),
            {"activation_checkpointing_blocks": ["Block"]},
            "inner in Block is a BatchNorm1d, which updates its state",
        ),
        (
            _with(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
            {"activation_checkpointing_blocks": ["Block"]},
            "in Block is a _SpectralNorm, which updates its state",
        ),
    ],
)
def test_what_cannot_be_recomputed_is_refused(model: nn.Module, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, activation_checkpointing="full", **settings).prepare(model)
    assert text in str(caught.value)
    assert "code Accelerator(activation_checkpointing=)" in str(caught.value)


def test_several_models_name_their_own_blocks() -> None:
    accelerator = Accelerator(cpu=True, activation_checkpointing="full", activation_checkpointing_blocks="Block")
    with pytest.raises(ConfigError, match=r"set model\._no_split_modules = \['Block'\] on each"):
        accelerator.prepare(Model(), nn.Sequential(nn.Linear(8, 8)))
    model, other, single = Model(), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    model._no_split_modules, other._no_split_modules = ["Block"], ["Linear"]  # type: ignore[assignment]
    Accelerator(cpu=True, activation_checkpointing="full").prepare(model, other, single)
    assert ["forward" in vars(m) for m in (model.blocks[0], other[0], single)] == [True, True, False]


def test_settings_that_contradict_each_other_are_refused() -> None:
    for blocks in (nn.Linear, [nn.Linear], []):
        with pytest.raises(ConfigError, match="is not a list of class names"):
            Accelerator(cpu=True, activation_checkpointing="full", activation_checkpointing_blocks=blocks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no effect, because activation_checkpointing is 'none'"):
        Accelerator(cpu=True, activation_checkpointing_blocks=["Block"]).prepare(Model())
    model: Any = Model()
    model.blocks[0].gradient_checkpointing = True
    accelerator = Accelerator(cpu=True, activation_checkpointing="full", activation_checkpointing_blocks="Block")
    with pytest.raises(ConfigError, match="Model already recomputes its blocks itself"):
        accelerator.prepare(model)
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, activation_checkpointing_offload=True)
    with pytest.warns(EchelonWarning, match="sharding settings have no effect on a single process"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, activation_checkpointing="full")
    with pytest.raises(ConfigError, match="the FSDP plugin's activation_checkpointing is set, too"):
        accelerator.prepare(Model())


class _Cache:
    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


def test_a_block_gets_no_empty_cache_and_refuses_a_full_one() -> None:
    given: list[Any] = []
    block = Block()
    block.register_forward_pre_hook(lambda *_: None)
    forward = block.forward

    def noted(x: torch.Tensor, **more: Any) -> torch.Tensor:
        given.append(more)
        return forward(x)

    block.forward = noted  # type: ignore[method-assign, assignment]
    checkpoint_activations([block], "full", where="here")
    x = torch.ones(1, 8, requires_grad=True)
    block(x, past_key_values=_Cache(0), use_cache=True)
    assert given == [{"past_key_values": None, "use_cache": False}]
    with pytest.raises(UsageError, match="Block got keys and values of earlier tokens"):
        block(x, past_key_values=_Cache(2))
    with torch.no_grad():
        cache = _Cache(2)
        block(x, past_key_values=cache)
    assert given[-1] == {"past_key_values": cache}  # generation keeps it


def test_a_run_without_it_does_not_change_the_model() -> None:
    model = Model()
    Accelerator(cpu=True).prepare(model)
    assert all("forward" not in vars(module) for module in model.blocks)


def _compiled_gradients(mode: str, *, by_regions: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=by_regions)
    blocks = None if mode == "none" else "Block"
    accelerator = Accelerator(
        cpu=True, dynamo_plugin=plugin, activation_checkpointing=mode, activation_checkpointing_blocks=blocks
    )
    original = Model()
    model = accelerator.prepare(original)
    accelerator.backward(model(torch.randn(3, 8, requires_grad=True)).square().sum())
    torch._dynamo.reset()
    return [p.grad for p in original.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("by_regions", [False, True])
def test_gradients_of_compiled_models_do_not_depend_on_the_mode(by_regions: bool) -> None:
    wanted = _compiled_gradients("none", by_regions=by_regions)
    assert len(wanted) == 4
    for mode in MODES:
        assert all(map(torch.equal, _compiled_gradients(mode, by_regions=by_regions), wanted)), mode
