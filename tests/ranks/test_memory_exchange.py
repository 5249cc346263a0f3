"""Two processes that exchange gradients through shared memory train bit-equally to torch's DDP, which exchanges them by gloo."""

from __future__ import annotations

import copy
import gc
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from echelon import Accelerator
from echelon.accelerator.prepare import speed
from echelon.base.errors import DesyncError
from echelon.distributed.ddp import memory_exchange
from echelon.status.call_site import call_site_of_thread
from echelon.utils import DistributedDataParallelKwargs
from tests.harness import RankDied, RanksFailed, run_on_ranks

WIDTH = 384  # a layer has more than half a MiB of gradients
Found = tuple[bool, list[torch.Tensor]]
"""Whether gradients were exchanged in memory at the end, and everything that must be bit-equal."""


class _Branches(nn.Module):
    """Has dropout, and a layer that only some passes use, the same ones on both ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.sometimes = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.last = nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        x = nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        if uses_all:
            x = x + self.sometimes(x)
        return self.last(torch.relu(self.second(x)))  # type: ignore[no-any-return]


def _batches(num: int = 6, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    for i in range(num):
        torch.manual_seed(100 * i + dist.get_rank())  # dropout
        yield torch.randn(5, WIDTH, generator=draw, dtype=dtype)


def _prepared(*objects: Any, chosen: str = "safe", num_cores: int = 2, **options: Any) -> tuple[Any, Accelerator]:
    handlers: list[Any] = [DistributedDataParallelKwargs(**options)] if options else []
    accelerator = Accelerator(cpu=True, speed=chosen, kwargs_handlers=handlers)
    with patch.object(speed, "usable_cores", return_value=num_cores):
        return accelerator.prepare(*objects), accelerator


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _with_sgd(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, _sgd(model)


def _both(model: Callable[[], nn.Module], **options: Any) -> Iterator[tuple[nn.Module, Any, Any, Any]]:
    """Yield the bare model, the wrapper, its optimizer and the backward function: by hand, and prepared."""
    bare = model()
    wrapper: Any = DistributedDataParallel(bare, **options)
    yield bare, wrapper, _sgd(bare), torch.Tensor.backward
    bare = model()
    (wrapper, optimizer), accelerator = _prepared(bare, _sgd(bare), **options)
    assert wrapper.exchange is not None, "nothing is tested"
    yield bare, wrapper, optimizer, accelerator.backward
    accelerator.free_memory()


def _both_of_two() -> Iterator[tuple[list[Any], Any, Any, Any]]:
    """Yield as ``_both`` does, for two models and their optimizers."""
    bare: list[Any] = [_Branches(), _Branches()]
    yield bare, [DistributedDataParallel(one) for one in bare], list(map(_sgd, bare)), torch.Tensor.backward
    bare = [_Branches(), _Branches()]
    prepared, accelerator = _prepared(*bare, *map(_sgd, bare))
    assert all(one.exchange is not None for one in prepared[:2]), "nothing is tested"
    yield bare, prepared[:2], prepared[2:], accelerator.backward


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.full((1,), -7.0) if p.grad is None else p.grad.clone() for p in model.parameters()]


def _train(model: Callable[[], nn.Module], body: Callable[..., None], **options: Any) -> list[Found]:
    found = []
    for bare, wrapper, optimizer, backward in _both(model, **options):
        seen: list[torch.Tensor] = []
        body(bare, wrapper, optimizer, backward, seen)
        found.append((getattr(wrapper, "exchange", None) is not None, seen + _weights(bare)))
    return found


def _plain_loop(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    for x in _batches(dtype=bare.last.weight.dtype):
        optimizer.zero_grad()
        backward(wrapper(x).square().mean())
        seen += _gradients(bare)
        optimizer.step()


def _kept_gradients(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    """Read gradients after later passes have reused the shared memory."""
    kept = []
    for x in _batches():
        optimizer.zero_grad()
        backward(wrapper(x).square().mean())
        kept += [p.grad for p in bare.parameters()]
        optimizer.step()
    seen += kept


def _unused_layers(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    for i, x in enumerate(_batches()):
        optimizer.zero_grad()
        backward(wrapper(x, uses_all=i % 2 == 0).square().mean())
        seen += _gradients(bare)
        optimizer.step()


def _accumulating(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    batches = list(_batches(6))
    for i, x in enumerate(batches):
        torch.manual_seed(i)
        if i % 3 < 2:
            with wrapper.no_sync():
                backward(wrapper(x).square().mean())
        else:
            backward(wrapper(x).square().mean())
            seen += _gradients(bare)
            optimizer.step()
            optimizer.zero_grad()


def _two_passes_before_each_step(
    bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]
) -> None:
    for x in _batches():
        optimizer.zero_grad(set_to_none=False)
        backward(wrapper(x).square().mean())
        backward(wrapper(x + 1).square().mean())
        seen += _gradients(bare)
        optimizer.step()


def _not_finite(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    """Average gradients at the ends of the range: halves of subnormal numbers, and sums that only halves can represent."""
    for factor in (1e-41, 3e38, float("inf")):
        for x in _batches(2):
            optimizer.zero_grad()
            backward((wrapper(x) * factor).sum())
            seen += [gradient.nan_to_num(nan=5.0) for gradient in _gradients(bare)]


def _static_graph_set_later(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    """Make the graph static when DDP has several buckets already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that find_unused_parameters=True is not needed
        wrapper._set_static_graph()
    _plain_loop(bare, wrapper, optimizer, backward, seen)


def _second_derivatives(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    """Differentiate gradients, which DDP of torch 2.13 refuses with an error."""
    for x in _batches(3):
        optimizer.zero_grad()
        try:
            backward(wrapper(x).pow(4).mean(), create_graph=True)
        except RuntimeError as error:
            seen.append(torch.tensor(list(str(error).encode())))
            return
        norm: Any = sum(p.grad.square().sum() for p in bare.parameters())
        for p in bare.parameters():
            p.grad = None
        seen += [gradient.detach() for gradient in torch.autograd.grad(norm, list(bare.parameters()))]


def _flushing(bare: Any, wrapper: Any, optimizer: Any, backward: Any, seen: list[torch.Tensor]) -> None:
    """Average numbers whose halves are normal and whose sum is subnormal, in threads that round those to zero."""
    if not torch.set_flush_denormal(True):
        return
    try:
        weight = 3e-38 if dist.get_rank() else -2.6e-38
        for _ in range(2):
            optimizer.zero_grad()
            backward(wrapper(torch.ones(1, WIDTH)).sum() * 0 + sum((p * weight).sum() for p in bare.parameters()))
            seen += _gradients(bare)
    finally:
        torch.set_flush_denormal(False)


class _TwoDtypes(_Branches):
    """Has a bucket for each dtype, also with a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        return super().forward(x, uses_all=uses_all) * self.scale.float()


LOOPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (_plain_loop, {}),
    "several buckets": (_plain_loop, {"bucket_cap_mb": 0.3}),
    "gradients are views": (_plain_loop, {"gradient_as_bucket_view": True}),
    "static graph": (_plain_loop, {"static_graph": True}),
    "static graph set later": (_static_graph_set_later, {"find_unused_parameters": True, "bucket_cap_mb": 0.3}),
    "second derivatives": (_second_derivatives, {}),
    "flushed subnormal numbers": (_flushing, {}),
    "kept gradients": (_kept_gradients, {}),
    "unused layers": (_unused_layers, {"find_unused_parameters": True}),
    "accumulating": (_accumulating, {}),
    "two passes": (_two_passes_before_each_step, {}),
    "not finite": (_not_finite, {}),
}


def _all_loops() -> dict[str, list[Found]]:
    found = {name: _train(_Branches, body, **options) for name, (body, options) in LOOPS.items()}
    found["static graph, two dtypes"] = _train(_TwoDtypes, _plain_loop, static_graph=True)
    found["float64"] = _train(lambda: _Branches(torch.float64), _plain_loop)
    return found


@pytest.fixture(scope="module")
def loops() -> list[dict[str, list[Found]]]:
    return run_on_ranks(_all_loops, world_size=2)


@pytest.mark.parametrize("name", [*LOOPS, "static graph, two dtypes", "float64"])
def test_gradients_and_weights_are_those_of_ddp_by_hand(name: str, loops: list[dict[str, list[Found]]]) -> None:
    for rank in range(2):
        (_, expected), (was_in_memory, own) = loops[rank][name]
        assert was_in_memory
        assert len(own) == len(expected)
        assert all(map(torch.equal, own, expected))
    assert all(map(torch.equal, loops[0][name][1][1], loops[1][name][1][1]))


def _two_models() -> list[list[torch.Tensor]]:
    """Train a generator and a critic, whose buckets alternate within a backward pass."""
    found = []
    for bare, wrapped, optimizers, backward in _both_of_two():
        for x in _batches():
            for optimizer in optimizers:
                optimizer.zero_grad()
            y = nn.functional.pad(wrapped[0](x), (0, WIDTH - 3))
            backward(wrapped[1](y).square().mean() + y.square().mean())
            for optimizer in optimizers:
                optimizer.step()
        found.append([weight for one in bare for weight in _weights(one)])
    return found


def test_two_models_in_one_backward_pass_do_not_share_their_memory() -> None:
    for expected, own in run_on_ranks(_two_models, world_size=2):
        assert all(map(torch.equal, own, expected))


class _Late:
    """On rank 1, reads the other rank's fourth gradients only after that has written its fifth ones.

    (After steps 1, 2, 3 and 5, the ranks compare their weights, so that none can be ahead there.)
    """

    def __init__(self, group: Any) -> None:
        self._group, self._store = group, dist.distributed_c10d._get_default_store()
        self._rank, self._num = dist.get_rank(), 0

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._num += 1
        if self._rank == 0 and self._num == 5:
            self._store.set("written", "yes")
        self._work = self._group.allreduce(tensors)
        return self

    def get_future(self) -> Any:
        future = self._work.get_future()
        return future.then(self._wait_for_the_next) if self._rank == 1 and self._num == 4 else future

    def _wait_for_the_next(self, done: Any) -> Any:
        self._store.wait(["written"])
        return done.value()


def _with_a_late_reader() -> list[Found]:
    start = memory_exchange._Exchange.__init__

    def late(self: Any, pages: Any, wrapper: Any, **options: Any) -> None:
        start(self, pages, wrapper, **options)
        self._group = _Late(self._group)

    with patch.object(memory_exchange._Exchange, "__init__", late):
        return _train(_Branches, _plain_loop)


def test_a_rank_that_reads_late_reads_what_belongs_to_its_step() -> None:
    for (_, expected), (_, own) in run_on_ranks(_with_a_late_reader, world_size=2):
        assert all(map(torch.equal, own, expected))


def _uneven(divides_by_all: bool) -> list[list[torch.Tensor]]:
    """Rank 0 has 5 batches, rank 1 has 2."""
    found = []
    for bare, wrapper, optimizer, backward in _both(_Branches):
        for x in _batches(2):  # before, with all ranks
            optimizer.zero_grad()
            backward(wrapper(x).square().mean())
            optimizer.step()
        with wrapper.join(divide_by_initial_world_size=divides_by_all):
            for x in _batches(5 - 3 * dist.get_rank()):
                optimizer.zero_grad()
                backward(wrapper(x).square().mean())
                optimizer.step()
        found.append(_weights(bare))
    return found


@pytest.mark.parametrize("divides_by_all", [True, False])
def test_a_rank_without_batches_left_contributes_as_with_ddp(divides_by_all: bool) -> None:
    results = run_on_ranks(_uneven, divides_by_all, world_size=2)
    for expected, own in results:
        assert all(map(torch.equal, own, expected))
    assert all(map(torch.equal, results[0][1], results[1][1]))


def _two_uneven_models() -> list[list[torch.Tensor]]:
    """Join two models, of which torch counts the ranks with batches for the first one only."""
    found = []
    for bare, wrapped, optimizers, backward in _both_of_two():
        with Join(wrapped, divide_by_initial_world_size=False):
            for x in _batches(4 - 2 * dist.get_rank()):
                for wrapper, optimizer in zip(wrapped, optimizers):
                    optimizer.zero_grad()
                    backward(wrapper(x).square().mean())
                    optimizer.step()
        found.append([weight for one in bare for weight in _weights(one)])
    return found


def test_of_two_joined_models_each_is_divided_as_with_ddp() -> None:
    for expected, own in run_on_ranks(_two_uneven_models, world_size=2):
        assert all(map(torch.equal, own, expected))


def _own_hook(is_built_in: bool) -> list[Found]:
    """Register a hook after ``prepare``, between a forward and a backward pass: it replaces the exchange."""
    found = []
    for bare, wrapper, optimizer, backward in _both(_Branches):
        for step, x in enumerate(_batches()):
            optimizer.zero_grad()
            loss = wrapper(x).square().mean()
            if step == 2 and is_built_in:
                wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
            elif step == 2:
                wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
            backward(loss)
            optimizer.step()
        if not is_built_in:
            with pytest.raises(RuntimeError, match="only be called once"):
                wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
        found.append((getattr(wrapper, "exchange", None) is not None, _weights(bare)))
    return found


@pytest.mark.parametrize("is_built_in", [False, True])
def test_a_hook_of_the_script_replaces_the_exchange(is_built_in: bool) -> None:
    for (_, expected), (is_in_memory, own) in run_on_ranks(_own_hook, is_built_in, world_size=2):
        assert not is_in_memory
        assert all(map(torch.equal, own, expected))


def _unfrozen() -> list[Found]:
    """Unfreeze a layer, for which DDP by hand must be built again."""
    found = []
    for is_prepared in (False, True):
        bare: Any = _Branches()
        bare.first.requires_grad_(False)
        optimizer: Any = torch.optim.SGD(bare.parameters(), lr=0.05)
        wrapper: Any = DistributedDataParallel(bare)
        backward: Any = torch.Tensor.backward
        if is_prepared:
            (wrapper, optimizer), accelerator = _prepared(bare, optimizer)
            backward = accelerator.backward
            assert wrapper.exchange
        for step, x in enumerate(_batches()):
            if step == 3:
                bare.first.requires_grad_(True)
                wrapper = wrapper if is_prepared else DistributedDataParallel(bare)
            optimizer.zero_grad()
            backward(wrapper(x).square().mean())
            optimizer.step()
        found.append((getattr(wrapper, "exchange", None) is not None, _weights(bare)))
    return found


def test_a_model_that_changed_after_prepare_exchanges_by_gloo() -> None:
    for (_, expected), (is_in_memory, own) in run_on_ranks(_unfrozen, world_size=2):
        assert not is_in_memory
        assert all(map(torch.equal, own, expected))


def _is_exchanged(model: nn.Module, **options: Any) -> bool:
    wrapper, accelerator = _prepared(model, **options)
    accelerator.backward(wrapper(torch.randn(4, WIDTH)).square().mean())
    return wrapper.exchange is not None


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(WIDTH, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(x.long().abs() % WIDTH))  # type: ignore[no-any-return]


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def _choices() -> dict[str, bool]:
    half = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Half(WIDTH))
    found = {
        "safe": _is_exchanged(_wide()),
        "max": _is_exchanged(_wide(), chosen="max"),
        "off": _is_exchanged(_wide(), chosen="off"),
        "with a hook": _is_exchanged(_wide(), comm_hook="fp16"),
        "sparse": _is_exchanged(_Sparse()),
        "half precision": _is_exchanged(half),
        "small": _is_exchanged(nn.Linear(WIDTH, 2)),
        "free cores": _is_exchanged(_wide(), num_cores=3),
    }
    (model, _) = _prepared(_wide(), chosen="off")
    found["one rank only"] = model.exchange_in_memory(wanted=dist.get_rank() == 0, limit=1 << 30)
    found["too large"] = model.exchange_in_memory(wanted=True, limit=1 << 20)
    if dist.get_rank() == 0:
        with patch.object(os, "posix_fallocate", side_effect=OSError("no space left")):
            found["no memory"] = model.exchange_in_memory(wanted=True, limit=1 << 30)
    else:
        found["no memory"] = model.exchange_in_memory(wanted=True, limit=1 << 30)
    with patch.object(os, "readlink", return_value="socket:[4711]"):
        found["another process of that number"] = model.exchange_in_memory(wanted=True, limit=1 << 30)
    found["at last"] = model.exchange_in_memory(wanted=True, limit=1 << 30)
    return found


class _Half(nn.Linear):
    """Has a weight of half precision, which gloo adds in its own way."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).float()


def test_it_is_chosen_where_it_is_faster_and_has_the_same_bits() -> None:
    expected = dict.fromkeys(("safe", "max", "at last"), True) | dict.fromkeys(
        (
            "off",
            "with a hook",
            "sparse",
            "half precision",
            "small",
            "free cores",
            "one rank only",
            "too large",
            "no memory",
            "another process of that number",
        ),
        False,
    )
    assert run_on_ranks(_choices, world_size=2) == [expected] * 2


def _mapped() -> list[bool]:
    """Return, for each of the mappings, whether a forked process would not inherit it."""
    _, *found = re.split(r"^.*memfd:echelon-gradients.*$", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    flags = [re.search(r"^VmFlags:(.*)$", text, re.MULTILINE) for text in found]
    return [each is not None and "dc" in each[1].split() for each in flags]


def _open_files() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of listdir itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if "memfd:echelon" in link]


def _released() -> tuple[list[bool], list[str], list[bool]]:
    gc.collect()  # models of other tests
    (wrapper, _), accelerator = _prepared(*_with_sgd(_wide()))
    accelerator.backward(wrapper(torch.randn(4, WIDTH)).square().mean())
    during, files = _mapped(), _open_files()
    accelerator.free_memory()
    del wrapper, _
    gc.collect()
    return during, files, _mapped()


def test_the_memory_is_freed_with_the_model_and_no_file_is_open() -> None:
    assert run_on_ranks(_released, world_size=2) == [([True], [], [])] * 2


def _watched() -> bool:
    """Return whether rank 0 was seen waiting in the backward pass, which rank 1 joins only after that."""
    store, main = dist.distributed_c10d._get_default_store(), threading.get_ident()
    (wrapper, _), accelerator = _prepared(*_with_sgd(_Branches()))
    loss = wrapper(torch.ones(4, WIDTH)).square().mean()

    def watch() -> None:
        deadline, is_there = time.monotonic() + 30, False
        while not is_there and time.monotonic() < deadline:
            frames = traceback.extract_stack(sys._current_frames()[main])
            is_there = frames[-1].name != "_finish" and any(frame.name == "_finish" for frame in frames)
        site = call_site_of_thread(main)
        store.set("waits", str(site is not None and site.communicates))

    if dist.get_rank() == 0:
        thread = threading.Thread(target=watch)
        thread.start()
        accelerator.backward(loss)
        thread.join()
    else:
        store.wait(["waits"])
        accelerator.backward(loss)
    return store.get("waits") == b"True"


def test_a_rank_that_waits_for_the_other_one_is_seen_waiting() -> None:
    assert run_on_ranks(_watched, world_size=2) == [True] * 2


def _copied() -> tuple[bool, bool]:
    (wrapper, _), accelerator = _prepared(*_with_sgd(_Branches()))
    twin: Any = copy.deepcopy(wrapper)
    for each in (wrapper, twin):
        torch.manual_seed(dist.get_rank())
        accelerator.backward(each(torch.full((4, WIDTH), 1.0 + dist.get_rank())).square().mean())
    return twin.exchange is not None, all(map(torch.equal, _gradients(wrapper), _gradients(twin)))


def test_a_copy_of_the_model_exchanges_by_gloo() -> None:
    assert run_on_ranks(_copied, world_size=2) == [(False, True)] * 2


def _elsewhere(other: torch.Tensor) -> None:
    """On rank 1, call another collective operation instead of the third backward pass."""
    (wrapper, _), accelerator = _prepared(*_with_sgd(_Branches()))
    for step, x in enumerate(_batches()):
        loss = wrapper(x).square().mean()
        if step == 2 and dist.get_rank() == 1:
            dist.all_reduce(other)
        accelerator.backward(loss)


@pytest.mark.parametrize(
    ("other", "kind", "says"),
    [
        (
            torch.ones(3, dtype=torch.int64),
            DesyncError,
            "rank 0 exchanges the gradients of backward pass 3 of a prepared model, but",
        ),
        (torch.ones(()), RuntimeError, "gloo"),  # as with gloo, which compares the sizes
    ],
    ids=["the same size", "another size"],
)
def test_another_collective_of_the_other_rank_is_an_error(
    other: torch.Tensor, kind: type[Exception], says: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_elsewhere, other, world_size=2)
    assert any(isinstance(error, kind) and says in str(error) for error in caught.value.errors.values())


def _another_model() -> None:
    """In the second step, train one model on rank 0 and the other one, of the same shape, on rank 1."""
    models, accelerator = _prepared(_Branches(), _Branches())
    for step, x in enumerate(_batches(2)):
        chosen = models[dist.get_rank()] if step else models[0]
        if step == 0:
            accelerator.backward(models[1](x).square().mean())
        accelerator.backward(chosen(x).square().mean())


def test_the_gradients_of_another_model_are_not_taken_for_those_of_this_one() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_another_model, world_size=2)
    errors = caught.value.errors.values()
    assert any(isinstance(error, DesyncError) and "is in another backward pass" in str(error) for error in errors)


def _leaves() -> None:
    (wrapper, _), accelerator = _prepared(*_with_sgd(_Branches()))
    for step, x in enumerate(_batches()):
        if step == 2 and dist.get_rank() == 1:
            os._exit(3)
        accelerator.backward(wrapper(x).square().mean())


def test_a_rank_that_ends_leaves_an_error_on_the_other_one() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_leaves, world_size=2)
    errors = caught.value.errors
    assert isinstance(errors[1], RankDied)
    assert "gloo" in str(errors[0])
    assert "onnection" in str(errors[0])  # closed, or reset
