"""Layers that compute their canonical chunks one by one have the outputs and gradients of torch's layers, up to rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.engines.bitwise.grad_norm import clip_by_rows
from echelon.engines.tensor_parallel.parallelize import divide_into_chunks

_PLANS: dict[str, dict[str, Any]] = {
    "rows of the vocabulary": {"embedding": "embedding_rowwise", "up": "colwise", "down": "rowwise"},
    "columns of the embedding": {"embedding": "embedding_colwise", "up": "colwise", "down": "rowwise"},
    "gathered, and cut again": {"up": "colwise_gather_output", "down": "rowwise_split_input"},
}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=2)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(self.embedding(tokens))))
        return out


@pytest.mark.parametrize("kind", _PLANS)
def test_outputs_and_gradients_are_those_of_torch(kind: str) -> None:
    """float64: the sums are in another order."""
    torch.manual_seed(3)
    model = _Model().double()
    expected = copy.deepcopy(model)
    divide_into_chunks(model, _PLANS[kind], num_chunks=4)
    tokens = torch.tensor([[2, 6, 1, 5, 2], [0, 15, 6, 6, 2]])
    for one in (model, expected):
        one(tokens).square().sum().backward()
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=1e-14, atol=1e-14)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters()):
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=1e-13, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad[2].abs().max() == 0  # the padding row
    assert model.embedding.weight.grad[6].abs().max() > 0


def test_a_copy_of_a_divided_model_uses_its_own_weights() -> None:
    model = _Model()
    divide_into_chunks(model, _PLANS["rows of the vocabulary"], num_chunks=4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.down.bias.add_(1.0)
    tokens = torch.tensor([[1, 2]])
    torch.testing.assert_close(other(tokens), model(tokens) + 1.0)


def test_frozen_weights_get_no_gradient_and_pass_it_on() -> None:
    model = _Model()
    for name in ("up", "down"):
        model.get_submodule(name).requires_grad_(False)
    divide_into_chunks(model, _PLANS["rows of the vocabulary"], num_chunks=4)
    model(torch.tensor([[1, 4]])).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["embedding.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast_computes_products_in_its_dtype(dtype: torch.dtype) -> None:
    model = _Model()
    divide_into_chunks(model, _PLANS["rows of the vocabulary"], num_chunks=4)
    with torch.autocast("cpu", dtype=dtype):
        out = model(torch.tensor([[1, 4]]))
    assert out.dtype == dtype
    out.float().sum().backward()
    assert model.up.weight.grad is not None
    assert model.up.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("seed", range(6))  # another order may round alike
def test_the_norm_is_that_of_the_norms_of_the_parts_of_rows(seed: int) -> None:
    torch.manual_seed(seed)
    parameters = [
        nn.Parameter(torch.zeros(*shape, dtype=torch.float64)) for shape in ((60, 80), (5,), (4, 6), (2, 2, 4))
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    norms = [  # in float64, the last bits show another order
        gradients[0].view(240, 20).norm(dim=1),
        gradients[1].abs(),
        gradients[2].norm(dim=1),  # 4 does not divide 6
        gradients[3].view(8, 2).norm(dim=1),
    ]
    expected = torch.cat(norms).norm()
    assert clip_by_rows(parameters, 0.5, 2.0, num_chunks=4).item() == expected.item()
    for parameter, gradient in zip(parameters, gradients):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient * (0.5 / (expected + 1e-6)))
