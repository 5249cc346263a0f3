"""The engine fsdp2: what it shards, that it trains like one process, and what scripts for one device do to shards."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from echelon import Accelerator, FullyShardedDataParallelPlugin
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.engines.fsdp.fsdp2 import FSDP2Engine
from echelon.engines.fsdp.options import ShardingOptions
from echelon.world.world import World
from tests.harness import errors_on_ranks, run_on_ranks
from tests.prepared_loop import all_warnings, share_of
from tests.programs.program import Case, Layout, Program
from tests.programs.runner import require_plain
from tests.reference import PlainTraining, mean_square, tanh_net, train_updates


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.layer(self.norm(x)))
        return out


class _Net(nn.Module):
    """An embedding tied to the output, and blocks of widths that are not divisible by the number of ranks."""

    _no_split_modules = ("_Block",)

    def __init__(self, width: int = 7, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x) * self.scale
        return out


def _net(seed: int = 0) -> _Net:
    torch.manual_seed(seed)
    return _Net().double()


def _ids() -> torch.Tensor:
    """Return [updates, micro-steps, samples of all ranks, length]."""
    return torch.randint(11, (4, 2, 12, 5), generator=torch.Generator().manual_seed(1))


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


_OPTIONS = {
    "stage 3": ShardingOptions(),
    "stage 2": ShardingOptions(reshard_after_forward=False),
    "hybrid": ShardingOptions(replicas=2),
    "offload": ShardingOptions(cpu_offload=True),
    "checkpointing": ShardingOptions(activation_checkpointing="full"),
    "by size": ShardingOptions(min_num_params=60),
    "ignored": ShardingOptions(ignored=r"blocks\.0\.norm"),
    "integer": ShardingOptions(reshard_after_forward=2),
}
_RUNS: list[Any] = [pytest.param(kind, 4, marks=pytest.mark.soak) for kind in ("stage 3", "integer")]
_RUNS += [("stage 3", 2), ("stage 2", 2), ("offload", 2), ("checkpointing", 2), ("by size", 2), ("ignored", 2)]
_RUNS += [("hybrid", 4)]


def _accelerator(kind: str, **settings: Any) -> Accelerator:
    return Accelerator(engine=FSDP2Engine(World.current(), options=_OPTIONS[kind]), **settings)


def _plain(optimizer: str, **options: Any) -> PlainTraining:
    model = _net()
    return train_updates(model, partial(_loss, model), _ids(), _optimizer(optimizer, model), **options)


def _clip(parameters: Any) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.05)


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def _train(
    kind: str, optimizer: str, weighted: bool, on_meta: bool = False
) -> tuple[Any, list[float], list[Any], bool]:
    accelerator = _accelerator(kind, gradient_accumulation_steps=2)
    with torch.device("meta" if on_meta and dist.get_rank() else "cpu"):
        model: Any = _net(seed=dist.get_rank())  # rank zero's weights are used
    stepper: Any
    model, stepper = accelerator.prepare(model, _optimizer(optimizer, model))
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    norms, gradients = [], []
    for window in _ids():
        for ids in map(share_of, window):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, ids), num_items=len(ids) if weighted else None)
                if accelerator.sync_gradients:
                    assert accelerator.session.engine.reduced(model)
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
                    kept = [p.grad for p in model.parameters()]
                    gradients.append([g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in kept])
                stepper.step()
                stepper.zero_grad()
    return accelerator.get_state_dict(model), norms, gradients, sharded


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world_size"), _RUNS)
def test_sharded_training_matches_one_process(kind: str, world_size: int) -> None:
    for optimizer, weighted in (("sgd", False), ("adamw", True)):
        plain = _plain(optimizer, clip=_clip)
        results = run_on_ranks(_train, kind, optimizer, weighted, world_size=world_size)
        # Sums in another order: 1e-12 relative in float64; Adam divides by a gradient's size: 1e-9 for its weights.
        rtol = 1e-12 if optimizer == "sgd" else 1e-9
        for rank, (found, norms, gradients, sharded) in enumerate(results):
            assert sharded == (kind != "ignored")
            torch.testing.assert_close(norms, plain.norms, rtol=1e-11 if optimizer == "sgd" else 1e-9, atol=0)
            torch.testing.assert_close(gradients, plain.gradients, rtol=rtol * 10, atol=1e-13)
            if rank == 0:
                assert list(found) == list(plain.state)
                torch.testing.assert_close(found, plain.state, rtol=rtol, atol=1e-13)
            else:
                assert found is None


def test_only_rank_zero_needs_the_weights() -> None:
    plain = _plain("sgd", clip=_clip)
    (found, norms, _, _), *_ = run_on_ranks(_train, "stage 3", "sgd", False, on_meta=True, world_size=3)
    assert norms == pytest.approx(plain.norms, rel=1e-11)
    torch.testing.assert_close(found, plain.state, rtol=1e-12, atol=1e-13)


def _no_values() -> None:
    accelerator = _accelerator("stage 3")
    with torch.device("meta"):
        model = _net()
    accelerator.prepare(model)(_ids()[0, 0])


def test_a_model_without_values_on_any_rank_is_rejected() -> None:
    for text in errors_on_ranks(UsageError, _no_values, world_size=2, num_errors=2):
        assert "was prepared on the meta device, and 14 of its tensors have no values yet" in text


def _on_a_backend_that_adds_for_mean(can_sum: bool) -> float:
    """Return the relative difference of gradients to one process, in float32; float64 never uses an average."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if (scatter := getattr(dist, name, None)) is not None:

                def add(*args: Any, op: Any = dist.ReduceOp.SUM, scatter: Any = scatter, **kwargs: Any) -> Any:
                    return scatter(*args, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **kwargs)

                patch.setattr(dist, name, add)
        if not can_sum:
            patch.delattr("torch.distributed.fsdp.FSDPModule.set_force_sum_reduction_for_comms")
        torch.manual_seed(0)
        plain = nn.Linear(3, 3)
        model = copy.deepcopy(plain)
        accelerator = Accelerator(cpu=True, engine="fsdp2")
        model = accelerator.prepare(model)
        x = torch.arange(12.0).view(4, 3)
        accelerator.backward(model(x[accelerator.process_index :: 2]).square().mean())
        plain(x).square().mean().backward()
        assert plain.weight.grad is not None
        found: Any = model.weight.grad
        return float((found.full_tensor() - plain.weight.grad).norm() / plain.weight.grad.norm())


def test_gradients_are_averaged_if_the_backend_silently_sums() -> None:
    # gloo in torch 2.7 and 2.8 behaves like this. 1e-6: float32, two terms in another order.
    assert max(run_on_ranks(_on_a_backend_that_adds_for_mean, True, world_size=2)) < 1e-6


def test_a_torch_version_that_cannot_average_gradients_is_rejected() -> None:
    for text in errors_on_ranks(UsageError, _on_a_backend_that_adds_for_mean, False, world_size=2):
        assert "sums gradients across ranks on CPUs instead of averaging them" in text


def _prepare_when_the_average_raises(message: str) -> str:
    """Prepare while every average raises ``message``; return the error of ``prepare``, or ``prepared``."""

    def fail(*_args: Any, op: Any = dist.ReduceOp.SUM, **_kwargs: Any) -> None:
        assert op == dist.ReduceOp.AVG
        raise RuntimeError(message)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                patch.setattr(dist, name, fail)
        try:
            Accelerator(cpu=True, engine="fsdp2").prepare(nn.Linear(3, 3))
        except RuntimeError as error:
            return str(error)
    return "prepared"


@pytest.mark.parametrize(
    ("message", "outcome"),
    [("Cannot use ReduceOp.AVG with Gloo", "prepared"), ("Connection closed by peer", "Connection closed by peer")],
)
def test_only_an_unsupported_average_is_replaced_by_a_sum(message: str, outcome: str) -> None:
    assert run_on_ranks(_prepare_when_the_average_raises, message, world_size=2) == [outcome, outcome]


def _norms_of_few_rows() -> tuple[float, float]:
    """Return norms of a model with two rows, so that one of three ranks holds no part of any parameter."""
    model: Any = tanh_net(4, 2)
    accelerator = Accelerator(engine="fsdp2")
    model = accelerator.prepare(model)
    model(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
    largest = accelerator.clip_grad_norm_(model.parameters(), 1e9, float("inf"))
    return float(accelerator.clip_grad_norm_(model.parameters(), 1e9)), float(largest)


def test_a_rank_without_any_shard_gets_the_norm() -> None:
    model = tanh_net(4, 2)
    model(torch.ones(1, 4, dtype=torch.float64)).square().sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for norm, largest in run_on_ranks(_norms_of_few_rows, world_size=3):
        assert norm == pytest.approx(float(gradients.norm()), rel=1e-12)  # sums in another order, float64
        assert largest == pytest.approx(float(gradients.abs().max()), rel=1e-12)


def _step_of_ones(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Take a plain step with a batch of ones; the gradients stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    mean_square(model(torch.ones(2, 3, dtype=torch.float64))).backward()
    optimizer.step()
    return optimizer


@pytest.mark.slow
def test_scalars_and_what_is_prepared_in_separate_calls_train() -> None:
    layout = Layout(world_size=2, engine="fsdp2 stage 3")
    programs = [Program(made=made, optimizer="momentum") for made in ("apart", "first", "after")]
    programs.append(Program(model="scalar", optimizer="adamw", clipping="norm"))
    require_plain([Case(program=program, layout=layout) for program in programs])


def _sparse() -> None:
    Accelerator(engine="fsdp2").prepare(nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)))


def test_the_error_for_sparse_gradients_names_the_layer() -> None:
    for text in errors_on_ranks(UsageError, _sparse, world_size=2):
        assert "1 is an embedding with sparse=True" in text


def _looked_at_before_the_step(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model between backward and step, like a loop that logs or evaluates there."""
    model: Any = tanh_net(3, 4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=kind == "stage 3")
    model, optimizer = Accelerator(engine="fsdp2", fsdp_plugin=plugin).prepare(model, optimizer)
    x = torch.ones(2, 3, dtype=torch.float64)
    model(x).square().mean().backward()
    with torch.no_grad():
        model(x)
    optimizer.step()
    with torch.no_grad():
        after_a_look = model(x).clone()
    model(x)  # a loss that is not backpropagated
    optimizer.step()
    return after_a_look, model(x).detach()


@pytest.mark.parametrize("kind", ["stage 3", "stage 2"])
def test_a_forward_pass_before_the_step_does_not_keep_stale_weights(kind: str) -> None:
    model, x = tanh_net(3, 4, 2), torch.ones(2, 3, dtype=torch.float64)
    optimizer = _step_of_ones(model, lr=0.5)
    once = model(x).detach()
    optimizer.step()
    for first, second in run_on_ranks(_looked_at_before_the_step, kind, world_size=2):
        torch.testing.assert_close(first, once, rtol=1e-12, atol=1e-14)  # float64
        torch.testing.assert_close(second, model(x).detach(), rtol=1e-12, atol=1e-14)


def _changed_after_an_evaluation() -> tuple[list[torch.Tensor], bool]:
    model: Any = tanh_net(3, 4, 2)
    model[0].requires_grad_(False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
    model = Accelerator(engine="fsdp2", fsdp_plugin=plugin).prepare(model)
    x = torch.ones(2, 3, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.requires_grad_(True)
    model(x).square().mean().backward()
    return [p.detach().full_tensor() for p in model.parameters()], all(p.grad is not None for p in model.parameters())


def test_changing_parameters_after_an_evaluation_changes_the_shards() -> None:
    expected = [2 * p.detach() for p in tanh_net(3, 4, 2).parameters()]
    for weights, is_trained in run_on_ranks(_changed_after_an_evaluation, world_size=2):
        assert all(map(torch.equal, weights, expected))
        assert is_trained


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


# ---- numbers -------------------------------------------------------------------------------------------------------------


def _numbers() -> tuple[list[tuple[str, str]], list[float]]:
    accelerator = Accelerator(engine="fsdp2")
    bare = _model()
    model = accelerator.prepare(bare)
    accelerator.backward(mean_square(model(torch.ones(2, 4, dtype=torch.float64))))
    gradient = bare.layer.weight.grad
    assert gradient is not None
    found = []
    with all_warnings() as caught:
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
    """A third-party optimizer that cannot be tried, and whose operations do not support sharded tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        assert self.param_groups[0]["params"][0].shape == (4, 4)
        self.inner = torch.optim.SGD([torch.zeros(1)], lr=0.1)  # an optimizer inside is not copied

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.add_(torch.ones(p.shape, dtype=p.dtype))


def _refused(form: str) -> None:
    accelerator = Accelerator(engine="fsdp2")
    bare = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    kind: Any = {"_Normalised": _Normalised, "LBFGS": torch.optim.LBFGS}.get(form, torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "_Normalised could not be tried", EchelonWarning)
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
        ("LBFGS", "LBFGS cannot step sharded parameters: its attribute '_params' references parameters"),
        ("_Normalised", "_Normalised cannot step sharded parameters: torch says"),
        ("penalty", "fully_shard does not support second derivatives"),
    ],
)
def test_unsupported_operations_on_shards_are_errors_with_a_remedy(form: str, said: str) -> None:
    for text in errors_on_ranks(UsageError, _refused, form, world_size=2):
        assert said in text
        assert "ddp" in text or "zero1" in text
