"""mixed_precision="fp8" through torchao, emulated on the CPU; tests/gpu runs the real kernels."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base import environ
from echelon.base.errors import ConfigError, MissingExtraError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.utils import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from echelon.utils.ao import has_ao_layers
from echelon.utils.dataclasses import FP8BackendType
from tests.harness import run_on_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    # first, in fp8, unsuitable sizes, in fp8, last
    sizes = [(8, 32), (32, 24), (24, 32), (32, 32), (32, 16)]
    return nn.Sequential(*[layer for ins, outs in sizes for layer in (nn.Linear(ins, outs), nn.Tanh())])


def _recipe(**options: object) -> AORecipeKwargs:
    from torchao.float8 import Float8LinearConfig  # type: ignore[import-untyped, unused-ignore]

    return AORecipeKwargs(config=Float8LinearConfig(emulate=True, pad_inner_dim=True), **options)  # type: ignore[arg-type]


def _fp8_layers(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]


def _data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(32, 8, generator=generator)
    return x, torch.tanh(x @ torch.linspace(-0.5, 0.5, 8 * 16).reshape(8, 16))


def _train() -> tuple[list[float], list[str], list[torch.Tensor], list[str]]:
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[_recipe()])
    model = _model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x, y = _data(accelerator.process_index)
    losses = []
    for _ in range(40):
        outputs = prepared(x)
        assert outputs.dtype == torch.float32
        loss = nn.functional.mse_loss(outputs, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (
        losses,
        list(accelerator.get_state_dict(prepared)),
        [p.detach() for p in model.parameters()],
        _fp8_layers(model),
    )


def test_two_ranks_learn_in_fp8_and_parameters_keep_their_names() -> None:
    first, second = run_on_ranks(_train, world_size=2)
    assert first[3] == ["6"]  # 8 x 32 is the first, 32 x 24 and 24 x 32 are unsuitable, 32 x 16 is the last
    for losses, names, _, _ in (first, second):
        assert losses[-1] < 0.5 * losses[0]
        assert names == list(_model().state_dict())
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)


def test_fp8_is_coarser_than_bf16_and_applies_to_the_selected_layers() -> None:
    (x, _), model = _data(0), _model()
    outputs = {}
    for precision, handlers in (("no", []), ("bf16", []), ("fp8", [_recipe()])):
        accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=handlers)
        prepared = accelerator.prepare(_model())
        with torch.no_grad():
            outputs[precision] = prepared(x)
    assert accelerator.mixed_precision == "fp8"
    assert accelerator.fp8_backend is FP8BackendType.AO
    assert accelerator.native_amp
    # e4m3 keeps 3 bits of the fraction, bf16 7.
    bf16, fp8 = ((outputs[name] - outputs["no"]).abs().max().item() for name in ("bf16", "fp8"))
    assert 0 < 2 * bf16 < fp8 < 0.2
    assert Accelerator(cpu=True).fp8_backend is FP8BackendType.NO
    own = _recipe(module_filter_func=lambda module, name: name in ("0", "8"))
    weights = list(model.parameters())
    Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[own]).prepare(model)
    assert _fp8_layers(model) == ["0", "8"]
    assert has_ao_layers(model)
    assert all(a is b for a, b in zip(weights, model.parameters()))  # existing optimizers keep the parameters


def test_unsupported_fp8_settings_raise_or_warn() -> None:
    with pytest.raises(ConfigError, match="on the device cpu: fp8 matrix products need an NVIDIA GPU") as raised:
        Accelerator(cpu=True, mixed_precision="fp8")
    assert "Float8LinearConfig(emulate=True)" in str(raised.value.do)
    with pytest.raises(ConfigError, match="contains an AORecipeKwargs, but mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[_recipe()])
    with environ.patch({"ACCELERATE_FP8_BACKEND": "TE"}), pytest.raises(ConfigError, match="fp8 with TE is not"):
        Accelerator(cpu=True, mixed_precision="fp8")
    for kind in (FP8RecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs):
        with pytest.raises(UsageError, match=f"{kind.__name__} is not supported") as refused:
            kind()
        assert "fp8 through torchao (AORecipeKwargs)" in str(refused.value.do)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[_recipe()])
    with pytest.warns(EchelonWarning, match="no layer of Sequential computes in fp8, so the model runs in bf16"):
        accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    everything = _recipe(module_filter_func=lambda module, name: True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[everything])
    with pytest.raises(UsageError, match="the model itself is a Linear"):
        accelerator.prepare(nn.Linear(16, 16))


def test_the_error_for_missing_torchao_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"mixed_precision='fp8' .* requires the package 'torchao'") as raised:
        Accelerator(cpu=True, mixed_precision="fp8")
    assert raised.value.do == 'pip install "torchao>=0.10"'
