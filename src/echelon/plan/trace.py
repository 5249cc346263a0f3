"""Traces one step of a model under fake tensors: the memory while each operator runs, its line, and the work of each block."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from echelon.base.messages.translation import gettext_noop as N_
from echelon.distributed.tree import map_tensors
from echelon.engines.activation_checkpointing import blocks_of, checkpoint_activations
from echelon.engines.chunked_loss import chunk_loss
from echelon.engines.expert_parallel.moe import find_experts
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.fsdp.wrap_policy import modules_to_shard
from echelon.engines.random_numbers import restore_states, save_states
from echelon.plan.cuda_operators import run_as_on_cuda
from echelon.plan.facts import ModelFacts, Moment, Phase, StepSettings, StepTrace
from echelon.plan.fake_copy import compiles_its_step, fake_model, fake_optimizer
from echelon.plan.fake_run import FakeRun, fake_like, fake_mode, stand_in_values, tensors_in
from echelon.plan.model_facts import model_facts
from echelon.plan.repeated_blocks import NotPeriodicError, RepeatedBlocks, repeat_blocks, repeat_sums, repeated_blocks
from echelon.plan.storages import Operator, StorageLedger, moments_of
from echelon.precision.policy import PrecisionPolicy

Device = Literal["cuda", "cpu"]
"""The device whose operators are traced. Kernels differ: fused attention, dropout, the dtypes of autocast, foreach optimizers."""

_LINE = "echelon_line"  # key in the metadata of autograd's nodes
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).resolve().parents[1]), "<")
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward})
_ATTENTION = frozenset({torch.nn.functional.scaled_dot_product_attention})
_FLASH_ON_CPU_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_NOTES = (
    N_(
        "not counted: fragmentation of the allocator, workspaces of kernels (cuBLAS, cuDNN), NCCL's buffers, the CUDA context"
    ),
    N_("attention: the fused kernels that torch chooses on CUDA, which do not keep the scores"),
)


def trace_step(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    settings: StepSettings,
    *,
    sharding: ShardingOptions | None = None,
    blocks: tuple[str, ...] = (),
    adapt: Callable[[nn.Module, StepSettings], None] | None = None,
    device: Device = "cuda",
) -> tuple[ModelFacts, StepTrace]:
    """Run a step of a copy of ``model`` that has no memory, and return what it would have in memory.

    ``model`` is unchanged, and may be on the meta device. Its units are the modules that ``fully_shard`` shards as one (see
    ``modules_to_shard``): by default the classes in ``_no_split_modules``.

    Args:
        model: the model, not prepared.
        optimizer: of the parameters of ``model``, or a function that makes one of trained parameters.
        compute_loss: returns the loss of a model for a batch: a scalar.
        batch: ``settings.micro_batch`` samples: values of tensors up to 16 MiB are kept, as masks and labels need them.
        settings: what changes the memory of a step on one device.
        sharding: selects the units.
        blocks: classes of the blocks that are recomputed (``activation_checkpointing_blocks``).
        adapt: changes the copy of the model before the step.
        device: whose operators are traced.

    Raises:
        ConfigError: the activation checkpointing mode does not fit the model.
        UsageError: the model or the optimizer cannot be copied, or the loss cannot be computed in chunks.
    """
    try:
        return _trace(model, optimizer, compute_loss, batch, settings, sharding, blocks, adapt, device, is_short=True)
    except NotPeriodicError:
        return _trace(model, optimizer, compute_loss, batch, settings, sharding, blocks, adapt, device, is_short=False)


def _trace(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    settings: StepSettings,
    sharding: ShardingOptions | None,
    blocks: tuple[str, ...],
    adapt: Callable[[nn.Module, StepSettings], None] | None,
    device: Device,
    *,
    is_short: bool,
) -> tuple[ModelFacts, StepTrace]:
    mode = fake_mode()
    masters = settings.mixed_precision != "no" and settings.master_weights == "float32"
    names = {module: name for name, module in model.named_modules()}
    sharded = modules_to_shard(model, sharding or ShardingOptions())
    # Blocks that differ are all traced; so are those of a layout whose blocks are not units.
    repeated = [one for one in repeated_blocks(model) if is_short and {*sharded} >= {*one.blocks}]
    copied, fakes, copies = fake_model(model, mode, masters=masters, repeated=repeated)
    units = {copies[id(module)]: names[module] for module in sharded if id(module) in copies}
    copied.train()
    stepping = fake_optimizer(optimizer, fakes, copied, device=device)
    batch = map_tensors(lambda one: _without_memory(one, mode), batch)
    if adapt is not None:
        adapt(copied, settings)
    if settings.loss_chunk is not None:
        chunk_loss(copied, settings.loss_chunk)
    recorder = TracedStep(copied, units, device=device)
    if settings.activation_checkpointing != "none":
        where = "activation_checkpointing"
        recomputed = blocks_of(copied, blocks, where=where)
        for block in recomputed:
            recorder.watch(block, offloads=settings.activation_checkpointing == "offload")
        # On the CPU, where fake tensors are, nothing is moved: the recorder knows what would be.
        mode_on_cpu = "full" if settings.activation_checkpointing == "offload" else settings.activation_checkpointing
        checkpoint_activations(recomputed, mode_on_cpu, where=where)
    PrecisionPolicy(mode=settings.mixed_precision, device_type="cpu").wrap_forward(copied)  # type: ignore[arg-type]

    recorder.exclude(tensors_in(batch))
    states = save_states(torch.device("cpu"))
    try:
        with FakeRun(mode, recorder.observe), recorder:
            compute_loss(copied, batch).backward()  # type: ignore[no-untyped-call]
            recorder.name_gradients()
            recorder.run_optimizer(stepping)
            if repeated:  # again, with its states
                recorder.run_optimizer(stepping)
            for one in repeated:
                recorder.run_optimizer(stepping, without=copies[id(one.blocks[2])])
            recorder.name_states(stepping)
    finally:
        restore_states(torch.device("cpu"), states)
    for one in repeated:
        for old, new in one.twins():
            if id(old) in fakes:
                fakes.setdefault(id(new), fakes[id(old)])
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else stepping.param_groups
    facts = model_facts(model, [names[module] for module in sharded], fakes, stepping, groups)
    trace = recorder.trace(settings, batch, repeated)
    if compiles_its_step(stepping):
        moments = (replace(one, temporaries=0) if one.phase == "optimizer" else one for one in trace.moments)
        trace = replace(trace, moments=tuple(moments))
    return facts, trace


def _without_memory(tensor: torch.Tensor, mode: Any) -> torch.Tensor:
    """Return ``tensor``, or a fake one in its place if it has no values that a model could ask for."""
    return fake_like(tensor, mode) if tensor.is_floating_point() or tensor.is_meta else tensor


class TracedStep(TorchFunctionMode):
    """Sees the functions of torch that a step calls, and the operators that they run; knows the line and the unit of each."""

    def __init__(self, model: nn.Module, units: dict[nn.Module, str], *, device: Device) -> None:
        super().__init__()
        self._model = model
        self._device = device
        self._parameters = {id(p.untyped_storage()) for p in model.parameters() if p.layout == torch.strided}
        self.ledger = StorageLedger([*model.parameters(), *model.buffers()])
        self.flops: Counter[str] = Counter()
        self.bytes_moved: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.outputs: dict[str, int] = {}
        self.attention: dict[str, tuple[int, int]] = {}
        self.routed: dict[str, int] = {}
        self._phase: Phase = "forward"
        self._line = ""  # of the function that runs
        self._node = ("", "")  # line and unit of the backward pass's node that runs
        self._units: list[str] = []
        self._optimizer_steps: list[range] = []
        self._optimizer_bytes: list[int] = []
        self._depth = 0
        experts = {*find_experts(model).values()}
        for module in model.modules():
            if module in experts:  # called with hidden_states, top_k_index, top_k_weights
                module.register_forward_pre_hook(self._note_routed, with_kwargs=True)
            module.register_forward_pre_hook(partial(self._enter, units.get(module)))
            module.register_forward_hook(partial(self._leave, units.get(module)), always_call=True)

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD and self._phase != "backward":
            return self._backward(func, args, kwargs)
        if (values := stand_in_values(func, args)) is not None:
            return values
        before, self._line = self._line, self._line or _line_of(inspect.currentframe())
        try:
            if func in _ATTENTION:
                self._note_attention(*args, **kwargs)
            result = run_as_on_cuda(func, args, kwargs) if self._device == "cuda" else func(*args, **kwargs)
            if self._phase == "forward":
                self._label(result)
            return result
        finally:
            self._line = before

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operator that has just run. (For ``FakeRun``.)"""
        if func.namespace == "prim" or func.overloadpacket.__name__ == "_local_scalar_dense":  # answers for Python
            return
        name, line, unit = func.overloadpacket.__name__, self._line or self._node[0], self._unit()
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        kind = "temporaries"
        if name == "_to_copy" and id(inputs[0].untyped_storage()) in self._parameters:
            kind = "weight_copies"
        operator = Operator(self._phase, unit, f"{line} {name}".lstrip())
        if name == _FLASH_ON_CPU_BACKWARD and self._device == "cuda":
            operator.inside = 4 * inputs[1].numel()  # the gradient of the queries is summed in float32
        self.ledger.record(operator, outputs, kind=kind)
        self.flops[unit] += _flops(func, args, kwargs, result)
        num_bytes = 0 if func.is_view else sum(one.numel() * one.element_size() for one in (*inputs, *outputs))
        if self._phase == "optimizer":
            self._optimizer_bytes[-1] += num_bytes
        else:
            self.bytes_moved[unit] += num_bytes
            self.operators[unit] += not func.is_view

    def _backward(self, func: Any, args: Any, kwargs: Any) -> None:
        self._label(args[:1] or kwargs.get("tensors"))
        self.ledger.end_forward()
        with self.phase_of("backward", ""):
            func(*args, **kwargs)

    @contextmanager
    def phase_of(self, phase: Phase, line: str) -> Iterator[None]:
        """Attribute the operators inside the block to ``phase`` and ``line``."""
        before = self._phase, self._line
        self._phase, self._line, self._node = phase, line, ("", "")
        try:
            yield
        finally:
            self._phase, self._line = before

    def _label(self, result: Any) -> None:
        """Let the nodes that a function has added to autograd's graph know the line and the unit of the function."""
        label = (self._line, self._unit())
        nodes: list[Any] = [one.grad_fn for one in tensors_in(result)]
        while nodes:
            node = nodes.pop()
            if node is not None and _LINE not in node.metadata:
                node.metadata[_LINE] = label
                node.register_prehook(partial(self._run_node, label))
                nodes += [one for one, _number in node.next_functions]

    def _unit(self) -> str:
        """Return the unit that runs; in a backward pass, that of the node that runs."""
        return self._units[-1] if self._units else self._node[1]

    def _run_node(self, label: tuple[str, str], _gradients: Any) -> None:
        self._node = label

    # ---- units -------------------------------------------------------------------------------------------------------

    def watch(self, block: nn.Module, *, offloads: bool) -> None:
        """See the functions that the forward pass of ``block`` calls, also when it is recomputed. Call before it is wrapped.

        Args:
            offloads: whether the block's positional arguments are kept on the CPU, as ``offload`` does on an accelerator.
        """
        block.forward = partial(self._watched, block.forward, block if offloads else None)

    def _watched(self, forward: Callable[..., Any], offloading: nn.Module | None, *args: Any, **kwargs: Any) -> Any:
        if offloading is not None and self._phase == "backward":
            self.ledger.bring_back(offloading)
        self._resume()
        try:
            return forward(*args, **kwargs)
        finally:
            self._pause()
            if offloading is not None and self._phase == "forward":
                self.ledger.move_away(offloading, tensors_in(args))

    def _resume(self) -> None:
        """In a backward pass, torch has left this mode: enter it for the modules that are recomputed."""
        if self._phase == "backward":
            self._depth += 1
            if self._depth == 1:
                self.__enter__()  # type: ignore[no-untyped-call]

    def _pause(self) -> None:
        if self._phase == "backward":
            self._depth -= 1
            if self._depth == 0:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _enter(self, name: str | None, _module: nn.Module, _args: Any) -> None:
        self._resume()
        if name is not None:
            self._units.append(name)

    def _leave(self, name: str | None, _module: nn.Module, _args: Any, outputs: Any) -> None:
        if name is not None:
            self._units.pop()
            self.outputs[name] = sum(one.numel() * one.element_size() for one in tensors_in(outputs))
        self._pause()

    def _note_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_args: Any, **_k: Any
    ) -> None:
        sizes = [one.numel() * one.element_size() for one in (query, key, value)]
        self.attention[self._unit()] = (sizes[0], sizes[1] + sizes[2])

    def _note_routed(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden_states, top_k_index = [*args, *kwargs.values()][:2]
        # Each token is a row for each of its experts.
        row = hidden_states.shape[-1] * hidden_states.element_size()
        self.routed[self._unit()] = top_k_index.numel() * row

    # ---- what storages are for ---------------------------------------------------------------------------------------

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these tensors."""
        for tensor in tensors:
            self.ledger.exclude(tensor)

    def name_gradients(self) -> None:
        """Note which storages are the gradients of parameters."""
        self.ledger.name((p.grad for p in self._model.parameters() if p.grad is not None), "gradients")

    def name_states(self, optimizer: Optimizer) -> None:
        """Do not count what the optimizer keeps."""
        self.exclude(one for state in optimizer.state.values() for one in tensors_in(state))

    def run_optimizer(self, optimizer: Optimizer, *, without: nn.Module | None = None) -> None:
        """Step ``optimizer``, which has its states from the first call on, ``without`` the parameters of a module."""
        held = [] if without is None else [(p, p.grad) for p in without.parameters()]
        for parameter, _gradient in held:
            parameter.grad = None
        start = len(self.ledger.operators)
        self._optimizer_bytes.append(0)
        # set_stance imports the compiler, a second.
        eagerly = torch.compiler.set_stance("force_eager") if compiles_its_step(optimizer) else nullcontext()
        with eagerly, self.phase_of("optimizer", f"{type(optimizer).__name__}.step"):
            optimizer.step()
        for parameter, gradient in held:
            parameter.grad = gradient
        self._optimizer_steps.append(range(start, len(self.ledger.operators)))

    def _moments(self, repeated: list[RepeatedBlocks]) -> list[Moment]:
        """Return the moments of a whole step, with the blocks that were left out."""
        operators, storages = self.ledger.operators, self.ledger.storages
        for one in repeated:
            operators, storages = repeat_blocks(operators, storages, one)
        moments = list(moments_of(operators, storages))
        if not repeated:
            return moments
        added = len(moments) - len(self.ledger.operators)
        _first, whole, *others = (moments[one.start + added : one.stop + added] for one in self._optimizer_steps)
        step = whole
        for one, less in zip(repeated, others, strict=True):
            # Of operators on the lists of all parameters: each block adds what the step without one block lacks.
            if len(less) == len(whole):
                missing = [full.temporaries - other.temporaries for full, other in zip(whole, less, strict=True)]
                added_by = [len(one.left_out) * change for change in missing]
                step = [replace(m, temporaries=m.temporaries + more) for m, more in zip(step, added_by, strict=True)]
        return moments[: self._optimizer_steps[0].start + added] + step

    def _sums(self, repeated: list[RepeatedBlocks]) -> list[dict[str, Any]]:
        """Return what is kept by unit: operations, bytes moved, operators, bytes of outputs, of attention, and of experts' rows."""
        counted: list[dict[str, Any]] = [dict(one) for one in (self.flops, self.bytes_moved, self.operators)]
        sums = [*counted, self.outputs, self.attention, self.routed]
        for one in repeated:
            sums = [repeat_sums(found, one) for found in sums]
        step, *others = self._optimizer_bytes[1:] if repeated else self._optimizer_bytes
        left_out = (len(one.left_out) * (step - less) for one, less in zip(repeated, others, strict=True))
        sums[1][""] = sums[1].get("", 0) + step + sum(left_out)
        return sums

    def trace(self, settings: StepSettings, batch: Any, repeated: list[RepeatedBlocks]) -> StepTrace:
        """Return what was seen."""
        tensors = list(tensors_in(batch))
        flops, bytes_moved, operators, outputs, attention, routed = self._sums(repeated)
        return StepTrace(
            settings=settings,
            moments=tuple(self._moments(repeated)),
            flops=flops,
            bytes_moved=bytes_moved,
            operators=operators,
            batch_bytes=sum(one.untyped_storage().nbytes() for one in tensors),
            tokens=max((one.numel() for one in tensors if not one.is_floating_point()), default=settings.micro_batch),
            outputs=outputs,
            attention=attention,
            routed=routed,
            notes=_NOTES if self._device == "cuda" else (),
        )


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of an operator, counted as in ``torch.utils.flop_counter``."""
    name = func.overloadpacket.__name__.replace("_for_cpu", "")  # flash attention
    packet = getattr(torch.ops.aten, name) if name.startswith("_scaled_dot") else func.overloadpacket
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _line_of(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost call outside of torch and echelon; empty if the step has none (``nn.Sequential``)."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        if frame.f_code is _trace.__code__:  # what called the plan is no part of the step
            return ""
        frame = frame.f_back
    return "" if frame is None else f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache(maxsize=1024)
def _short(file: str) -> str:
    return file.rpartition("site-packages/")[2]
