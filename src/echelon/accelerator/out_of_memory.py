"""What fills a rank's memory when an allocation fails: the largest tensors by name, and the switch that would have saved most."""

from __future__ import annotations

import gc
import re
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from echelon.accelerator.current import living_accelerators
from echelon.accelerator.session import Session
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext as _
from echelon.base.sharded import is_dtensor
from echelon.engines.activation_checkpointing import recomputes_itself
from echelon.world.launch_variables import board_slot

_NUM_SHOWN = 10
_TEXTS = ("out of memory", "can't allocate memory", "not enough memory")
_REQUEST = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMG]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ADAMS = ("Adam", "AdamW")

_WEIGHTS, _GRADIENTS, _STATES, _OTHERS = "weights", "gradients", "optimizer states", "activations and others"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What was in a rank's memory when an allocation failed."""

    lines: tuple[str, ...]
    """A heading, the largest tensors, and the sizes by kind."""
    advice: str
    """The switch that would have saved most."""

    def __str__(self) -> str:
        return "\n".join((*self.lines, _("  what would have saved most: {advice}", advice=self.advice)))


@dataclass(slots=True, kw_only=True)
class _Held:
    """One tensor's storage that is alive."""

    num_bytes: int
    tensor: torch.Tensor
    kind: str = _OTHERS
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of each kind on this rank; those of optimizer states are estimated before the first step."""

    weights: int
    gradients: int
    states: int
    others: int
    largest_other: int
    requested: int


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that a device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def explain_out_of_memory(error: BaseException) -> MemoryReport | None:
    """Return what fills the memory of this rank, or None if ``error`` has another cause.

    Call it while the traceback of ``error`` exists, which keeps the tensors of its frames alive. Tensors that only autograd holds have no
    Python object: on an accelerator, they are counted as allocated memory that has no name.

    Examples:
        >>> try:
        ...     output = model(x)
        ... except torch.OutOfMemoryError as error:
        ...     print(explain_out_of_memory(error))
        ...     raise
    """
    if not is_out_of_memory(error):
        return None
    sessions: list[Session] = [accelerator.session for accelerator in living_accelerators()]
    session = next((one for one in sessions if one.objects.models), None)
    held = _living_tensors()
    for one in sessions:
        _name_prepared(held, one)
    frames = [frame for frame, _line in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        _name_locals(held, frame)
    found = _REQUEST.search(str(error))
    requested = 0 if found is None else int(float(found[1]) * _UNITS[found[2].lower()])
    sizes = _sizes(held.values(), requested=requested, session=session, frames=frames)
    place = _failing_place(frames, sessions)
    if isinstance(error, MemoryError):
        advice = _(
            "reading or building less at once in {place}: Python wanted the memory, not torch, so no setting of the training changes it",
            place=place,
        )
    else:
        advice = _advice(sizes, session)
    return MemoryReport(lines=tuple(_lines(held.values(), sizes, place)), advice=advice)


def log_out_of_memory(error: BaseException) -> None:
    """Log what fills the memory of this rank, if ``error`` says that it is full; under ``echelon launch``, the launcher does."""
    if board_slot() is None and (report := explain_out_of_memory(error)) is not None:
        get_logger(__name__).error("%s", report, all_ranks=True)


# ---- what is there ---------------------------------------------------------------------------------------------------


def _living_tensors() -> dict[int, _Held]:
    """Return every tensor that Python knows by the address of its storage; views count once."""
    held: dict[int, _Held] = {}
    for one in gc.get_objects():
        # Not isinstance, which asks proxies for their __class__.
        if issubclass(type(one), torch.Tensor):
            _add(held, one)
    return held


def _add(held: dict[int, _Held], tensor: torch.Tensor) -> None:
    found = _storage(tensor)
    if found is not None and found[0] not in held:
        held[found[0]] = _Held(num_bytes=found[1], tensor=tensor)


def _storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the address and size of a tensor's storage; None if it has no memory."""
    try:
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        if local.is_meta or local.layout != torch.strided:
            return None
        storage = local.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    except (RuntimeError, NotImplementedError):  # a subclass without a storage
        return None


def _name(held: dict[int, _Held], tensor: Any, kind: str, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        return
    _add(held, tensor)  # gc.get_objects leaves out what is being collected
    found = _storage(tensor)
    if found is not None and not held[found[0]].name:
        held[found[0]].kind, held[found[0]].name = kind, name


def _name_prepared(held: dict[int, _Held], session: Session) -> None:
    names: dict[int, str] = {}
    for model in session.objects.models:
        plain = session.engine.unwrap(model)
        for name, parameter in plain.named_parameters():
            names[id(parameter)] = name
            _name(held, parameter, _WEIGHTS, _("weight {name}", name=name))
            _name(held, parameter.grad, _GRADIENTS, _("gradient of {name}", name=name))
        for name, buffer in plain.named_buffers():
            _name(held, buffer, _WEIGHTS, _("buffer {name}", name=name))
    for average in session.objects.averages:
        for _optimizer, values in average.parts():
            for averaged, value in values.items():
                of = names.get(id(averaged), "")
                _name(held, value, _WEIGHTS, _("average of {name}", name=of))
    for optimizer in session.objects.optimizers:
        for parameter, state in optimizer.state.items():
            of = names.get(id(parameter), "")
            for key, value in state.items() if isinstance(state, dict) else ():
                _name(held, value, _STATES, _("optimizer state {key} of {name}", key=key, name=of))


def _name_locals(held: dict[int, _Held], frame: FrameType) -> None:
    """Name the tensors of a function's variables by the variable, and the line that the function was executing."""
    code = frame.f_code
    for variable, value in list(frame.f_locals.items()):
        inside: Iterable[tuple[str, Any]] = ((variable, value),)
        if isinstance(value, dict):
            inside = [(f"{variable}[{key!r}]", item) for key, item in list(value.items())[:100]]
        elif isinstance(value, (list, tuple)):
            inside = [(f"{variable}[{i}]", item) for i, item in enumerate(value[:100])]
        for text, item in inside:
            where = f"{code.co_name} ({code.co_filename}:{frame.f_lineno})"
            _name(held, item, _OTHERS, _("{variable} in {where}", variable=text, where=where))


def _sizes(held: Collection[_Held], *, requested: int, session: Session | None, frames: list[FrameType]) -> _Sizes:
    total: Counter[str] = Counter()
    for one in held:
        total[one.kind] += one.num_bytes
    largest_other = max((one.num_bytes for one in held if one.kind == _OTHERS), default=0)
    device = torch.device("cpu") if session is None else session.world.device
    module: Any = torch.get_device_module(device)
    if hasattr(module, "memory_allocated"):  # autograd's tensors are allocated, but have no Python object
        named = total[_WEIGHTS] + total[_GRADIENTS] + total[_STATES]
        total[_OTHERS] = max(total[_OTHERS], module.memory_allocated(device) - named)
    if any("torch/optim/" in frame.f_code.co_filename for frame in frames):
        total[_STATES] += requested  # the optimizer creates its state in its first step
    else:
        total[_OTHERS] += requested
        largest_other = max(largest_other, requested)
    return _Sizes(
        weights=total[_WEIGHTS],
        gradients=total[_GRADIENTS],
        states=total[_STATES],
        others=total[_OTHERS],
        largest_other=largest_other,
        requested=requested,
    )


# ---- what it means ---------------------------------------------------------------------------------------------------


def _lines(held: Iterable[_Held], sizes: _Sizes, place: str) -> Iterator[str]:
    largest = sorted(held, key=lambda one: one.num_bytes, reverse=True)[:_NUM_SHOWN]
    if place and sizes.requested:
        yield _("out of memory: {size} more were wanted in {place}", size=_size(sizes.requested), place=place)
    else:
        yield _("out of memory in {place}", place=place or "?")
    yield _("  the largest tensors of this rank:")
    for one in largest:
        shape, dtype = list(one.tensor.shape), str(one.tensor.dtype).removeprefix("torch.")
        name = one.name or _("a tensor without a name")
        yield f"    {_size(one.num_bytes):>10}  {name}  {shape} {dtype} {one.tensor.device}"
    yield _(
        "  weights {weights}, gradients {gradients}, optimizer states {states}, activations and others {others}",
        weights=_size(sizes.weights),
        gradients=_size(sizes.gradients),
        states=_size(sizes.states),
        others=_size(sizes.others),
    )


def _failing_place(frames: list[FrameType], sessions: list[Session]) -> str:
    """Return the innermost module whose forward pass was running, and the innermost line outside of torch and echelon."""
    models = [session.engine.unwrap(model) for session in sessions for model in session.objects.models]
    names = {id(module): name for model in models for name, module in model.named_modules()}
    module, line = "", ""
    for frame in frames:
        file = frame.f_code.co_filename
        module = names.get(id(frame.f_locals.get("self")), "") or module
        if "/torch/" not in file and "/echelon/" not in file and not file.startswith("<"):
            line = f"{file}:{frame.f_lineno}"
    return f"{module}, {line}" if module else line


def _advice(sizes: _Sizes, session: Session | None) -> str:
    """Return the switch with the largest estimated savings on this rank, and the estimate."""
    found = [
        (sizes.others / 2, _("a micro-batch of half the size, with twice as many gradient_accumulation_steps")),
    ]
    if session is None or not _is_checkpointed(session):
        # Checkpointing keeps the inputs of blocks; it does not make a single tensor (logits) smaller.
        saved = 0.7 * sizes.others if sizes.largest_other < sizes.others / 2 else 0.3 * sizes.others
        how = _(
            "activation checkpointing: TrainingArguments(gradient_checkpointing=True), or model.gradient_checkpointing_enable()"
        )
        found.append((saved, how))
    if session is not None:
        found += _sharding(sizes, session)
        kinds = {type(optimizer.optimizer).__name__ for optimizer in session.objects.optimizers}
        if kinds & {*_ADAMS}:  # two states of 4 bytes become two of 1 byte
            how = _("an 8-bit optimizer: bitsandbytes.optim.AdamW8bit, or TrainingArguments(optim='adamw_bnb_8bit')")
            found.append((0.75 * sizes.states, how))
    saved, how = max(found, key=lambda one: one[0])
    total = sizes.weights + sizes.gradients + sizes.states + sizes.others
    return _("{how} (an estimate: {saved} of {total})", how=how, saved=_size(int(saved)), total=_size(total))


def _sharding(sizes: _Sizes, session: Session) -> Iterator[tuple[float, str]]:
    capabilities, num_ranks = session.capabilities, session.data_world.world_size
    if num_ranks == 1 or capabilities.shards_parameters:
        return
    part = 1 - 1 / num_ranks
    states = 0 if capabilities.shards_optimizer_state else sizes.states
    yield part * states, _("engine='zero1', which shards the optimizer states")
    whole = sizes.weights + sizes.gradients + states
    yield part * whole, _("engine='fsdp2', which shards weights, gradients and optimizer states")


def _is_checkpointed(session: Session) -> bool:
    plugin = session.fsdp_plugin
    if session.config.value.activation_checkpointing != "none":
        return True
    if plugin is not None and plugin.activation_checkpointing:
        return True
    modules = [session.engine.unwrap(model) for model in session.objects.models]
    return any(map(recomputes_itself, modules))


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
