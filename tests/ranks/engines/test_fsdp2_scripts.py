"""Scripts written for one device on sharded models: correct results, or an error with an alternative."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import train_prepared
from tests.reference import gaussian, mean_square, train_updates


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))  # a scalar

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.layer(x)) * self.scale
        return out


def _model() -> _Scaled:
    torch.manual_seed(0)
    return _Scaled().double()


def _batches(world_size: int) -> torch.Tensor:
    """Of all ranks: [steps, ranks, samples, features]."""
    return gaussian(4, world_size, 5, 4)


def _trained(max_norm: float) -> tuple[dict[str, torch.Tensor] | None, list[float]]:
    accelerator = Accelerator(engine="fsdp2")
    bare = _model()
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.1))
    mine = _batches(dist.get_world_size())[:, dist.get_rank()]
    norms = train_prepared(accelerator, model, optimizer, mine, max_norm=max_norm)
    return accelerator.get_state_dict(model), norms


def test_scalar_parameters_train() -> None:
    """Against plain PyTorch: float64, AdamW: 1e-9."""
    model = _model()
    plain = train_updates(
        model,
        lambda x: mean_square(model(x)),
        _batches(2),
        torch.optim.AdamW(model.parameters(), lr=0.1),
        clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    )
    (whole, norms), *_ = run_on_ranks(_trained, 0.1, world_size=2)
    assert norms == pytest.approx(plain.norms, rel=1e-9)
    torch.testing.assert_close(whole, plain.state, rtol=1e-9, atol=1e-9)


# ---- numbers -------------------------------------------------------------------------------------------------------------


def _numbers() -> tuple[list[tuple[str, str]], list[float]]:
    accelerator = Accelerator(engine="fsdp2")
    bare = _model()
    model = accelerator.prepare(bare)
    accelerator.backward(mean_square(model(torch.ones(2, 4, dtype=torch.float64))))
    gradient = bare.layer.weight.grad
    assert gradient is not None
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found.append(gradient.norm().item())  # LINE
            float(gradient.abs().max())  # LINE
            bool(gradient.isnan().any())  # LINE
        found.append(gradient.norm().full_tensor().item())  # type: ignore[attr-defined]
        found.append(gradient.full_tensor().norm().item())  # type: ignore[attr-defined]
        norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        norm.item()
    ours = [(str(w.message), f"{Path(w.filename).name}:{w.lineno}") for w in caught if w.category is EchelonWarning]
    return ours, found


def test_reading_a_shards_value_warns_once_per_line() -> None:
    (said, (first, *whole)), (silent, (second, *_)) = run_on_ranks(_numbers, world_size=2)
    assert first != second
    assert whole[-1] == pytest.approx((first**2 + second**2) ** 0.5)
    source = Path(__file__).read_text().splitlines()
    lines = [f"{Path(__file__).name}:{i}" for i, line in enumerate(source, 1) if line.endswith("# LINE")]
    assert [line for _, line in said] == lines
    assert all("of only this rank's shard" in text and "full_tensor()" in text for text, _ in said)
    assert silent == []


# ---- states ---------------------------------------------------------------------------------------------------------------


def _loaded(form: str) -> dict[str, torch.Tensor] | None:
    accelerator = Accelerator(engine="fsdp2")
    bare = _model()
    whole = {name: value + 1 for name, value in copy.deepcopy(bare.state_dict()).items()}
    before = dict(whole)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.0))
    accelerator.backward(mean_square(model(torch.ones(2, 4, dtype=torch.float64))))
    optimizer.step()
    if form == "a part":
        model.layer.load_state_dict({name.removeprefix("layer."): v for name, v in whole.items() if "layer" in name})
        with torch.no_grad():
            model.scale.copy_(whole["scale"])
    else:
        model.load_state_dict(whole, assign=form == "assign")
    assert all(whole[name] is value for name, value in before.items())
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.bias"):
        model.load_state_dict({**whole, "layer.bias": torch.ones(7)})
    accelerator.backward(mean_square(model(torch.ones(2, 4, dtype=torch.float64))))
    optimizer.step()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("form", ["copy", "assign", "a part"])
def test_full_state_dicts_load_like_on_one_device(form: str) -> None:
    (found, _), expected = run_on_ranks(_loaded, form, world_size=2), _model().state_dict()
    assert found is not None
    for name, value in expected.items():
        assert torch.equal(found[name], value + 1), name


# ---- unsupported operations -------------------------------------------------------------------------------------------------


class _Normalised(torch.optim.Optimizer):
    """A third-party optimizer whose operations do not support sharded tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(torch.ones(p.shape, dtype=p.dtype))


def _refused(form: str) -> None:
    accelerator = Accelerator(engine="fsdp2")
    bare = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    kinds: dict[str, Any] = {
        "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
        "_Normalised": _Normalised,
    }
    kind = kinds.get(form, getattr(torch.optim, form, torch.optim.SGD))
    model, optimizer = accelerator.prepare(bare, kind(bare.parameters()))
    x = torch.ones(2, 4).requires_grad_()
    loss = model(x).sum()
    if form == "penalty":
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + gradient.square().sum()
    accelerator.backward(loss)
    optimizer.step()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("Adafactor", "Adafactor cannot step sharded parameters"),
        ("LBFGS", "LBFGS cannot step sharded parameters"),
        ("Muon", "Muon cannot step sharded parameters"),
        ("Rprop", "Rprop cannot step sharded parameters"),
        ("_Normalised", "_Normalised cannot step sharded parameters: torch says"),
        ("penalty", "fully_shard does not support second derivatives"),
    ],
)
def test_unsupported_operations_on_shards_are_errors_with_a_remedy(form: str, said: str) -> None:
    if not hasattr(torch.optim, "Muon") and form == "Muon":
        pytest.skip("this torch has none")
    for text in errors_on_ranks(UsageError, _refused, form, world_size=2):
        assert said in text
        assert "ddp" in text or "zero1" in text
