"""Forward passes that return something else than a tensor: the numbers of a plain loop, whoever has to find the tensors.

The engine contract (``outputs_of_any_kind_train``) has every kind on every engine; here are the options of DDP, blocks of
FSDP, the models of transformers, and what mixed precision says of objects that it cannot look into.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.accelerator.plugins.kwargs_handlers import DistributedDataParallelKwargs, GradScalerKwargs
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.testing.model_outputs import OUTPUT_KINDS, PlainObject, Returning, items_of
from tests.harness import run_on_ranks
from tests.prepared_loop import share_of, train_prepared
from tests.reference import gaussian, mean_square, tanh_net, train_updates

_KINDS: dict[str, Callable[..., Any]] = {**OUTPUT_KINDS, "plain object": PlainObject}


class _Outer(nn.Module):
    """Reads the output of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.last = nn.Linear(3, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(items_of(self.block(x))["logits"])
        return out


def _model(make: Callable[..., Any], *, has_head: bool, is_block: bool) -> nn.Module:
    inner = tanh_net(4, 4, 3)
    model = Returning(inner, make, nn.Linear(4, 3) if has_head else None).double()
    return _Outer(model) if is_block else model


def _data() -> torch.Tensor:
    return gaussian(3, 4, 4)


def _loss(output: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else items_of(output)["logits"]
    return mean_square(logits)


def _plain(**shape: bool) -> dict[str, torch.Tensor]:
    model = _model(dict, **shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return train_updates(model, lambda x: _loss(model(x)), zip(_data()), optimizer).state


def _weights(kind: str, engine: str, options: dict[str, Any], shape: dict[str, bool]) -> Any:
    settings: dict[str, Any] = (
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **options)}
        if engine == "fsdp2"
        else {"kwargs_handlers": [DistributedDataParallelKwargs(**options)]}
    )
    accelerator = Accelerator(engine=engine, cpu=True, **settings)
    model: Any = _model(_KINDS[kind], **shape)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    train_prepared(accelerator, model, optimizer, map(share_of, _data()), loss_of=lambda x: _loss(model(x)))
    return accelerator.get_state_dict(model)


def _every_kind(engine: str, options: dict[str, Any], shape: dict[str, bool]) -> dict[str, Any]:
    return {kind: _weights(kind, engine, options, shape) for kind in _KINDS}


_BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Returning"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options", "shape"),
    [
        # No loss uses this head, so DDP has to find it in the output, even in a custom object.
        ("ddp", {"find_unused_parameters": True}, {"has_head": True, "is_block": False}),
        # DDP reduces the first update from a node that it hangs behind the tensors of the output.
        ("ddp", {"static_graph": True}, {"has_head": False, "is_block": False}),
        ("zero1", {"static_graph": True}, {"has_head": False, "is_block": False}),
        # The block is whole again in the backward pass because FSDP hangs on its output.
        ("fsdp2", {"reshard_after_forward": True, **_BLOCKS}, {"has_head": False, "is_block": True}),
    ],
    ids=["find_unused", "static_graph", "zero1-static_graph", "fsdp2-blocks"],
)
def test_tensors_are_found_in_outputs_of_every_kind(
    engine: str, options: dict[str, Any], shape: dict[str, bool]
) -> None:
    expected = _plain(**shape)
    of_ranks = run_on_ranks(_every_kind, engine, options, shape)
    for rank, found in enumerate(of_ranks):
        for kind, weights in found.items():
            if weights is None:  # sharded: rank zero has them
                assert rank > 0
                continue
            for name, value in weights.items():
                # float64, sums over two ranks in another order; a plain loop has no tolerance to spare for a lost reduction.
                assert (value - expected[name]).norm() <= 1e-12 * expected[name].norm(), (kind, rank, name)


class _Slots:
    __slots__ = ("logits",)

    def __init__(self, **items: Any) -> None:
        self.logits = items["logits"]


def _opaque() -> str:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model = accelerator.prepare(Returning(nn.Linear(4, 3), _Slots))
    with torch.no_grad():
        assert isinstance(model(torch.ones(2, 4)), _Slots)  # DDP does not search the output
    with pytest.raises(UsageError) as caught:
        model(torch.ones(2, 4))
    return str(caught.value)


def test_an_output_without_visible_tensors_is_rejected_with_ddp() -> None:
    for text in run_on_ranks(_opaque):
        assert "expected Returning's forward pass to return tensors" in text
        assert "found none in the _Slots" in text
        assert "static_graph=True" in text


# ---- mixed precision -------------------------------------------------------------------------------------------------


def _language_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **sizes)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **sizes
        )
        model = transformers.LlamaForCausalLM(config)
    return model


def _transformers(kind: str, precision: str, engine: str) -> tuple[list[float], str, str, bool]:
    handlers = [GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else []
    accelerator = Accelerator(engine=engine, cpu=True, mixed_precision=precision, kwargs_handlers=handlers)  # type: ignore[arg-type]
    model: Any = _language_model(kind).eval()  # without dropout
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(64).view(4, 16).remainder(32).chunk(accelerator.num_processes)[accelerator.process_index]
    losses = []
    for _ in range(3):
        outputs = model(input_ids=ids, labels=ids, use_cache=True)
        assert outputs.loss is outputs["loss"]
        assert outputs.logits.dtype == torch.float32
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(outputs.loss.detach(), "mean")))
    has_cache = type(outputs.past_key_values).__name__ == "DynamicCache"
    return losses, type(outputs).__name__, ", ".join(outputs), has_cache


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_models_train_in_every_precision(kind: str, precision: str) -> None:
    model = _language_model(kind).eval()
    ids = torch.arange(64).view(4, 16).remainder(32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = train_updates(model, lambda ids: model(input_ids=ids, labels=ids).loss, 3 * [[ids]], optimizer).losses
    assert expected[-1] < expected[0] - 0.01
    engines = [("single", 1), ("ddp", 2)] if precision == "fp16" else [("single", 1), ("ddp", 2), ("fsdp2", 2)]
    for engine, world_size in engines:
        for losses, name, items, has_cache in run_on_ranks(
            _transformers, kind, precision, engine, world_size=world_size
        ):
            # Products with 8 or 11 bits: the losses of the plain float32 loop to 1 %; float32 to rounding.
            assert losses == pytest.approx(expected, rel=1e-5 if precision == "no" else 1e-2)
            assert name.startswith("CausalLMOutputWith")
            assert items == "loss, logits, past_key_values"
            assert has_cache


def test_a_half_precision_attribute_of_an_output_warns_once() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model: Any = accelerator.prepare(Returning(nn.Linear(4, 3), PlainObject))
    with pytest.warns(EchelonWarning, match="returned a PlainObject. .* its tensors stay torch.bfloat16"):
        assert model(torch.ones(2, 4)).logits.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 4))


def test_outputs_without_half_precision_do_not_warn() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model: Any = accelerator.prepare(Returning(nn.Identity(), PlainObject))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(torch.ones(2, 4)).logits.dtype == torch.float32
