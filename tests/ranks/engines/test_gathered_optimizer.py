"""Optimizers of whole matrices (Muon) on sharded parameters: equal to their formula on every layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import EMA, Accelerator, ParallelismConfig
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.utils import TorchTensorParallelConfig
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import train_prepared

pytestmark = pytest.mark.slow  # 12 s; tests/unit/engines/test_optimizer_probe.py is quick

_LR, _MOMENTUM, _DECAY = 0.05, 0.9, 0.1
_NUM_UPDATES, _BATCH = 4, 12
Weights = dict[str, torch.Tensor]


class _Net(nn.Module):
    """Matrices with more rows than columns and fewer, in sizes that 3 and 4 ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.down(torch.tanh(self.up(self.norm(x))))) * self.scale
        return out


def _net(dtype: torch.dtype = torch.float64) -> _Net:
    torch.manual_seed(0)
    return _Net().to(dtype)


def _batches(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(_BATCH, 6, generator=generator, dtype=dtype) for _ in range(_NUM_UPDATES)]


# ---- the formula -----------------------------------------------------------------------------------------------------


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return five Newton-Schulz steps in the dtype of ``matrix`` (torch's Muon computes them in bfloat16)."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


@lru_cache
def _by_formula(num_updates: int = _NUM_UPDATES) -> Weights:
    """Return what one process computes without an optimizer: Muon for hidden matrices, and momentum for all else."""
    model = _net()
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in _batches()[:num_updates]:
        gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        with torch.no_grad():
            for (name, p), gradient in zip(model.named_parameters(), gradients):
                momenta[name] = _MOMENTUM * momenta[name] + gradient
                update = momenta[name]
                if name in ("up.weight", "down.weight"):
                    update = _orthogonal(gradient + _MOMENTUM * update) + _DECAY * p
                p -= _LR * update
    return {name: p.detach() for name, p in model.named_parameters()}


# ---- the optimizers, as people write them ----------------------------------------------------------------------------


class _Muon(torch.optim.Optimizer):
    """Muon, and momentum for the groups without ``use_muon``."""

    def __init__(self, params: Any, lr: float = _LR, momentum: float = _MOMENTUM) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "use_muon": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                if not group["use_muon"]:
                    p.add_(buffer, alpha=-group["lr"])
                    continue
                assert p.dim() == 2
                p.mul_(1 - group["lr"] * _DECAY)
                p.add_(_orthogonal(p.grad + group["momentum"] * buffer), alpha=-group["lr"])


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = dict(model.named_parameters())
    hidden = [named["up.weight"], named["down.weight"]]
    return hidden, [p for p in named.values() if all(p is not one for one in hidden)]


def _one_class(model: nn.Module) -> list[torch.optim.Optimizer]:
    hidden, others = _split(model)
    return [_Muon([{"params": hidden}, {"params": others, "use_muon": False}])]


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    hidden, others = _split(model)
    return [_Muon(hidden), torch.optim.SGD(others, lr=_LR, momentum=_MOMENTUM)]


_FORMS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "one class": _one_class,
    "two optimizers": _two_optimizers,
}

# ---- layouts ---------------------------------------------------------------------------------------------------------

_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp 2": (2, {}),
    "zero1 2": (2, {"engine": "zero1"}),
    "zero1 3": (3, {"engine": "zero1"}),
    "fsdp2 1": (1, {"engine": "fsdp2"}),
    "fsdp2 2": (2, {"engine": "fsdp2"}),
    "fsdp2 3": (3, {"engine": "fsdp2"}),
    "fsdp2 4": (4, {"engine": "fsdp2"}),
    "hybrid 4": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp 2": (2, {"tp_size": 2}),
    "shard 2 x tp 2": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "replicate 2 x tp 2": (4, {"dp_replicate_size": 2, "tp_size": 2}),
}
_PLAN = {"up": "colwise", "down": "rowwise"}


def _accelerator(layout: str, **options: Any) -> Accelerator:
    sizes = dict(_LAYOUTS[layout][1])
    engine = sizes.pop("engine", None)
    if engine is not None:
        options["engine"] = engine
    if sizes:
        handler = None
        if "tp_size" in sizes:
            chunks = {"canonical_chunks": 2} if options.get("parity") == "bitwise" else {}
            handler = TorchTensorParallelConfig(plan=_PLAN, **chunks)
        options["parallelism_config"] = ParallelismConfig(**sizes, tp_handler=handler)
    return Accelerator(cpu=True, **options)


def _own(batches: list[torch.Tensor], layout: str) -> list[torch.Tensor]:
    """Return the samples of this rank; ranks that share layers have the same ones."""
    tp_size = _LAYOUTS[layout][1].get("tp_size", 1)
    num_parts = _LAYOUTS[layout][0] // tp_size
    return [batch.chunk(num_parts)[dist.get_rank() // tp_size if num_parts > 1 else 0] for batch in batches]


class _Both:
    """Several optimizers in the place of one."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def _prepared(layout: str, form: str) -> tuple[Accelerator, Any, list[Any]]:
    accelerator = _accelerator(layout)
    model = _net()
    model, *optimizers = accelerator.prepare(model, *_FORMS[form](model))
    return accelerator, model, optimizers


def _trained(layout: str) -> list[Weights]:
    found = []
    for form in _FORMS:
        accelerator, model, optimizers = _prepared(layout, form)
        train_prepared(accelerator, model, _Both(optimizers), _own(_batches(), layout))
        found.append(accelerator.get_state_dict(model) or {})
        accelerator.free_memory()
    return found


def _assert_close(found: Weights, expected: Weights) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        # Float64: ranks add gradients in another order, which Newton-Schulz multiplies by at most 3.4445**5 = 485.
        assert float((found[name] - value).abs().max()) <= 1e-12, name


_QUICK = {"zero1 3", "fsdp2 3", "shard 2 x tp 2"}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _LAYOUTS]
)
def test_muon_equals_its_formula_on_every_layout(layout: str) -> None:
    for weights in run_on_ranks(_trained, layout, world_size=_LAYOUTS[layout][0])[0]:
        _assert_close(weights, _by_formula())


def _averaged(layout: str) -> Weights:
    accelerator, model, optimizers = _prepared(layout, "one class")
    average = accelerator.prepare(EMA(0.5))
    train_prepared(accelerator, model, optimizers[0], _own(_batches(), layout))
    with average.average_parameters():
        return {name: value.clone() for name, value in (accelerator.get_state_dict(model) or {}).items()}


@pytest.mark.parametrize("layout", ["zero1 3", "fsdp2 3"])
def test_averages_of_weights_are_those_of_the_formula(layout: str) -> None:
    expected = {name: value.detach() for name, value in _net().named_parameters()}
    for step in range(1, _NUM_UPDATES + 1):
        expected = {name: 0.5 * expected[name] + 0.5 * value for name, value in _by_formula(step).items()}
    _assert_close(run_on_ranks(_averaged, layout, world_size=_LAYOUTS[layout][0])[0], expected)


# ---- bitwise ---------------------------------------------------------------------------------------------------------


def _bitwise(layout: str) -> Weights:
    accelerator = _accelerator(layout, parity="bitwise", canonical_shards=4, seed=3)
    model = _net(torch.float32)
    del model.scale  # a plan for chunks has no place for it
    model.scale = 1.0
    hidden, others = _split(model)
    optimizers: list[Any] = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    loader: Any = DataLoader(TensorDataset(torch.cat(_batches(torch.float32))), batch_size=_BATCH)
    model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return accelerator.get_state_dict(model) or {}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and newer have Muon")
@pytest.mark.parametrize(
    "layout",
    ["fsdp2 3", "tp 2", *[pytest.param(name, marks=pytest.mark.slow) for name in ("zero1 2", "fsdp2 2", "fsdp2 4")]],
)
def test_torch_muon_is_bit_identical_to_one_process(layout: str) -> None:
    # Chunks of layers are computed one by one, on one rank, too.
    expected = run_on_ranks(_bitwise, "tp 1" if "tp" in layout else "single", world_size=1)[0]
    found = run_on_ranks(_bitwise, layout, world_size=_LAYOUTS[layout][0])[0]
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert not torch.equal(expected["up.weight"], _net(torch.float32).up.weight)


_LAYOUTS["tp 1"] = (1, {"tp_size": 1})

# ---- state -----------------------------------------------------------------------------------------------------------


def _half(layout: str, form: str, folder: str, *, resumes: bool) -> tuple[Weights, list[Any], int]:
    """Train two updates, in a new run or from ``folder``; return weights, full states and the elements of state on this rank."""
    accelerator, model, optimizers = _prepared(layout, form)
    batches = _own(_batches(), layout)
    if resumes:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*contains RNG states", EchelonWarning)  # nothing is drawn
            accelerator.load_state(folder)
    train_prepared(accelerator, model, _Both(optimizers), batches[2:] if resumes else batches[:2])
    if not resumes:
        accelerator.save_state(folder)
    held = sum(value.numel() for value in _state_of(optimizers[0]))
    return accelerator.get_state_dict(model) or {}, [one.full_state_dict() for one in optimizers], held


def _state_of(optimizer: Any) -> list[torch.Tensor]:
    values = [value for entries in optimizer.optimizer.state.values() for value in entries.values()]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


_MOVES = [
    ("fsdp2 3", "shard 2 x tp 2", "one class"),
    *[
        pytest.param(*move, marks=pytest.mark.slow)
        for move in [
            ("shard 2 x tp 2", "zero1 3", "two optimizers"),
            ("zero1 2", "fsdp2 4", "one class"),
            ("fsdp2 2", "single", "two optimizers"),
            ("single", "fsdp2 2", "one class"),
            ("hybrid 4", "tp 2", "two optimizers"),
        ]
    ],
]


@pytest.mark.parametrize(("first", "second", "form"), _MOVES)
def test_state_moves_to_another_layout(first: str, second: str, form: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    results = run_on_ranks(_half, first, form, folder, resumes=False, world_size=_LAYOUTS[first][0])
    weights, states, _ = results[0]
    _assert_close(weights, _by_formula(2))
    shapes = [p.shape for p in _split(_net())[0]]
    assert [states[0]["state"][i]["momentum_buffer"].shape for i in range(2)] == shapes
    if first == "fsdp2 3":  # each matrix has one owner, and the rest is sharded
        assert (
            sum(held for _, _, held in results) == sum(p.numel() for p in _net().parameters()) + 2
        )  # the scalar is whole
        assert max(held for _, _, held in results) <= 48 + 30
    after, _, _ = run_on_ranks(_half, second, form, folder, resumes=True, world_size=_LAYOUTS[second][0])[0]
    _assert_close(after, _by_formula())


def _with_state_from_before(layout: str) -> Weights:
    """Train two updates in one process, prepare, add a group and a schedule, and train on with the state that was there."""
    model: Any = _net()
    hidden, others = _split(model)
    optimizer: Any = _Muon([{"params": hidden}, {"params": others[:2], "use_muon": False}])
    kept = _Muon([{"params": others[2:], "use_muon": False}])
    for x in _batches()[:2]:
        model(x).square().mean().backward()
        for one in (optimizer, kept):
            one.step()
            one.zero_grad()
    group = optimizer.param_groups[0]
    accelerator = _accelerator(layout)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, kept, schedule = accelerator.prepare(model, optimizer, kept, schedule)
    assert optimizer.param_groups[0] is group  # who holds it still sets its learning rate
    train_prepared(accelerator, model, _Both([optimizer, kept]), _own(_batches(), layout)[2:], schedule=schedule)
    return accelerator.get_state_dict(model) or {}


@pytest.mark.parametrize("layout", ["fsdp2 2", pytest.param("zero1 2", marks=pytest.mark.slow)])
def test_state_and_schedules_from_before_prepare_are_kept(layout: str) -> None:
    _assert_close(run_on_ranks(_with_state_from_before, layout, world_size=2)[0], _by_formula())


class _Coded(torch.optim.SGD):
    """Keeps bytes and a scale for each row, as 8-bit optimizers do, and loads them without torch's cast to the parameter's dtype."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            rows = p.grad.reshape(max(p.shape[0] if p.dim() else 1, 1), -1)
            if state:
                rows = rows + 0.5 * state["codes"].double().sub(128).view_as(rows) * state["scale"].double()
            assert state.get("codes", torch.empty(0, dtype=torch.uint8)).dtype is torch.uint8
            state["scale"] = rows.abs().amax(1, keepdim=True).float() / 100
            state["codes"] = (rows / state["scale"]).round().add(128).to(torch.uint8).view_as(p)
            p.sub_(rows.view_as(p), alpha=_LR)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, entries in state_dict["state"].items():
            self.state[parameters[number]].update(entries)


def _coded(layout: str, folder: str | None, *, resumes: bool = False) -> Weights:
    accelerator = _accelerator(layout)
    model: Any = _net()
    model, optimizer = accelerator.prepare(model, _Coded(model.parameters()))
    if resumes:
        accelerator.load_state(folder)
    part = slice(2 if resumes else 0, None if folder is None or resumes else 2)
    train_prepared(accelerator, model, optimizer, _own(_batches(), layout)[part])
    if folder is not None and not resumes:
        accelerator.save_state(folder)
    return accelerator.get_state_dict(model) or {}


@pytest.mark.parametrize("layout", ["fsdp2 2", pytest.param("zero1 2", marks=pytest.mark.slow)])
def test_state_is_loaded_by_the_method_of_the_class(layout: str, tmp_path: Path) -> None:
    expected = run_on_ranks(_coded, layout, None, world_size=2)[0]
    run_on_ranks(_coded, layout, str(tmp_path / "saved"), world_size=2)
    _assert_close(run_on_ranks(_coded, layout, str(tmp_path / "saved"), resumes=True, world_size=2)[0], expected)


# ---- refusals --------------------------------------------------------------------------------------------------------


class _TrustRatioOfAll(torch.optim.SGD):
    """Scales each update by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(
            float(torch.as_tensor(g.to_local() if hasattr(g, "to_local") else g).square().sum()) for g in gradients
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (1 + total))


def _refused(layout: str) -> None:
    model = _net()
    _accelerator(layout).prepare(model, _TrustRatioOfAll(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("fsdp2 2", "a step on two halves differs from a step on the whole"),
        ("zero1 2", "a step on two parameters differs from a step on each"),
    ],
)
def test_an_optimizer_that_mixes_parameters_is_refused_by_name(layout: str, text: str) -> None:
    for error in errors_on_ranks(UsageError, _refused, layout, world_size=2):
        assert "_TrustRatioOfAll" in error
        assert text in error
        assert "ddp" in error
