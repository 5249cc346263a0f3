"""Hooks around forward passes: their order, what they move, and that removing them restores the module."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import fx, nn

from echelon.base.errors import UsageError
from echelon.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from echelon.utils import align_module_device, find_tied_parameters, has_offloaded_params, set_module_tensor_to_device
from echelon.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


class Log(ModelHook):
    """Adds what happens to a list; ``add`` is added to inputs, outputs are multiplied by ``times``."""

    def __init__(self, name: str, log: list[str], add: float = 0, times: float = 1) -> None:
        self.name, self.log, self.add, self.times = name, log, add, times

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"init {self.name}")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"pre {self.name}")
        return tuple(x + self.add for x in args), {key: x + self.add for key, x in kwargs.items()}

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append(f"post {self.name}")
        return output * self.times

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"detach {self.name}")
        return module


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_hooks_run_in_their_order_before_and_after_forward() -> None:
    log: list[str] = []
    module = Double()
    add_hook_to_module(module, Log("a", log, add=1))
    assert add_hook_to_module(module, Log("b", log, add=10, times=3), append=True) is module
    assert log == ["init a", "detach a", "init a", "init b"]
    log.clear()
    assert module(torch.ones(())) == 2 * 12 * 3
    assert module(x=torch.ones(())) == 72
    assert log == ["pre a", "pre b", "post a", "post b"] * 2
    assert isinstance(module._hf_hook, SequentialHook)


def test_a_hook_replaces_the_one_before_and_removing_restores_forward() -> None:
    log: list[str] = []
    module = Double()
    add_hook_to_module(module, Log("a", log, add=1))
    add_hook_to_module(module, Log("b", log, add=10))
    assert module(torch.ones(())) == 22
    assert inspect.signature(module.forward) == inspect.signature(Double().forward)
    assert remove_hook_from_module(module) is module
    assert module(torch.ones(())) == 2
    assert log == ["init a", "init b", "pre b", "post b", "detach b"]
    assert vars(module).keys() == vars(Double()).keys()
    remove_hook_from_module(module)


def test_a_forward_that_was_set_on_the_instance_is_restored() -> None:
    module = Double()
    module.forward = own = lambda x: 5 * x
    add_hook_to_module(module, ModelHook())
    assert module(torch.ones(())) == 5
    remove_hook_from_module(module)
    assert module.forward is own


def test_a_graph_is_hooked_in_its_class_and_recompiles_later() -> None:
    graph = fx.symbolic_trace(nn.Sequential(Double()))
    log: list[str] = []
    add_hook_to_module(graph, Log("a", log, add=1))
    assert graph(torch.ones(())) == 4
    remove_hook_from_module(graph)
    assert graph(torch.ones(())) == 2
    graph.recompile()
    assert graph(torch.ones(())) == 2


def test_no_grad_runs_forward_without_gradients() -> None:
    module = nn.Linear(2, 2)
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(torch.ones(2)).requires_grad


def test_a_copy_of_a_hooked_module_runs_its_own_weights() -> None:
    module = nn.Linear(2, 2)
    attach_align_device_hook(module, torch.device("cpu"), offload=True)
    copied = copy.deepcopy(module)
    before = module(torch.ones(2))
    copied._hf_hook.weights_map["weight"].data.zero_()
    copied._hf_hook.weights_map["bias"].data.zero_()
    assert copied(torch.ones(2)).tolist() == [0, 0]
    assert torch.equal(module(torch.ones(2)), before)


def test_submodules_lose_their_hooks_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    attach_execution_device_hook(model, "cpu")
    assert all(hasattr(module, "_hf_hook") for module in model.modules())
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Sequential"])
    assert [hasattr(module, "_hf_hook") for module in model.modules()] == [True, False, False, False]


def test_offloaded_weights_are_on_the_device_only_while_the_module_runs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x = torch.randn(5, 3)
    expected, state = model(x), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append(model[0].weight.device.type + model[2].weight.device.type))
    attach_align_device_hook(model, torch.device("cpu"), offload=True)
    assert {name: tensor.device.type for name, tensor in model.named_parameters()} == dict.fromkeys(
        dict(model.named_parameters()), "meta"
    )
    assert model[1].running_mean.device.type == "cpu"
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    # torch's own hooks run around the replaced forward.
    assert seen == ["metameta", "metameta"]
    assert [has_offloaded_params(module) for module in model.modules()] == [False, True, True, True]
    remove_hook_from_module(model, recurse=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_buffers_are_offloaded_on_request_unless_they_are_not_in_the_state_dict() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("saved", torch.ones(2))
            self.register_buffer("computed", torch.ones(2), persistent=False)

        def forward(self) -> torch.Tensor:
            return self.saved + self.computed

    module = Table()
    attach_align_device_hook(module, torch.device("cpu"), offload=True, offload_buffers=True)
    assert (module.saved.device.type, module.computed.device.type) == ("meta", "cpu")
    assert module().tolist() == [2, 2]
    assert module.saved.is_meta


def test_a_preloaded_class_loads_the_weights_of_its_submodules() -> None:
    class Direct(nn.Module):
        """Uses the weight of a layer without calling the layer."""

        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.dense.weight

    model = nn.Sequential(Direct())
    expected = model(torch.eye(2))
    attach_align_device_hook(model, torch.device("cpu"), offload=True, preload_module_classes=["Direct"])
    assert model[0].dense.weight.is_meta
    assert not hasattr(model[0].dense, "_hf_hook")
    assert torch.equal(model(torch.eye(2)), expected)
    assert model[0].dense.weight.is_meta


def test_blocks_have_their_own_places() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2)), "c": nn.Linear(2, 2)})
    model.forward = lambda x: model["c"](model["b"](model["a"](x)))
    x = torch.ones(2)
    expected = model(x)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook_on_blocks(
        model, {"a": "cpu", "b": "cpu", "c": "cpu"}, {"a": False, "b": True, "c": False}, weights
    )
    assert [name for name, p in model.named_parameters() if p.is_meta] == ["b.0.weight", "b.0.bias"]
    assert torch.equal(model(x), expected)
    assert model._hf_hook.io_same_device
    weights["b.0.bias"] += 1
    assert not torch.equal(model(x), expected)
    alone = nn.Linear(2, 2)
    attach_align_device_hook_on_blocks(alone, "cpu")
    assert (alone._hf_hook.io_same_device, alone._hf_hook.place_submodules) == (True, True)


def test_inputs_go_to_the_device_and_outputs_back() -> None:
    module = Double()
    add_hook_to_module(module, AlignDevicesHook("meta", io_same_device=False, skip_keys="kept"))
    args, kwargs = module._hf_hook.pre_forward(module, [torch.ones(1)], x=torch.ones(1), kept=torch.ones(1))
    assert (args[0][0].device.type, kwargs["x"].device.type, kwargs["kept"].device.type) == ("meta", "meta", "cpu")
    back = AlignDevicesHook(io_same_device=True)
    assert back.pre_forward(module, torch.ones(1, device="meta")) != ((), {})
    assert back.post_forward(module, {"y": torch.ones(1)})["y"].is_meta
    assert "io_same_device=True" in repr(back)


def test_a_module_is_aligned_in_a_block() -> None:
    module = nn.Linear(2, 2)
    value = module.weight.detach().clone()
    with align_module_device(module, "meta"):
        assert module.weight.is_meta
    assert torch.equal(module.weight, value)
    attach_align_device_hook(module, "meta", offload=True)
    with align_module_device(module, "cpu"):
        assert torch.equal(module.weight, value)
    assert module._hf_hook.execution_device == "meta"
    with align_module_device(nn.Linear(1, 1)):
        pass


def test_models_of_a_pipeline_take_turns_on_the_device() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    hook = CpuOffload("cpu")
    add_hook_to_module(first, hook)
    of_first = UserCpuOffloadHook(first, hook)
    moved: list[str] = []
    first.to = lambda *args, **kwargs: moved.append(str(args)) or first  # type: ignore[method-assign,func-returns-value]
    of_first.offload()
    assert moved == ["('cpu',)"]
    add_hook_to_module(second, CpuOffload("cpu", prev_module_hook=of_first))
    second(torch.ones(2))
    assert moved == ["('cpu',)"]  # it is on the CPU already
    of_first.remove()
    assert not hasattr(first, "_hf_hook")
    assert CpuOffload().execution_device is not None


def test_layers_are_stored_in_one_dtype_and_run_in_another() -> None:
    from echelon.big_modeling import attach_layerwise_casting_hooks

    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Sequential(nn.Linear(3, 3)), nn.Conv1d(3, 3, 1))
    rounded = copy.deepcopy(model)
    for layer in (rounded[0], rounded[3]):
        layer.to(torch.bfloat16).to(torch.float32)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append((output.dtype, module.weight.dtype)))
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, skip_modules_pattern=r"^2\.")
    dtypes = [parameter.dtype for parameter in model.parameters()]
    half, whole = torch.bfloat16, torch.float32
    assert dtypes == [half, half, whole, whole, whole, whole, half, half]
    x = torch.randn(3, 3)
    assert torch.equal(model[:3](x), rounded[:3](x))
    assert seen == [(whole, half)]
    other = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1))
    attach_layerwise_casting_hooks(other, half, whole, skip_modules_classes=(nn.Linear,), non_blocking=True)
    assert [parameter.dtype for parameter in other.parameters()] == [whole, whole, half, half]
    assert isinstance(other[1]._hf_hook, LayerwiseCastingHook)
    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


def test_a_tensor_is_replaced_with_its_attributes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.kind = "special"
    model[0].weight.requires_grad_(False)
    set_module_tensor_to_device(model, "0.weight", "meta", dtype="float16")
    weight = model[0].weight
    assert (weight.is_meta, weight.dtype, weight.kind, weight.requires_grad) == (True, torch.float16, "special", False)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2, dtype=torch.float64))
    assert (model[0].weight.dtype, model[0].weight.sum().item()) == (torch.float16, 4)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2), dtype=torch.float64)
    assert model[0].weight.dtype == torch.float64
    set_module_tensor_to_device(model, "1.num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16)
    assert (model[1].num_batches_tracked.dtype, model[1].num_batches_tracked.item()) == (torch.int64, 3)
    before = model[0].bias
    set_module_tensor_to_device(model, "0.bias", "cpu")
    assert model[0].bias is before
    set_module_tensor_to_device(model[0], "bias", "cpu", value=torch.zeros(2), fp16_statistics=torch.ones(1))
    assert model[0].bias.SCB.item() == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("0.none", None, "Sequential has no parameter or buffer 0.none"),
        ("5.weight", None, "Sequential has no parameter or buffer 5.weight"),
        ("0.weight", None, "0.weight is on the meta device, so it has no values to move to cpu"),
        ("0.weight", torch.ones(3), r"expected values of shape \[2, 2\] for 0.weight, but got \[3\]"),
    ],
)
def test_a_tensor_that_cannot_be_set_is_an_error(name: str, value: Any, message: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=message):
        set_module_tensor_to_device(model, name, "cpu", value=value)


def test_tied_parameters_share_one_copy_per_device() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    tied: dict[int, dict[Any, torch.Tensor]] = {model["a"].weight.data_ptr(): {}}
    new = torch.ones(2, 2)
    tied[new.data_ptr()] = {}
    for name in ("a.weight", "b.weight"):
        set_module_tensor_to_device(model, name, "cpu", value=new, tied_params_map=tied)
    assert model["a"].weight is model["b"].weight
    assert find_tied_parameters(model) == [["a.weight", "b.weight"]]
