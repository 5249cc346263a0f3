"""``speed``: what "safe" chooses is bit-equal to a plain loop, what "max" chooses is close, and "off" chooses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Accelerator
from echelon.base.device import has_bf16
from echelon.data.whole_batches import WholeBatches
from echelon.trainer.arguments.training_arguments import TrainingArguments
from echelon.trainer.build_accelerator import accelerator_arguments

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximize": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, dampening=0.1, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
}


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(37, 23), nn.LayerNorm(23), nn.ReLU(), nn.Linear(23, 19), nn.Tanh(), nn.Linear(19, 5)]
    return nn.Sequential(*layers, nn.Linear(5, 5)).to(dtype)


def _loader(dtype: torch.dtype) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(70, 37, generator=draw, dtype=dtype), torch.randint(0, 5, (70,), generator=draw)
    return DataLoader(TensorDataset(*rows), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))


def _train(model: Any, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], Any]) -> None:
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()


def _plain(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _net(dtype)
    optimizer = make(model.parameters())
    _train(model, optimizer, _loader(dtype), lambda loss: loss.backward())
    return model, optimizer


def _prepared(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    accelerator = Accelerator(cpu=True, **options)
    bare = _net(dtype)
    optimizer = make(bare.parameters())
    model, prepared, loader = accelerator.prepare(bare, optimizer, _loader(dtype))
    _train(model, prepared, loader, accelerator.backward)
    return bare, optimizer, loader


def _flags(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return optimizer.param_groups[0].get("foreach"), optimizer.param_groups[0].get("fused")


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_safe_is_bit_equal_to_the_plain_loop_and_so_is_its_state(name: str, dtype: torch.dtype) -> None:
    plain, of_plain = _plain(MAKERS[name], dtype)
    model, optimizer, _ = _prepared(MAKERS[name], dtype)
    assert _flags(optimizer)[0] is True  # otherwise this compares two plain loops
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    mine, expected = optimizer.state_dict(), of_plain.state_dict()
    assert mine["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        assert mine["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            assert value is None or torch.equal(torch.as_tensor(mine["state"][index][key]), torch.as_tensor(value))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_sparse_gradients_are_bit_equal_too(kind: str) -> None:
    def trained(prepares: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.ModuleList([nn.EmbeddingBag(9, 3, sparse=True) for _ in range(8)])
        bare = list(model.parameters())
        optimizer: Any = getattr(torch.optim, kind)(bare, lr=0.1)
        accelerator = Accelerator(cpu=True)
        if prepares:
            model, optimizer = accelerator.prepare(model, optimizer)
            assert _flags(optimizer)[0] is True
        for step in range(3):
            loss = sum((one(torch.tensor([[1, 2 + step]])) ** 2).sum() for one in model)
            accelerator.backward(loss) if prepares else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return bare

    assert all(map(torch.equal, trained(True), trained(False)))


def test_what_the_script_has_chosen_and_what_would_be_slower_remains() -> None:
    few, many = _net()[0].parameters, _net().parameters
    big = [nn.Parameter(torch.zeros(300_000)) for _ in range(8)]
    for expected, optimizer in [
        ((False, None), torch.optim.Adam(many(), foreach=False)),
        ((None, False), torch.optim.Adam(many(), fused=False)),
        ((None, None), torch.optim.Adam(many(), lr=torch.tensor(1e-3))),
        ((None, None), torch.optim.Adam(many(), capturable=False, differentiable=True)),
        ((None, None), torch.optim.NAdam(many())),  # its foreach step rounds differently
        ((None, None), torch.optim.Adam(few())),
        ((None, None), torch.optim.Adam(big)),
        ((True, None), torch.optim.Adam(many())),
    ]:
        before = optimizer.param_groups[0].get("differentiable")
        Accelerator(cpu=True).prepare(optimizer)
        assert _flags(optimizer) == expected
        assert optimizer.param_groups[0].get("differentiable") == before


def test_off_chooses_nothing() -> None:
    model, optimizer, loader = _prepared(MAKERS["adam"], torch.float32, speed="off")
    assert _flags(optimizer) == (None, None)
    assert type(loader.inner.dataset) is TensorDataset
    plain, _ = _plain(MAKERS["adam"], torch.float32)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    exact = _prepared(MAKERS["adam"], torch.float32, speed="off", parity="exact")[2]
    assert not isinstance(exact.inner.dataset, WholeBatches)
    assert isinstance(_prepared(MAKERS["adam"], torch.float32, parity="exact")[2].inner.dataset, WholeBatches)


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_max_steps_by_fused_kernels_with_the_same_mathematics(name: str) -> None:
    plain, _ = _plain(MAKERS[name], torch.float64)
    model, optimizer, _ = _prepared(MAKERS[name], torch.float64, speed="max", mixed_precision="no")
    assert _flags(optimizer) == (None, True)
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    for mine, expected in zip(model.parameters(), plain.parameters()):  # float64: rounding of 18 updates
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


def test_a_state_saved_without_it_loads_and_keeps_the_kernels() -> None:
    _, plain = _plain(MAKERS["adam"], torch.float32)
    for speed, flags in (("safe", (True, None)), ("max", (None, True))):
        _, optimizer, _ = _prepared(MAKERS["adam"], torch.float32, speed=speed, mixed_precision="no")
        optimizer.load_state_dict(plain.state_dict())
        assert _flags(optimizer) == flags
        optimizer.step()
    assert _flags(plain) == (None, None)


def test_max_computes_in_bf16_where_the_device_does_unless_a_precision_was_chosen() -> None:
    expected = "bf16" if has_bf16(cpu=True) else "no"
    accelerator = Accelerator(cpu=True, speed="max")
    assert accelerator.mixed_precision == expected
    assert Accelerator(cpu=True, speed="max", mixed_precision="no").mixed_precision == "no"
    assert Accelerator(cpu=True).mixed_precision == "no"
    if expected == "bf16":
        assert str(accelerator.config.origins["mixed_precision"]) == "derived speed='max'"


@pytest.mark.skipif(not has_bf16(cpu=True), reason="this CPU does not compute bf16 natively")
def test_max_convolves_channels_last_where_it_computes_in_bf16(tmp_path: Any) -> None:
    def is_last(model: nn.Module) -> bool:
        return next(iter(model.parameters())).is_contiguous(memory_format=torch.channels_last)

    x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    models: dict[str, Any] = {}
    for precision in ("bf16", "no"):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
        accelerator = Accelerator(cpu=True, speed="max", mixed_precision=precision)
        models[precision], optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(models[precision](x), y))
            optimizer.step()
        assert is_last(net) is (precision == "bf16")
        accelerator.save_state(str(tmp_path / precision))
        saved = [p.detach().clone() for p in net.parameters()]
        for p in net.parameters():
            p.data.zero_()
        accelerator.load_state(str(tmp_path / precision))
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), saved))
        assert is_last(net) is (precision == "bf16")
        accelerator.save_model(net, str(tmp_path / f"model_{precision}"))
    torch.testing.assert_close(models["bf16"](x), models["no"](x), rtol=0.05, atol=0.05)


def test_bitwise_parity_keeps_the_kernels_that_do_not_depend_on_shards() -> None:
    _, optimizer, _ = _prepared(MAKERS["adam"], torch.float32, speed="max", mixed_precision="no", parity="bitwise")
    assert _flags(optimizer) == (True, None)


def test_the_trainer_leaves_the_precision_to_max(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def precision(**options: Any) -> Any:
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
        return accelerator_arguments(args, None)["mixed_precision"]

    assert (precision(), precision(speed="max"), precision(speed="max", bf16=True)) == ("no", None, "bf16")
    monkeypatch.setenv("ECHELON_SPEED", "max")
    assert (precision(), precision(speed="safe")) == (None, "no")
