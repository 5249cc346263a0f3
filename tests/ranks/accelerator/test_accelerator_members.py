"""Rarely used members of the Accelerator and its state: same meaning as in Accelerate, or an error."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from echelon import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
    ProfileKwargs,
)
from echelon.base.errors import ConfigError, UsageError
from echelon.data.active_loaders import ActiveLoaders, LoaderOptions
from echelon.data.prepare_loader import prepare_loader
from echelon.state import AcceleratorState, GradientState
from echelon.utils import AutocastKwargs, ProjectConfiguration
from echelon.world.world import World
from tests.harness import RanksFailed, run_on_ranks


def _two_forwards(unused: bool) -> tuple[list[float], list[float], bool]:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)])
    inner = nn.Linear(1, 1, bias=False)
    inner.weight.data.fill_(1.0)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=1.0))
    rank = accelerator.process_index
    bystander = Accelerator()  # the context belongs to the Accelerator that prepared the model
    with accelerator.no_sync(model):
        first = model(torch.tensor([[1.0 + rank]])).sum()
        second = model(torch.tensor([[10.0 + 10 * rank]])).sum()
    accelerator.backward(first)
    local = inner.weight.grad.flatten().tolist()
    trigger = bystander.trigger_sync_in_backward if unused else Accelerator.trigger_sync_in_backward  # static
    with trigger(model):
        accelerator.backward(second)
    shared = inner.weight.grad.flatten().tolist()
    optimizer.step()  # a warning of the step guard would be an error
    with accelerator.no_sync(model):  # the context changes nothing afterwards
        accelerator.backward(model(torch.tensor([[1.0 + rank]])).sum())
    return local, shared, accelerator.session.engine.reduced(model)


@pytest.mark.parametrize("unused", [False, True])
def test_the_last_backward_of_several_forwards_reduces_all_gradients(unused: bool) -> None:
    # The gradient of w * x is x: 1 and 10 on rank 0, 2 and 20 on rank 1; the mean of 11 and 22 is 16.5.
    assert run_on_ranks(_two_forwards, unused) == [([1.0], [16.5], False), ([2.0], [16.5], False)]


def test_trigger_sync_in_backward_does_nothing_on_one_process() -> None:
    accelerator = Accelerator()
    stranger = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for one in (model, stranger):
        with accelerator.trigger_sync_in_backward(one):
            accelerator.backward(one(torch.tensor([[3.0]])).sum())
        assert one.weight.grad.item() == 3.0


def _over_devices() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].hf_device_map = {"weight": 0, "bias": "cpu"}
    Accelerator().prepare(model)


def test_a_model_on_several_devices_is_detected_and_not_replicated() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1))
    assert accelerator.verify_device_map(model) is False
    model[0].hf_device_map = {"": 0}
    assert accelerator.verify_device_map(model) is False
    model[0].hf_device_map = {"weight": 0, "bias": 1}
    assert accelerator.verify_device_map(model) is True
    with pytest.raises(
        RanksFailed, match=r"(?s)Sequential was loaded across several devices .*remove device_map"
    ) as failed:
        run_on_ranks(_over_devices)
    assert {type(error) for error in failed.value.errors.values()} == {UsageError}


def test_members_for_other_layouts_are_empty_or_raise() -> None:
    accelerator = Accelerator()
    batch = torch.arange(4.0).reshape(1, 4)
    with accelerator.maybe_context_parallel(buffers=[batch], buffer_seq_dims=[1], no_restore_buffers={batch}):
        assert batch.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    loader = object()
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, nn.Linear(1, 1)) is loader
    nothing = ("deepspeed_plugin", "parallelism_config", "torch_device_mesh")
    assert [getattr(accelerator, name) for name in nothing] == [None, None, None]
    assert (accelerator.is_fsdp2, accelerator.is_composable_parallelism_enabled) == (False, False)
    for name in (
        "context_parallel_rank",
        "data_parallel_rank",
        "data_parallel_shard_rank",
        "pipeline_parallel_rank",
        "tensor_parallel_rank",
    ):
        with pytest.raises(UsageError, match=f"{name} is not available, because no parallelism_config") as caught:
            getattr(accelerator, name)
        assert caught.value.do is not None
    with pytest.raises(UsageError, match="LOMO updates the parameters inside the backward pass"):
        accelerator.lomo_backward(torch.ones((), requires_grad=True), 0.1)
    for name in ("torch_tp_plugin", "megatron_lm_plugin"):
        with pytest.raises(ConfigError, match=rf"Accelerator\({name}=\) is not supported"):
            Accelerator(**{name: object()})


def test_given_handlers_are_readable_and_cannot_be_replaced() -> None:
    plain = Accelerator()
    names = ("autocast_handler", "ddp_handler", "init_handler", "profile_handler", "scaler_handler")
    assert [getattr(plain, name) for name in names] == [None] * 5
    given = [
        AutocastKwargs(cache_enabled=True),
        DistributedDataParallelKwargs(bucket_cap_mb=1),
        InitProcessGroupKwargs(timeout=timedelta(seconds=5)),
        ProfileKwargs(record_shapes=True),
        GradScalerKwargs(init_scale=2.0),
    ]
    accelerator = Accelerator(kwargs_handlers=given)
    assert [getattr(accelerator, name) for name in names] == given
    with pytest.raises(AttributeError):
        accelerator.ddp_handler = DistributedDataParallelKwargs()


class _Moves:
    """A batch that records how it was moved."""

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, bool]:
        return device.type, non_blocking


def test_models_and_batches_go_to_the_device_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.base.device.num_devices", lambda: 1)  # an accelerator of the kind "meta"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr("echelon.world.world.backend_of", lambda device: "gloo")

    def kinds(accelerator: Accelerator, **options: Any) -> tuple[str, str]:
        model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(2, 1)), **options)  # type: ignore[arg-type]
        return model.weight.device.type, next(iter(loader)).device.type

    assert (Accelerator().device.type, Accelerator(cpu=True).device.type) == ("meta", "cpu")
    assert kinds(Accelerator()) == ("meta", "meta")
    assert kinds(Accelerator(cpu=True)) == kinds(Accelerator(device_placement=False)) == ("cpu", "cpu")
    assert kinds(Accelerator(), device_placement=[False, True]) == ("cpu", "meta")
    for non_blocking in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=non_blocking))
        loader = accelerator.prepare(DataLoader(range(1), collate_fn=lambda samples: _Moves()))  # type: ignore[arg-type]
        assert list(loader) == [("meta", non_blocking)]


def test_batches_that_the_loader_pins_are_copied_asynchronously_on_cuda() -> None:
    """A blocking copy waits for everything in the stream: it was the only wait for the device in a step that logs nothing."""

    def copied(device: str, *, pin: bool) -> list[Any]:
        loader = DataLoader(range(1), collate_fn=lambda samples: _Moves(), pin_memory=pin)  # type: ignore[arg-type, var-annotated]
        world = dataclasses.replace(World.current(), device=torch.device(device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch finds no accelerator, and pins nothing
            return list(prepare_loader(loader, world=world, options=LoaderOptions(), active=ActiveLoaders()))

    assert copied("cuda:0", pin=True) == [("cuda", True)]
    assert copied("cuda:0", pin=False) == [
        ("cuda", False)
    ]  # as in accelerate: a tensor may be the dataset's own, and change
    assert copied("meta", pin=True) == [("meta", False)]


def test_the_autocast_handler_switches_autocast() -> None:
    def product(accelerator: Accelerator, handler: AutocastKwargs | None = None) -> torch.dtype:
        with accelerator.autocast(handler):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    off = AutocastKwargs(enabled=False)
    accelerator = Accelerator(mixed_precision="bf16")
    assert (product(accelerator), product(accelerator, off)) == (torch.bfloat16, torch.float32)
    assert product(Accelerator(mixed_precision="bf16", kwargs_handlers=[off])) == torch.float32


def test_a_copy_of_an_object_refers_to_the_same_accelerator() -> None:
    accelerator = Accelerator()
    assert copy.deepcopy({"accelerator": accelerator})["accelerator"] is accelerator


def test_the_data_loader_settings_are_readable_and_one_is_writable(tmp_path: Any) -> None:
    config = DataLoaderConfiguration(
        split_batches=True, dispatch_batches=False, even_batches=False, non_blocking=True, use_seedable_sampler=True
    )
    project = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "logs"), iteration=3)
    accelerator = Accelerator(dataloader_config=config, project_config=project)
    assert (accelerator.split_batches, accelerator.dispatch_batches, accelerator.even_batches) == (True, False, False)
    assert (accelerator.non_blocking, accelerator.use_seedable_sampler) == (True, True)
    assert accelerator.use_stateful_dataloader is False
    assert accelerator.dataloader_config is config
    accelerator.even_batches = True
    assert config.even_batches is True
    assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path), str(tmp_path / "logs"))
    assert (accelerator.save_iteration, accelerator.project_configuration) == (3, project)
    assert Accelerator(split_batches=True).split_batches is True


def _facts() -> dict[str, Any]:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs()])
    names = ("multi_device", "should_save_model", "native_amp", "is_last_process", "use_distributed", "num_processes")
    facts = {name: getattr(accelerator, name) for name in names}
    partial, state = PartialState(), AcceleratorState()
    facts["backends"] = (partial.backend, state.backend, dist.get_backend())
    facts["shown"] = repr(state).splitlines()[:4]
    facts["shared"] = (PartialState._shared_state["num_processes"], AcceleratorState._shared_state["mixed_precision"])
    facts["devices"] = [str(one) for one in (state.device, partial.default_device, accelerator.device)]
    partial.set_device()
    group = dist.new_group()
    dist.barrier(group)  # both have connected before one of them leaves
    partial.destroy_process_group(group)
    PartialState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    facts["still there"] = (dist.is_initialized(), AcceleratorState().num_processes)
    state.destroy_process_group()
    facts["ended"] = dist.is_initialized()
    return facts


def test_the_state_of_a_rank() -> None:
    first, second = run_on_ranks(_facts, init_group=False)
    assert (first.pop("should_save_model"), second.pop("should_save_model")) == (True, False)
    assert (first.pop("is_last_process"), second.pop("is_last_process")) == (False, True)
    assert first.pop("shown")[-1] == "process_index: 0"
    assert second.pop("shown") == [
        "distributed_type: DistributedType.MULTI_CPU",
        "backend: gloo",
        "num_processes: 2",
        "process_index: 1",
    ]
    assert first == second == {
        "multi_device": False,
        "native_amp": False,
        "use_distributed": True,
        "num_processes": 2,
        "backends": ("gloo", "gloo", "gloo"),  # the handler's default "nccl", like in accelerate, selects the backend by device
        "shared": (2, "no"),
        "devices": ["cpu", "cpu", "cpu"],
        "still there": (True, 2),
        "ended": False,
    }  # fmt: skip


def test_the_state_reports_unsupported_features(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    state = AcceleratorState()
    assert accelerator.native_amp is True
    names = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")
    assert [getattr(state, name) for name in (*names, "parallelism_config", "device_mesh")] == [None] * 7
    assert (state.is_fsdp2, state.initialized, state.fork_launched, state.debug) == (False, True, False, False)
    for call in (lambda: state.get_deepspeed_plugin("a"), lambda: state.select_deepspeed_plugin("a")):
        with pytest.raises(UsageError, match=r"deepspeed_plugin\(\): there is no DeepSpeed plugin"):
            call()
    with pytest.raises(UsageError, match=r"AcceleratorState\(fsdp_plugin=\) was called after"):
        AcceleratorState(fsdp_plugin=SimpleNamespace())
    with pytest.raises(UsageError, match=r"PartialState\(\) got unexpected arguments: nonsense"):
        PartialState(nonsense=1)
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    assert PartialState().debug is True


def test_the_shared_state_is_initially_empty() -> None:
    import gc

    gc.collect()
    assert AcceleratorState._shared_state == PartialState._shared_state == {}
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert AcceleratorState._shared_state["device"] == accelerator.device
    assert GradientState is type(accelerator.gradient_state)


def test_default_process_group_arguments_have_no_effect() -> None:
    handler = InitProcessGroupKwargs()
    assert (handler.backend, handler.init_method, handler.timeout) == ("nccl", None, timedelta(minutes=10))
    assert handler.to_kwargs() == {}
    assert InitProcessGroupKwargs(backend="gloo").to_kwargs() == {"backend": "gloo", "timeout": timedelta(minutes=30)}
