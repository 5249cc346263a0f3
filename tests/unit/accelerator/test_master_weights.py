"""Casting the weights of one model: what else must follow them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.accelerator.master_weights import MasterWeights
from echelon.accelerator.setup.choose_precision import choose_master_weights
from echelon.base.capabilities import Capabilities
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.config.sources import current
from tests.prepared_loop import train_prepared


@pytest.fixture(autouse=True)
def _silently() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EchelonWarning)
        yield


def _accelerator(**settings: Any) -> Accelerator:
    return Accelerator(cpu=True, **{"mixed_precision": "bf16", **settings})


def _step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 4, dtype=model.weight.dtype)).float().square().mean().backward()
    optimizer.step()


def test_gradients_and_state_that_are_already_there_are_cast_and_groups_stay() -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer: Any = torch.optim.AdamW([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.25)
    _step(model, optimizer)
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    before = copy.deepcopy([*optimizer.state[model.weight].values(), model.weight, model.weight.grad])
    weight, groups = model.weight, optimizer.param_groups
    accelerator = _accelerator()
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    assert prepared.weight is weight is prepared_optimizer.param_groups[0]["params"][0]
    assert prepared_optimizer.param_groups is groups
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    after = [*optimizer.state[weight].values(), weight, weight.grad]
    assert [one.dtype for one in after] == [torch.float32] * 5
    assert all(torch.equal(new, old.float()) for new, old in zip(after, before))
    accelerator.backward(prepared(torch.ones(1, 4)).sum())
    assert torch.equal(weight.grad, before[-1].float() + 1)  # added to the gradient of before
    prepared_optimizer.step()


def test_an_optimizer_that_is_prepared_later_steps_the_cast_weights() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    optimizer.zero_grad()
    accelerator = _accelerator()
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32
    train_prepared(accelerator, model, optimizer, [torch.ones(2, 4)] * 10, loss_of=lambda x: model(x).sum())
    assert model.weight.mean().item() == pytest.approx(1 - 1e-3, abs=1e-4)


def test_statistics_beside_cast_weights_are_cast_and_others_are_not() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GRU(4, 4)).bfloat16()
    model.register_buffer("scale", torch.ones(2).bfloat16())
    model[0].requires_grad_(False)
    masters = MasterWeights()
    assert masters.cast(model, ()) == [torch.bfloat16] * 6
    dtypes = {name: value.dtype for name, value in model.state_dict().items()}
    low = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert low == {"0.weight", "0.bias", "scale"}
    model[2].requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(3, 4))[0].sum().backward()
    state = masters.as_loaded(model.state_dict(), model)
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=False),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    ],
    ids=repr,
)
def test_a_frozen_norm_takes_the_float32_outputs_of_trained_layers_before_it(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(5, 4), norm, nn.Linear(4, 1)).bfloat16()
    model[1:].requires_grad_(False)
    reference = copy.deepcopy(model).float()
    accelerator = _accelerator()
    ids = torch.arange(4)
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(ids).sum())
    reference(ids).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad, rtol=0.05, atol=0.05)
    assert {v.dtype for v in accelerator.get_state_dict(prepared).values() if v.is_floating_point()} == {torch.bfloat16}


def _shares(kind: str) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    optimizers = []
    if kind == "the same memory":
        model[1].weight = nn.Parameter(model[0].weight.data)
    elif kind == "a part":
        model[1].bias = nn.Parameter(model[0].weight.data[1])
    elif kind == "frozen":
        model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    elif kind == "buffer":
        model.register_buffer("copy", model[0].weight.data)
    elif kind == "flat":
        flat = nn.Parameter(torch.zeros(20).bfloat16())
        model[0].weight = nn.Parameter(flat.data[:16].view(4, 4))
        model[0].bias = nn.Parameter(flat.data[16:])
        optimizers = [torch.optim.SGD([flat], lr=0.1)]
    return model, optimizers


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("a part", "0.weight and 1.bias"),
        ("frozen", "0.weight and 1.weight"),
        ("buffer", "0.weight and copy"),
        ("flat", "0.weight and a parameter of the optimizer only"),
    ],
)
def test_memory_that_would_be_separated_is_refused(kind: str, names: str) -> None:
    model, optimizers = _shares(kind)
    first, second = names.split(" and ")
    with pytest.raises(UsageError, match=f"({first} and {second}|{second} and {first}) share memory"):
        _accelerator().prepare(model, *optimizers)
    _accelerator(master_weights="keep").prepare(*_shares(kind)[:1])


def test_parameters_with_the_same_memory_keep_it() -> None:
    model, _ = _shares("the same memory")
    prepared: Any = _accelerator().prepare(model)
    assert prepared[0].weight.data_ptr() == prepared[1].weight.data_ptr()
    assert prepared[0].weight.dtype == torch.float32


def test_a_copy_in_another_process_has_cast_nothing() -> None:
    masters = MasterWeights()
    masters.cast(nn.Linear(2, 2).bfloat16(), ())
    assert not pickle.loads(pickle.dumps(masters))


def test_fp16_weights_train_with_loss_scaling() -> None:
    # torch's GradScaler rejects the gradients of fp16 weights.
    model: Any = nn.Linear(4, 1).half()
    accelerator = _accelerator(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    first = model.weight.clone()
    train_prepared(accelerator, model, optimizer, [torch.ones(2, 4)] * 3)
    assert model.weight.dtype == torch.float32
    assert not torch.equal(model.weight, first)
    assert accelerator.get_state_dict(model)["weight"].dtype == torch.float16


# ---- stochastic ------------------------------------------------------------------------------------------------------


def _stochastic(**settings: Any) -> tuple[Accelerator, Any, Any]:
    torchao = pytest.importorskip("torchao.optim")
    accelerator = _accelerator(master_weights="stochastic", seed=3, **settings)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = torchao.AdamW8bit(model.parameters(), lr=1e-4, weight_decay=0.0, bf16_stochastic_round=True)
    return accelerator, *accelerator.prepare(model, optimizer)


def test_stochastic_rounding_keeps_small_updates_on_average_and_draws_no_numbers_of_the_loop() -> None:
    accelerator, model, optimizer = _stochastic()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.compiler.set_stance("force_eager"):
        train_prepared(accelerator, model, optimizer, [torch.ones(2, 64)] * 20, loss_of=lambda x: model(x).sum())
    assert torch.equal(torch.get_rng_state(), before)
    assert model.weight.dtype == torch.bfloat16
    # 4096 draws; each ends at 1 or 1 - 2**-8, whose mean has a standard deviation of 2e-3 / 64
    assert model.weight.float().mean().item() == pytest.approx(1 - 20 * 1e-4, abs=2e-4)


def test_an_optimizer_that_rounds_to_nearest_is_refused() -> None:
    model = nn.Linear(4, 4).bfloat16()
    accelerator = _accelerator(master_weights="stochastic")
    with pytest.raises(ConfigError, match="AdamW rounds its updates to the nearest bfloat16") as caught:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert "torchao.optim.AdamW8bit(model.parameters(), lr, bf16_stochastic_round=True)" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [(torch.float16, "float16 weights cannot be rounded"), (torch.float32, "no trained parameter is bfloat16")],
)
def test_weights_that_cannot_be_rounded_are_refused(dtype: torch.dtype, text: str) -> None:
    model = nn.Linear(4, 4).to(dtype)
    with pytest.raises(ConfigError, match=text):
        _accelerator(master_weights="stochastic").prepare(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("asked", [None, "float32"])
def test_a_program_of_accelerate_trains_the_weights_that_it_loaded_unless_it_asks(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_AS", "accelerate")
    model, plain = (nn.Linear(4, 4, bias=False).bfloat16() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain))
    accelerator = _accelerator(master_weights=asked)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", EchelonWarning)
        prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        x = torch.full((2, 4), step + 1.0)
        accelerator.backward(prepared(x).square().mean())
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = plain(x)
        outputs.float().square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    resolved = accelerator.session.config
    if asked is None:
        assert torch.equal(model.weight, plain.weight)
        assert model.weight.dtype == torch.bfloat16
        assert "1 of 1 trained parameters are bfloat16 themselves" in str(told[0].message)
        assert "set master_weights='float32'" in str(told[0].message)
        assert str(resolved.origins["master_weights"]) == "derived as accelerate (ECHELON_AS)"
    else:
        assert model.weight.dtype == torch.float32
        assert told == []
    # accelerate casts them where it shards them
    sharded = choose_master_weights(current(), Capabilities(name="fsdp2", replicates=False, shards_parameters=True))
    assert sharded.value.master_weights == "float32"
