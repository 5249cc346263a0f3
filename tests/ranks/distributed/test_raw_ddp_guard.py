"""Plain DDP loops between setup() and cleanup(): common mistakes are reported, and correct loops do not warn."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from echelon import Accelerator
from echelon.distributed import process_group
from tests.harness import run_on_ranks
from tests.prepared_loop import all_warnings

STEPS = 3


class _Loop:
    def __init__(self, *, freezes: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        if freezes:
            self.model[0].requires_grad_(False)
        self.ddp: Any = DistributedDataParallel(self.model, **options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))

    def loss(self, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        return (self.ddp if forward is None else forward)(self.x).pow(2).mean()

    def step(self) -> None:
        self.optimizer.step()  # the step of the test
        self.optimizer.zero_grad()


# ---- mistakes --------------------------------------------------------------------------------------------------------


def step_in_no_sync(loop: _Loop) -> None:
    with loop.ddp.no_sync():
        loop.loss().backward()
    loop.step()


def bare_forward(loop: _Loop) -> None:
    loop.loss(loop.model).backward()
    loop.step()


def outer_object(loop: _Loop) -> None:
    class Classifier:  # it received the model before it was wrapped
        def __init__(self, network: nn.Module) -> None:
            self.network = network

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x)

    loop.loss(Classifier(loop.ddp.module)).backward()
    loop.step()


def second_backward(loop: _Loop) -> None:
    first = loop.loss()
    first.backward(retain_graph=True)
    first.backward()
    loop.step()


def with_a_logged_loss(loop: _Loop) -> None:
    loss = loop.loss(loop.model)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)  # a collective, but not of the gradients
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.step()


def unfrozen(loop: _Loop) -> None:
    loop.model[0].requires_grad_(True)
    loop.loss().backward()
    loop.step()


def unfrozen_with_a_logged_loss(loop: _Loop) -> None:
    loop.model[0].requires_grad_(True)
    loss = loop.loss()
    loss.backward()
    dist.all_reduce(loss.detach().clone())
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.step()


def clipped_by_value(loop: _Loop) -> None:
    with loop.ddp.no_sync():
        loss = loop.loss()
        loss.backward()
    dist.all_reduce(loss.detach().clone())
    torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    loop.step()


def added(loop: _Loop) -> None:
    if len(loop.model) == 3:
        loop.model.append(nn.Linear(4, 4))
        loop.optimizer.add_param_group({"params": loop.model[3].parameters()})
    loop.loss().backward()
    loop.step()


MISTAKES = [step_in_no_sync, bare_forward, outer_object, second_backward, with_a_logged_loss]
MISTAKES += [clipped_by_value, unfrozen, unfrozen_with_a_logged_loss, added]


def _warned(name: str) -> list[tuple[str, str, int]]:
    with process_group(), all_warnings() as caught:
        loop = _Loop(freezes=name.startswith("unfrozen"))
        for _ in range(STEPS):
            globals()[name](loop)
    return [(str(one.message), one.filename, one.lineno) for one in caught]


@pytest.mark.parametrize("mistake", [one.__name__ for one in MISTAKES])
def test_step_with_unreduced_gradients_warns_once_at_its_line(mistake: str) -> None:
    first, second = run_on_ranks(_warned, mistake, init_group=False)
    ((message, file, line),) = first
    assert "this step uses Sequential gradients that were not averaged across ranks" in message
    assert file == __file__
    assert "# the step of the test" in Path(__file__).read_text().splitlines()[line - 1]
    assert second == []  # only rank zero warns


# ---- correct loops ---------------------------------------------------------------------------------------------------


def plain(loop: _Loop) -> None:
    loop.loss().backward()
    torch.nn.utils.clip_grad_norm_(loop.ddp.parameters(), 1.0)
    loop.step()


def accumulation(loop: _Loop) -> None:
    with loop.ddp.no_sync():
        loop.loss().backward()
        loop.loss().backward()
    loop.loss().backward()
    loop.step()


def accumulation_synchronised_each_time(loop: _Loop) -> None:
    loop.loss().backward()
    loop.loss().backward()
    loop.step()


def evaluation_with_the_bare_module(loop: _Loop) -> None:
    with torch.no_grad():
        loop.loss(loop.model)
    plain(loop)
    with torch.inference_mode():
        loop.loss(loop.ddp.module)


def saliency_through_the_bare_module(loop: _Loop) -> None:
    x = loop.x.clone().requires_grad_()
    torch.autograd.grad(loop.model(x).sum(), x)
    plain(loop)
    loop.loss(loop.model).backward()  # after the step, and discarded
    loop.optimizer.zero_grad()


def averaged_by_hand(loop: _Loop) -> None:
    with loop.ddp.no_sync():
        loop.loss().backward()
    for p in loop.model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    loop.step()


def checkpointed_activations(loop: _Loop) -> None:
    for use_reentrant in (False, True):
        x = loop.x.clone().requires_grad_()
        checkpoint(loop.ddp, x, use_reentrant=use_reentrant).pow(2).mean().backward() if not use_reentrant else None
    loop.step()


def with_a_closure(loop: _Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.ddp.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    optimizer.step(closure)


def zero_redundancy(loop: _Loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module uses the deprecated torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer = ZeroRedundancyOptimizer(loop.ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for _ in range(2):
        loop.loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def uneven_inputs(loop: _Loop) -> None:
    with Join([loop.ddp]):
        for _ in range(1 + dist.get_rank()):
            plain(loop)


def adversaries(loop: _Loop) -> None:
    """A GAN: the generator's loss passes through the discriminator, whose gradients are invalid until they are cleared."""
    other = DistributedDataParallel(nn.Linear(4, 1))
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        of_other.zero_grad()
        other(loop.x).mean().backward()
        other(loop.ddp(loop.x).detach()).mean().backward()
        of_other.step()
        loop.optimizer.zero_grad()
        other.module(loop.ddp(loop.x)).mean().backward()
        loop.optimizer.step()


def compiled(loop: _Loop) -> None:
    forward: Any = torch.compile(loop.ddp, backend="eager")
    for _ in range(2):
        with loop.ddp.no_sync():
            loop.loss(forward).backward()
        loop.loss(forward).backward()
        loop.step()


def copied_and_pickled(loop: _Loop) -> None:
    copy.deepcopy(loop.ddp.module)
    file = io.BytesIO()
    torch.save(loop.ddp, file)
    file.seek(0)
    torch.load(file, weights_only=False)
    plain(loop)


def a_model_of_one_rank(loop: _Loop) -> None:
    alone = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    alone(loop.x).mean().backward()
    optimizer.step()
    plain(loop)


def prepared_by_an_accelerator(loop: _Loop) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        with accelerator.no_sync(model):
            accelerator.backward(model(loop.x).mean())
        accelerator.backward(model(loop.x).mean())
        optimizer.step()
        optimizer.zero_grad()


def wrapped_anew(loop: _Loop) -> None:
    old, loop.ddp = loop.ddp, DistributedDataParallel(loop.model)
    loop.loss().backward()
    loop.step()
    del old  # it existed until here


def unfrozen_and_averaged_by_hand(loop: _Loop) -> None:
    loop.model[0].requires_grad_(False)
    loop.ddp = DistributedDataParallel(loop.model)
    loop.model[0].requires_grad_(True)
    loop.loss().backward()
    for parameter in loop.model[0].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    loop.step()


CORRECT = [
    wrapped_anew,
    unfrozen_and_averaged_by_hand,
    plain,
    accumulation,
    accumulation_synchronised_each_time,
    evaluation_with_the_bare_module,
    saliency_through_the_bare_module,
    averaged_by_hand,
    checkpointed_activations,
    with_a_closure,
    zero_redundancy,
    uneven_inputs,
    adversaries,
    compiled,
    copied_and_pickled,
    a_model_of_one_rank,
    prepared_by_an_accelerator,
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "bucket": {"bucket_cap_mb": 0.0001, "broadcast_buffers": False},
    "static_graph": {"static_graph": True},
    "communication hook": {"hook": default_hooks.fp16_compress_hook},
}


def _heard(name: str, options: dict[str, Any], hook: Any = None) -> list[str]:
    with process_group(), all_warnings() as caught:
        loop = _Loop(**options)
        if hook is not None:
            loop.ddp.register_comm_hook(None, hook)
        for _ in range(STEPS):
            globals()[name](loop)
        parameters = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
        others = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameters)
        assert all(torch.equal(one, parameters) for one in others) or name == "uneven_inputs"
    return [str(one.message) for one in caught if "not averaged across ranks" in str(one.message)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [one.__name__ for one in CORRECT])
def test_a_correct_loop_does_not_warn(name: str) -> None:
    assert run_on_ranks(_heard, name, {}, init_group=False) == [[], []]


@pytest.mark.parametrize(
    ("options", "name"),
    # DDP itself cannot accumulate with a static graph.
    [(o, name) for o in OPTIONS for name in ("plain", "accumulation") if (o, name) != ("static_graph", "accumulation")],
)
def test_correct_loops_with_ddp_options_do_not_warn(options: str, name: str) -> None:
    given = dict(OPTIONS[options])
    assert run_on_ranks(_heard, name, given, hook=given.pop("hook", None), init_group=False) == [[], []]


def _after_the_group() -> tuple[bool, list[str]]:
    before = DistributedDataParallel.__init__, DataLoader.__iter__
    with process_group():
        assert DistributedDataParallel.__init__ is not before[0]
        assert DataLoader.__iter__ is not before[1]
        loop = _Loop()
        plain(loop)
    with all_warnings() as caught:
        bare_forward(loop)
    after = DistributedDataParallel.__init__, DataLoader.__iter__
    return after == before, [str(one.message) for one in caught]


def test_no_hooks_remain_after_the_group() -> None:
    assert run_on_ranks(_after_the_group, init_group=False) == [(True, [])] * 2
