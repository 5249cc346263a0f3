"""Captures a step of the user's, to trace it under other settings: of objects, or of a script, which runs without memory to the step's end."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hook_tables
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from echelon.base import environ
from echelon.base.errors import EchelonError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.distributed.tree import leaves, map_tensors
from echelon.engines.activation_checkpointing import checkpointing_mode, stop_checkpointing
from echelon.engines.chunked_loss import loss_chunk_of
from echelon.engines.fsdp.options import ShardingOptions
from echelon.engines.random_numbers import restore_states, save_states
from echelon.plan.facts import ModelFacts, StepSettings, StepTrace
from echelon.plan.fake_copy import fake_parameter
from echelon.plan.fake_run import FakeRun, fake_mode, stand_in_values, tensors_in
from echelon.plan.trace import Device, trace_step
from echelon.precision.policy import is_wrapped, unwrap_forward

_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward})
_LIBRARIES = (str(Path(torch.__file__).parents[1]), str(Path(__file__).resolve().parents[1]), "<")
# Trackers that a script starts before its first step write nothing.
_QUIET = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A step of a script, or of objects."""

    module: nn.Module
    """The model, without memory."""
    optimizer: Optimizer
    settings: StepSettings
    """Those with which it was captured."""
    accumulation: int
    """Micro-batches of a step."""
    chosen: Any
    """What ``read_settings`` returned when the step ended."""
    batch: Any
    compute_loss: Callable[[nn.Module, Any], torch.Tensor]
    script: str

    @property
    def model(self) -> ModelFacts:
        """The model's parameters and units."""
        return self.facts_and_trace(self.settings)[0]

    def trace(
        self,
        settings: StepSettings,
        *,
        sharding: ShardingOptions | None = None,
        blocks: tuple[str, ...] = (),
        adapt: Callable[[nn.Module, StepSettings], None] | None = None,
        device: Device = "cuda",
    ) -> StepTrace:
        """Return the step under other settings. See ``trace_step``.

        Raises:
            UsageError: the step of the script cannot be repeated with another number of samples.
        """
        return self.facts_and_trace(settings, sharding=sharding, blocks=blocks, adapt=adapt, device=device)[1]

    def facts_and_trace(
        self, settings: StepSettings, *, adapt: Callable[[nn.Module, StepSettings], None] | None = None, **options: Any
    ) -> tuple[ModelFacts, StepTrace]:
        """Return the model's parameters and units, and the step under other settings. Arguments and errors as for ``trace``."""

        def as_asked(copied: nn.Module, asked: StepSettings) -> None:
            unwrap_forward(copied)  # ``trace_step`` applies what is asked
            stop_checkpointing(copied)
            if adapt is not None:
                adapt(copied, asked)

        batch = map_tensors(partial(_resized, old=self.settings.micro_batch, new=settings.micro_batch), self.batch)
        try:
            return trace_step(
                self.module, self.optimizer, self.compute_loss, batch, settings, adapt=as_asked, **options
            )
        except EchelonError:  # which says what a setting needs
            raise
        except (RuntimeError, ValueError) as error:
            if settings.micro_batch == self.settings.micro_batch:
                raise
            raise UsageError(
                _(
                    "the step of {script} cannot be repeated with {number} samples in place of {old}: {reason}",
                    script=self.script,
                    number=settings.micro_batch,
                    old=self.settings.micro_batch,
                    reason=error,
                ),
                do=_("run the plan with the script's own option for the batch size"),
            ) from error


def capture_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    compute_loss: Callable[[nn.Module, Any], torch.Tensor],
    *,
    mixed_precision: str,
    activation_checkpointing: str,
    accumulation: int,
) -> Capture:
    """Return the step of a model on ``batch``. Traces run ``compute_loss`` on copies of ``model`` that have no memory.

    Args:
        model: the model, not sharded.
        optimizer: of the parameters of ``model``.
        batch: one micro-batch, on any device.
        compute_loss: returns the loss of a model for a batch: a scalar.
        mixed_precision: as of the run.
        activation_checkpointing: what blocks keep; none: what ``model`` does itself.
        accumulation: micro-batches of a step.
    """
    batch = map_tensors(lambda one: one.detach().cpu(), batch)

    def compute_loss_of_copy(copied: nn.Module, inputs: Any) -> torch.Tensor:
        # This hook is not copied with the model (see fake_model).
        refusing = model.register_forward_pre_hook(_refuse_original)
        try:
            return compute_loss(copied, inputs)
        finally:
            refusing.remove()

    settings = StepSettings(
        micro_batch=_num_samples(tensors_in(batch)),
        mixed_precision=mixed_precision,
        activation_checkpointing=checkpointing_mode(model)
        if activation_checkpointing == "none"
        else activation_checkpointing,
        loss_chunk=loss_chunk_of(model),
    )
    return Capture(
        module=model,
        optimizer=optimizer,
        settings=settings,
        accumulation=accumulation,
        chosen=None,
        batch=batch,
        compute_loss=compute_loss_of_copy,
        script=type(model).__name__,
    )


def has_no_memory(model: nn.Module) -> bool:
    """Return whether the parameters of ``model`` are those of a script that ``capture_script`` runs."""
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def _refuse_original(model: nn.Module, _args: Any) -> None:
    raise UsageError(
        _("compute_loss calls the {name} itself, not the model that it is given", name=type(model).__name__),
        do=_("call its first argument: compute_loss=lambda model, batch: ..."),
    )


def _num_samples(tensors: Iterable[torch.Tensor]) -> int:
    """Return the most common size of the first dimension."""
    sizes = Counter(one.shape[0] for one in tensors if one.dim())
    return sizes.most_common(1)[0][0] if sizes else 1


def _resized(tensor: torch.Tensor, *, old: int, new: int) -> torch.Tensor:
    """Return ``tensor`` with ``new`` samples in place of ``old``, if it has samples."""
    if old == new or tensor.dim() == 0 or tensor.shape[0] != old:
        return tensor
    return tensor[torch.arange(new) % old]


class _StepDone(BaseException):
    """Ends the script after its first optimizer step."""


def capture_script(path: str, args: Sequence[str], *, read_settings: Callable[[], Any] = lambda: None) -> Capture:
    """Run a script with fake weights, in this process, until its first optimizer step has ended.

    Weights have no memory from the moment in which a module gets them; so has everything computed from them, and each other result over
    16 MiB. Data sets and batches are real. A number that depends on weights, such as ``loss.item()``, is 1.

    Args:
        read_settings: called when the step has ended, and the script's objects still exist.

    Raises:
        UsageError: the script fails without weights, or ends without a step.
    """
    step = _FirstStep(read_settings)
    states, before = save_states(torch.device("cpu")), (list(sys.argv), list(sys.path))
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with environ.patch(_QUIET), step.watched():
            runpy.run_path(path, run_name="__main__")
    except _StepDone:
        pass
    except SystemExit as error:
        raise _no_step(path, _("it calls sys.exit({code!r})", code=error.code)) from error
    except Exception as error:
        line = next(
            (
                f"{frame.filename}:{frame.lineno}"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if not frame.filename.startswith(_LIBRARIES) and "/lib/python" not in frame.filename
            ),
            path,
        )
        raise UsageError(
            _(
                "{script} fails when it runs without memory, in {line}: {kind}: {reason}",
                script=path,
                line=line,
                kind=type(error).__name__,
                reason=error,
            ),
            do=_(
                "let that line need no values of weights or losses before the first step, or plan the model alone: "
                "echelon plan --model"
            ),
        ) from error
    finally:
        sys.argv, sys.path[:] = before
        restore_states(torch.device("cpu"), states)
    return step.capture(path)


def _no_step(path: str, reason: str) -> UsageError:
    return UsageError(
        _("{script} ends without a step of a torch optimizer: {reason}", script=path, reason=reason),
        do=_("pass the arguments with which the script trains"),
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A function of torch, or the model, that was called."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _FirstStep(TorchFunctionMode):
    """Sees the calls of models, and the functions between them and the backward pass."""

    def __init__(self, read_settings: Callable[[], Any]) -> None:
        super().__init__()
        self._read_settings = read_settings
        self._fakes = WeakIdKeyDictionary()
        self._mode = fake_mode()
        self._depth = 0  # of calls of modules with parameters
        self._calls: list[_Call] = []  # since the last step of the script that trains
        self._loss: torch.Tensor | None = None
        self._num_backward = 0
        self._optimizer: Optimizer | None = None
        self._precision = "no"
        self._chosen: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See everything inside the block."""
        with ExitStack() as stack:
            leave = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            # remove() forgets this table (torch 2.13), so that torch.compile would see a hook for the rest of the process.
            stack.callback(hook_tables._global_forward_hooks_with_kwargs.pop, leave.id, None)
            for handle in (
                register_module_parameter_registration_hook(self._fake),  # type: ignore[arg-type]  # torch's docs: it may return one
                register_module_forward_pre_hook(self._enter),
                leave,
                register_optimizer_step_post_hook(self._end),
            ):
                stack.callback(handle.remove)
            stack.enter_context(FakeRun(self._mode, lambda *_seen: None))
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (values := stand_in_values(func, args)) is not None:
            return values
        if func in _BACKWARD and self._loss is None:
            self._loss = args[0] if args else kwargs["tensors"]
        self._num_backward += func is torch.Tensor.backward
        result = func(*args, **kwargs)
        if self._calls and self._depth == 0 and self._loss is None and any(True for _one in tensors_in(result)):
            self._calls.append(_Call(func, args, kwargs, result))
        return result

    def _fake(self, _module: nn.Module, _name: str, parameter: Any) -> nn.Parameter | None:
        if type(parameter) is not nn.Parameter or isinstance(parameter, FakeTensor) or parameter.is_meta:
            return None
        if parameter not in self._fakes:
            self._fakes[parameter] = fake_parameter(parameter, self._mode, parameter.dtype)
        fake: nn.Parameter = self._fakes[parameter]
        return fake

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._depth += _has_parameters(module)

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if not _has_parameters(module):
            return
        self._depth -= 1
        if self._depth == 0 and self._loss is None and torch.is_grad_enabled() and module.training:
            self._calls.append(_Call(module, args, kwargs, outputs))
            if torch.is_autocast_enabled("cpu"):
                self._precision = "bf16" if torch.get_autocast_dtype("cpu") == torch.bfloat16 else "fp16"

    def _end(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._loss is not None:  # not a trial step of another library
            self._optimizer, self._chosen = optimizer, self._read_settings()
            raise _StepDone

    def capture(self, path: str) -> Capture:
        """Return what was seen.

        Raises:
            UsageError: the script has taken no step, or one that cannot be repeated.
        """
        if self._optimizer is None or not isinstance(self._loss, torch.Tensor):
            raise _no_step(path, _("it has ended"))
        models = [call for call in self._calls if isinstance(call.func, nn.Module)]
        if len(models) != 1:
            raise UsageError(
                _(
                    "the first step of {script} calls {number} models, and a plan is for one",
                    script=path,
                    number=len(models),
                ),
                do=_("plan a single model: echelon plan --model"),
            )
        module: Any = models[0].func
        while isinstance(module, DistributedDataParallel):
            module = module.module
        tape = _Tape(self._calls, self._loss)
        if not tape.is_complete:
            raise UsageError(
                _(
                    "the loss of {script} does not come from functions of torch on the outputs of its model",
                    script=path,
                ),
                do=_(
                    "compute it in the model, or with functions of torch; or plan the model alone: echelon plan --model"
                ),
            )
        precision = module.forward.policy.mode if is_wrapped(module) else self._precision
        settings = StepSettings(
            micro_batch=tape.micro_batch,
            mixed_precision=precision,
            activation_checkpointing=checkpointing_mode(module),
            loss_chunk=loss_chunk_of(module),
        )
        return Capture(
            module=module,
            optimizer=self._optimizer,
            settings=settings,
            accumulation=max(self._num_backward, 1),
            chosen=self._chosen,
            batch=tape.inputs,
            compute_loss=tape.replay,
            script=path,
        )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class _Tape:
    """The call of a model, and the functions that led from its outputs to the loss, to be called again with other tensors."""

    def __init__(self, calls: Sequence[_Call], loss: torch.Tensor) -> None:
        self._loss = id(loss)
        needed, kept = {id(loss)}, list[_Call]()
        for call in reversed(calls):  # the functions that the loss needs
            if isinstance(call.func, nn.Module) or needed & set(map(id, tensors_in(call.result))):
                needed.update(map(id, tensors_in((call.args, call.kwargs))))
                kept.insert(0, call)
        self._calls = kept
        made = {id(one) for call in kept for one in tensors_in(call.result)}
        self._outside = list({id(one): one for call in kept for one in tensors_in((call.args, call.kwargs))}.values())
        self._outside = [one for one in self._outside if id(one) not in made or _is_input(one, kept)]
        self.is_complete = id(loss) in made
        self.inputs = list(self._outside)
        self.micro_batch = _num_samples(self._outside)

    def replay(self, model: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of ``model`` for other tensors in the place of ``inputs``."""
        values: dict[int, Any] = {id(old): new for old, new in zip(self._outside, inputs, strict=True)}

        def resolve(tensor: torch.Tensor) -> Any:
            return values.get(id(tensor), tensor)

        for call in self._calls:
            func: Any = model if isinstance(call.func, nn.Module) else call.func
            result = func(*map_tensors(resolve, call.args), **map_tensors(resolve, call.kwargs))
            for old, new in zip(leaves(call.result), leaves(result), strict=False):
                if isinstance(old, torch.Tensor):
                    values[id(old)] = new
        loss: torch.Tensor = values[self._loss]
        return loss


def _is_input(tensor: torch.Tensor, calls: Sequence[_Call]) -> bool:
    """Return whether ``tensor`` was used before a call returned it (in place)."""
    for call in calls:
        if any(one is tensor for one in tensors_in((call.args, call.kwargs))):
            return True
        if any(one is tensor for one in tensors_in(call.result)):
            return False
    return False
