"""parity="bitwise": what its bits depend on beside the program is recorded, compared, and refused where it cannot hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.accelerator.plugins.configuration import TorchDynamoPlugin
from echelon.accelerator.update.numerics_environment import (
    NumericsEnvironment,
    refuse_kernels,
    refuse_modules,
    refuse_optimizers,
)
from echelon.base import environ
from echelon.base.errors import CheckpointError, ConfigError, UsageError
from echelon.base.warnings import EchelonWarning


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _prepared(parity: str = "bitwise", model: nn.Module | None = None, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, parity=parity, seed=1, **options)
    model = model or nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=8)
    return (accelerator, *accelerator.prepare(model, loader))


def _saved(folder: Path, parity: str = "bitwise") -> None:
    with environ.patch({"OMP_NUM_THREADS": "1"}):
        _prepared(parity)[0].save_state(folder)


@pytest.mark.parametrize(
    ("name", "other", "do"),
    [
        ("canonical_shards", {"canonical_shards": 4}, "set canonical_shards=8"),
        ("torch_build", {"torch_build": "2.0.0 (1234)"}, "install that torch version"),
        ("processor", {"processor": "an abacus"}, "resume on a processor of that type"),
    ],
)
def test_a_run_resumes_only_if_its_bits_are_the_same(
    name: str, other: dict[str, Any], do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(tmp_path)
    _prepared()[0].load_state(tmp_path)
    here = NumericsEnvironment.here
    monkeypatch.setattr(NumericsEnvironment, "here", lambda *given: replace(here(*given), **other))
    accelerator, model, _ = _prepared()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=f"saved by a bitwise run with {name} = ") as caught:
        accelerator.load_state(tmp_path)
    assert do in str(caught.value)
    assert "load it with parity='exact'" in str(caught.value)
    assert all(map(torch.equal, before, model.parameters()))  # nothing was loaded
    _prepared("exact")[0].load_state(tmp_path)  # the way out that the error names


def test_one_thread_and_two_are_not_mixed(tmp_path: Path) -> None:
    _saved(tmp_path)
    with environ.patch({"OMP_NUM_THREADS": "2"}):
        torch.use_deterministic_algorithms(True)
        try:
            accelerator, *_ = _prepared()
        finally:
            torch.use_deterministic_algorithms(False)
        with pytest.raises(CheckpointError, match="threads = 1, but this run has threads = 2") as caught:
            accelerator.load_state(tmp_path)
        assert "set OMP_NUM_THREADS=1" in str(caught.value)


def test_a_checkpoint_of_an_exact_run_may_start_a_bitwise_run(tmp_path: Path) -> None:
    _saved(tmp_path, "exact")
    _prepared()[0].load_state(tmp_path)


def test_a_changed_number_of_threads_is_an_error() -> None:
    with environ.patch({"OMP_NUM_THREADS": "1"}):
        _, _, loader = _prepared()
    torch.set_num_threads(2)
    with pytest.raises(UsageError, match="torch now uses 2 threads, but the run started with 1"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("deterministic", "nondeterministic operations"),
        ("matmul", "tf32 in matrix products"),
        ("convolutions", "tf32 in convolutions"),
        ("benchmark", "kernels selected by benchmarking"),
        ("workspaces", "cuBLAS workspaces of any size"),
        (None, None),
    ],
)
def test_kernels_that_may_differ_are_rejected(
    change: str | None, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn = SimpleNamespace(allow_tf32=change == "convolutions", benchmark=change == "benchmark")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: change != "deterministic")
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=change == "matmul"))
    with environ.patch({} if change == "workspaces" else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):
        if text is None:
            refuse_kernels(torch.device("cuda"), threads=4)
            return
        with pytest.raises(ConfigError, match=f"torch may use {text} on cuda") as caught:
            refuse_kernels(torch.device("cuda"), threads=4)
    assert "torch." in (caught.value.do or "") or "CUBLAS_WORKSPACE_CONFIG=:4096:8" in (caught.value.do or "")
    assert "OMP_NUM_THREADS" not in (caught.value.do or "")  # threads of the CPU change nothing on a device


def test_all_kernels_that_may_differ_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's defaults on a CUDA device: a user would otherwise meet three errors, one after the other."""
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=True, benchmark=False))
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    with pytest.raises(ConfigError) as caught:
        refuse_kernels(torch.device("cuda"), threads=1)
    named = ("use_deterministic_algorithms(True)", "CUBLAS_WORKSPACE_CONFIG=:4096:8", "cudnn.allow_tf32 = False")
    assert all(name in (caught.value.do or "") for name in named)


def test_several_threads_need_deterministic_operations() -> None:
    with environ.patch({"OMP_NUM_THREADS": "2"}), pytest.raises(ConfigError, match="with 2 threads") as caught:
        _prepared()
    assert "set OMP_NUM_THREADS=1" in str(caught.value)


def test_compiled_kernels_that_depend_on_earlier_shapes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="different kernels for a shape"):
        _prepared(dynamo_backend="eager")
    _prepared(dynamo_plugin=TorchDynamoPlugin(backend="eager", dynamic=False))
    model = nn.Sequential(torch.compile(nn.Linear(3, 1), backend="eager"))
    with pytest.raises(UsageError, match=r"0 \(OptimizedModule\): torch.compile may choose different kernels"):
        _prepared(model=model)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.SyncBatchNorm(3), r"1 \(SyncBatchNorm\): a BatchNorm in training mode"),
        (nn.InstanceNorm1d(3, track_running_stats=True), r"1 \(InstanceNorm1d\): it keeps running statistics"),
        (
            parametrizations.spectral_norm(nn.Linear(3, 3)),
            r"1.parametrizations.weight.0 \(_SpectralNorm\): .*iteration",
        ),
        (nn.utils.spectral_norm(nn.Linear(3, 3)), r"1 \(Linear\): .*iteration"),
    ],
)
def test_modules_with_state_from_their_shards_are_rejected_by_name(module: nn.Module, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        _prepared(model=nn.Sequential(nn.Linear(3, 3), module))
    assert "or use parity='exact'" in str(caught.value)
    refuse_modules([nn.Sequential(nn.InstanceNorm1d(3), nn.BatchNorm1d(3).eval(), nn.LayerNorm(3))])


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.inner(x)
        return out


def _train(accelerator: Accelerator, model: Any, loader: Any) -> None:
    for (x,) in loader:
        accelerator.backward(model(x).mean())


def test_a_buffer_that_forward_passes_change_is_an_error_in_the_first_update() -> None:
    accelerator, model, loader = _prepared(model=nn.Sequential(_Counting()))
    with pytest.raises(UsageError, match=r"the buffer 0\.seen changed in a training forward pass"):
        _train(accelerator, model, loader)


class _Own(torch.optim.SGD):
    pass


def test_an_engine_that_cannot_sum_shards_is_rejected() -> None:
    with pytest.raises(UsageError, match="the dp engine cannot sum the gradients of batch shards"):
        _prepared(engine="dp")


def test_optimizers_whose_bits_depend_on_the_shards_are_rejected() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    fused = torch.optim.AdamW(weights, fused=True)
    with pytest.raises(UsageError, match=r"AdamW\(fused=True\) rounds differently"):
        refuse_optimizers([fused], is_sharded=True)
    refuse_optimizers([fused], is_sharded=False)
    with pytest.raises(UsageError, match="LBFGS computes sums over all parameters"):
        refuse_optimizers([torch.optim.LBFGS(weights)], is_sharded=True)
    # Adafactor steps gathered parameters.
    steady = [torch.optim.AdamW(weights, foreach=True), torch.optim.SGD(weights), torch.optim.Adafactor(weights)]
    refuse_optimizers(steady, is_sharded=True)
    with pytest.warns(EchelonWarning, match="holds for _Own on sharded parameters only if"):
        refuse_optimizers([_Own(weights)], is_sharded=True)
