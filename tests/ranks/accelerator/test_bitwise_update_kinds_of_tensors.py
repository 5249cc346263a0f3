"""``parity="bitwise"`` with complex parameters (bit-identical) and sparse gradients (rejected)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base.errors import UsageError
from tests.harness import errors_on_ranks, run_on_ranks
from tests.reference import gaussian, mean_square, train_updates


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2) / 24))
        self.vector = nn.Parameter(torch.view_as_complex(torch.arange(6.0).reshape(3, 2) / 6))
        self.real = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.real((x.to(self.matrix.dtype) @ self.matrix.T + self.vector).abs())
        return out


def _samples() -> torch.Tensor:
    return gaussian(24, 4, dtype=torch.float32)


def _train(engine: str, parity: str) -> tuple[list[list[float]] | None, list[float]]:
    accelerator = Accelerator(cpu=True, parity=parity, engine=engine, seed=0, canonical_shards=4)
    model: Any = _Complex()
    loader: Any = DataLoader(TensorDataset(_samples()), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    norms = []
    for (x,) in loader:
        accelerator.backward(mean_square(model(x)))
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        norms += [norm] if accelerator.sync_gradients else []
        optimizer.step()
        optimizer.zero_grad()
    whole = accelerator.get_state_dict(model)
    return None if whole is None else _flat(whole.values()), norms


def _flat(weights: Iterable[torch.Tensor]) -> list[list[float]]:
    return [(torch.view_as_real(v.resolve_conj()) if v.is_complex() else v).flatten().tolist() for v in weights]


def _require_plain(found: list[list[float]] | None, norms: list[float]) -> None:
    """Compare with the plain loop: float32, 1e-5."""

    def clip(parameters: Any) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, 0.5)

    model = _Complex()
    batches = _samples().view(3, 1, 8, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = train_updates(model, lambda x: mean_square(model(x)), batches, sgd, clip=clip)
    assert found is not None
    for mine, expected in zip(found, _flat(plain.weights), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert norms == pytest.approx(plain.norms, rel=1e-5)


def test_complex_parameters_with_clipping_are_bit_identical() -> None:
    one, norms = run_on_ranks(_train, "ddp", "bitwise", world_size=1)[0]
    _require_plain(one, norms)
    for world_size in (2, 3):
        (whole, also), *_ = run_on_ranks(_train, "ddp", "bitwise", world_size=world_size)
        assert (whole, also) == (one, norms)


def test_exact_parity_clips_complex_parameters_by_their_norm() -> None:
    whole, norms = run_on_ranks(_train, "ddp", "exact", world_size=2)[0]
    _require_plain(whole, norms)


@pytest.mark.parametrize(("engine", "name"), [("zero1", "SGD"), ("fsdp2", "matrix (torch.complex64)")])
def test_engines_that_cannot_mix_complex_and_real_parameters_raise(engine: str, name: str) -> None:
    for text in errors_on_ranks(UsageError, _train, engine, "bitwise", world_size=2):
        assert name in text
        assert "ddp" in text


class _AllComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2) / 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (x.to(self.matrix.dtype) @ self.matrix.T).abs()
        return out


def _train_sharded() -> tuple[torch.Tensor | None, float, torch.dtype]:
    accelerator = Accelerator(cpu=True, engine="fsdp2")
    bare = _AllComplex()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    accelerator.backward(mean_square(model(_samples())))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert norm is not None
    optimizer.step()
    whole = accelerator.get_state_dict(model)
    return None if whole is None else whole["matrix"], float(norm), norm.dtype


def test_complex_shards_are_clipped_by_their_norm() -> None:
    """Against a plain step: float32, 1e-5. The norm is a real number."""
    model = _AllComplex()
    mean_square(model(_samples())).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    (whole, norm, dtype), (_, other, _) = run_on_ranks(_train_sharded, world_size=2)
    assert whole is not None
    torch.testing.assert_close(whole, model.matrix.detach(), rtol=1e-5, atol=1e-6)
    assert (norm, other) == (pytest.approx(expected, rel=1e-5), norm)
    assert dtype == torch.float32


class _FunctionalEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.embedding(x, self.table, sparse=True)


def _sparse(kind: str) -> None:
    accelerator = Accelerator(cpu=True, parity="bitwise", seed=0)
    made: Any = {
        "Embedding": lambda: nn.Sequential(nn.Embedding(5, 2, sparse=True)),
        "EmbeddingBag": lambda: nn.Sequential(nn.EmbeddingBag(5, 2, sparse=True, mode="sum")),
        "functional": lambda: nn.Sequential(_FunctionalEmbedding()),
    }
    model = made[kind]()
    loader: Any = DataLoader(TensorDataset(torch.arange(16).reshape(16, 1) % 5), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    assert kind == "functional", "prepare() took it"
    for (x,) in loader:
        accelerator.backward(mean_square(model(x)))
        optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "name"), [("Embedding", "0 (Embedding)"), ("EmbeddingBag", "0 (EmbeddingBag)"), ("functional", "0.table")]
)
def test_the_error_for_sparse_gradients_names_the_parameter(kind: str, name: str, world_size: int) -> None:
    for text in errors_on_ranks(UsageError, _sparse, kind, world_size=world_size):
        assert name in text
        assert "sparse" in text
        assert "parity='exact'" in text
