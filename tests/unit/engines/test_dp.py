"""The engine dp: DataParallel on stand-ins for devices, what it says, and that a script's own wrapper is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon import Accelerator
from echelon.base.errors import UsageError
from echelon.base.warnings import EchelonWarning
from echelon.engines.dp import DPEngine
from echelon.world.world import World
from tests.cpu_data_parallel import cpu_devices


class _WithLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1).double()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, *, square: bool = True) -> torch.Tensor:
        self.seen.append(len(x))  # a list: the copies share it
        out: torch.Tensor = self.layer(x)
        return (out.square() if square else out).mean()


def _prepared(devices: int) -> tuple[Any, Any, Any]:
    accelerator = Accelerator(engine="dp", cpu=True)
    model = _WithLoss()
    with pytest.warns(EchelonWarning) as said:
        prepared = accelerator.prepare(model)
    again = accelerator.prepare(nn.Linear(1, 1))  # says nothing more
    assert isinstance(again, nn.DataParallel) == (devices > 1)
    assert len(said) == 1
    return accelerator, prepared, str(said[0].message)


def test_losses_of_devices_are_averaged_with_equal_weights() -> None:
    with cpu_devices(2):
        accelerator, model, text = _prepared(2)
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        loss = model(x)
        assert loss.shape == (2,)
        assert accelerator.unwrap_model(model).seen in ([3, 2], [2, 3])
        accelerator.backward(loss)
    plain = _WithLoss()
    ((plain(x[:3]) + plain(x[3:])) / 2).backward()
    for p, q in zip(accelerator.unwrap_model(model).parameters(), plain.parameters()):
        assert p.grad is not None
        assert q.grad is not None
        assert (p.grad - q.grad).norm() <= 1e-14 * q.grad.norm()  # float64, sums in another order
    for reason in ("copies the model to 2 devices in each step", "threads", "first device", "one machine", "mean"):
        assert reason in text


def test_a_loss_per_sample_is_rejected() -> None:
    with cpu_devices(2):
        accelerator, model, _ = _prepared(2)
        with pytest.raises(UsageError, match="expects a scalar loss"):
            accelerator.backward(model.module.layer(torch.ones(3, 4, dtype=torch.float64)).squeeze(1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_may_be_shorter_than_the_devices(size: int) -> None:
    """A last batch, and a keyword argument that is no tensor: torch gives the devices without samples that alone."""
    with cpu_devices(4):
        accelerator, model, _ = _prepared(4)
        loss = model(torch.ones(size, 4, dtype=torch.float64), square=False)
        assert loss.shape == (size,)
        accelerator.backward(loss)
    assert torch.allclose(model.module.layer.weight.grad, torch.ones(1, 4, dtype=torch.float64), rtol=1e-12)


def test_in_mixed_precision_the_copies_run_and_not_the_original() -> None:
    with cpu_devices(2):
        accelerator = Accelerator(engine="dp", cpu=True, mixed_precision="bf16")
        seen: list[bool] = []

        class Watching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(self.layer.weight is original.layer.weight)
                out: torch.Tensor = self.layer(x)
                assert out.dtype == torch.bfloat16
                return out

        original = Watching()
        with pytest.warns(EchelonWarning):
            model = accelerator.prepare(original)
        assert model(torch.ones(4, 4)).dtype == torch.float32
    assert seen == [False, False]


def test_with_fewer_than_two_devices_it_warns_once_and_trains_like_single() -> None:
    with cpu_devices(1):
        accelerator, model, text = _prepared(1)
        assert type(model) is _WithLoss
    assert "this process has 1, so it trains like the single engine" in text
    assert accelerator.capabilities.num_devices == 1


def test_a_scripts_own_wrapper_is_kept_and_unwrapped() -> None:
    with cpu_devices(2):
        accelerator = Accelerator(engine="dp", cpu=True)
        inner = nn.Linear(3, 1)
        own = nn.DataParallel(inner)
        with pytest.warns(EchelonWarning):
            model = accelerator.prepare(own)
        assert model is own
        assert model(torch.ones(3, 3)).shape == (3, 1)
        assert accelerator.unwrap_model(model) is inner
        assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]


def test_a_scripts_wrapper_is_unwrapped_without_the_engine_dp() -> None:
    accelerator = Accelerator(cpu=True)
    inner = nn.Linear(3, 1)
    assert accelerator.unwrap_model(accelerator.prepare(nn.DataParallel(inner))) is inner


def test_several_processes_are_refused() -> None:
    world = World(
        rank=0, local_rank=0, world_size=2, local_world_size=2, node_rank=0, device=torch.device("cpu"), backend="gloo"
    )
    with pytest.raises(UsageError, match="there are 2 processes") as caught:
        DPEngine(world)
    assert "engine='dp'" in str(caught.value)
    assert "remove engine='dp'" in str(caught.value)
