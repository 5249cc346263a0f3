"""One model under training by DeepSpeed: its accumulation window, clipping, step and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.base.warnings import warn
from echelon.distributed.ddp.replica import Structure
from echelon.engines.deepspeed.flat_shards import FlatParts
from echelon.engines.stepper import Stepper, clip_gradients, multiply_gradients, plain_parameters, plain_state_dict
from echelon.world.world import World

__all__ = ["DeepSpeedModel"]


class DeepSpeedModel:
    """Drives a DeepSpeed engine.

    The library takes each backward pass for a micro-step of a window, and finishes the gradients in the one that was declared
    the last; a second such pass before the step replaces what the first one brought. Here no pass is declared the last: the
    window is finished where its gradients are needed, so a loop may call backward as often as it likes.

    Stages 1 to 3 keep gradients to themselves, in scaled form, so the factor of an update goes in by way of the loss scale.
    """

    def __init__(
        self,
        library: Any,
        engine: Any,
        *,
        groups: Sequence[Sequence[nn.Parameter]],
        stepper: Stepper,
        world: World,
        clipping: float | None,
        loop_clips: bool,
    ) -> None:
        self.engine = engine
        self.optimizer: Optimizer = engine.basic_optimizer
        """Steps the flat tensors in stages 1 to 3; its groups are those that schedules change."""
        self.stepper = stepper
        """Scales the loss in stage 0."""
        self.factor = 1.0
        """Of the gradients of this update, still to be multiplied."""
        self.is_local = False
        """Have the other ranks not seen the last backward pass?"""
        self.last_norm = torch.zeros(())
        """Of the gradients of the last update."""
        self._stage = int(engine.zero_optimization_stage())
        self._clipping = clipping
        self._loop_clips = loop_clips
        self._max_norm: float | None = None  # of this update, said by the loop
        self._is_pending = False  # there are gradients
        self._is_finished = False  # and they are those of the update
        self._is_warned = False
        self._dtypes = {name: p.dtype for name, p in plain_parameters(engine.module)}
        self._parameters = [(name, p, p.requires_grad) for name, p in plain_parameters(engine.module)]
        self._structure = Structure(engine.module)
        self._hook: Any = engine.register_forward_pre_hook(self._before_forward, prepend=True)
        self._num_trained = len({id(p) for group in groups for p in group if p.requires_grad})
        self.parts: FlatParts | None = None
        if self._stage > 0:
            # A group without parameters is not kept, and those that do not train have no number.
            trained = [own for group in groups if (own := [p for p in group if p.requires_grad])]
            self.parts = FlatParts(library, engine, trained, rank=world.rank, world_size=world.world_size)

    def release(self) -> None:
        """Take everything off the user's model."""
        if self.parts is not None:
            self.parts.release()
        self._hook.remove()
        self.engine.destroy()

    # ---- the window --------------------------------------------------------------------------------------------------

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if self._structure.is_changed:
            self._require_parameters()

    def _require_parameters(self) -> None:
        # In stage 0 the library looks at what has a gradient.
        changed = (
            [name for name, p, trained in self._parameters if p.requires_grad is not trained] if self._stage else []
        )
        if self._structure.is_changed:
            known = {id(p) for _, p, _ in self._parameters}
            changed += [name for name, p in plain_parameters(self.engine.module) if id(p) not in known]
            self._structure.renew(self.engine.module)
        if changed:
            raise UsageError(
                f"{', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} came into the model, or became frozen or "
                "unfrozen, after prepare(): DeepSpeed trains the parameters that required gradients when it was given the model",
                where="backward(), engine deepspeed",
                do="choose what trains before prepare(), and train each phase by a run of its own (save_model(), then a new script); "
                "engine='fsdp2' and 'ddp' follow such changes",
            )

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, is_local: bool) -> None:
        """Add the gradients of ``loss`` to those of the window. Collective: in stages 2 and 3.

        Raises:
            UsageError: the model has other parameters than when it was prepared, or others train.
        """
        self._require_parameters()
        if self._is_finished and self._stage > 0:
            raise UsageError(
                "backward() came between clipping and the step of one update: DeepSpeed cannot add to clipped gradients",
                where="engine deepspeed",
                do="clip after the last backward(), right before the step",
            )
        if self._stage > 0:
            # Done by the forward pass of DeepSpeed's wrapper; two of them before the first backward pass would otherwise
            # make the second one replace the gradients of the first (0.19.8).
            self.engine.optimizer.clear_backward_seen_flag()
        self.engine.set_gradient_accumulation_boundary(False)
        self.engine.backward(self.stepper.scale(loss), retain_graph=retain_graph, scale_wrt_gas=False)
        self._is_pending, self._is_finished = True, False
        self.is_local = is_local and self._stage < 2

    def finish(self) -> None:
        """Make the gradients those of the update, on all ranks. Collective: every rank."""
        if self._is_finished or not self._is_pending:
            return
        if self.is_local and not self._is_warned:
            self._is_warned = True
            warn(
                "the last backward pass was not synchronised between the ranks (a step inside no_sync()): DeepSpeed reduces the "
                "gradients now, so the result is right. Step outside no_sync()."
            )
        self._is_finished, self.is_local = True, False
        self.engine.set_gradient_accumulation_boundary(True)
        if self._stage >= 2:
            self.engine.optimizer.finalize_gradient_accumulation_boundary()
        else:
            self.engine.allreduce_gradients()
        if self._stage == 0:
            multiply_gradients(self.engine.module.parameters(), self.factor)
            self.factor = 1.0

    def unscale(self) -> None:
        """Undo the loss scale where gradients can be looked at: in stage 0."""
        if self._stage == 0:
            self.finish()
            self.stepper.unscale(self.optimizer)

    def clip(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Let the step clip the gradients to ``max_norm``; return their norm. Collective: every rank."""
        self.finish()
        if self._stage == 0:
            self.unscale()
            self.last_norm = clip_gradients(parameters, max_norm, norm_type)
            self._max_norm = max_norm
            return self.last_norm
        if norm_type != 2.0:
            raise UsageError(
                f"DeepSpeed clips by the second norm, and norm_type={norm_type:g} was given",
                where="clip_grad_norm_()",
                do="leave norm_type out, or use the engine fsdp2",
            )
        given = len({id(p) for p in parameters if p.requires_grad})
        if given < self._num_trained:
            raise UsageError(
                f"clip_grad_norm_() was given {given} parameters, and DeepSpeed clips all {self._num_trained} that it trains",
                where="clip_grad_norm_(), engine deepspeed",
                do="give it model.parameters(), or use the engine fsdp2",
            )
        self._max_norm = max_norm
        self.last_norm = self._norm()
        return self.last_norm

    def _norm(self) -> torch.Tensor:
        """Return the norm of the finished gradients of stages 1 to 3. Collective."""
        if not self._is_pending:
            return torch.zeros(())
        optimizer = self.engine.optimizer
        if self._stage < 3:
            scaled = optimizer.scaled_global_norm()
        else:
            combine: Any = import_module("deepspeed.runtime.utils").combine_grad_norm_groups
            scaled = combine(optimizer._get_norm_groups())
        norm = torch.as_tensor(scaled, dtype=torch.float32) * (self.factor / optimizer.loss_scale)
        # The library's norm of infinite gradients is -1.
        return torch.where(norm < 0, math.inf, norm)

    def step(self) -> bool:
        """Take the step of the update; False: its gradients were infinite. Collective: every rank."""
        if not self._is_pending:
            return True
        self.finish()
        try:
            return self._step_whole() if self._stage == 0 else self._step_parts()
        finally:
            self._is_pending = self._is_finished = False
            self._max_norm, self.factor = None, 1.0

    def _step_whole(self) -> bool:
        if self._clipping is not None and not (self._loop_clips and self._max_norm is not None):
            self.unscale()
            self.last_norm = clip_gradients(list(self.engine.module.parameters()), self._clipping, 2.0)
        if self.stepper.scaler is None:
            self.engine.step()
            return True
        is_taken = self.stepper.step(self.optimizer)
        self.engine.zero_grad()
        if is_taken and self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step()
        return is_taken

    def _step_parts(self) -> bool:
        optimizer = self.engine.optimizer
        optimizer.clip_grad = self._effective_clipping()
        optimizer.loss_scale = optimizer.loss_scale / self.factor
        self.engine.step()
        optimizer.loss_scale = optimizer.loss_scale * self.factor
        self.last_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)
        return bool(self.engine.was_step_applied())

    def _effective_clipping(self) -> float:
        """Return to which norm this update is clipped; 0: it is not."""
        asked = [self._max_norm] if self._max_norm is not None else []
        if self._clipping is not None and not (self._loop_clips and asked):
            asked.append(self._clipping)
        smallest = min(asked, default=math.inf)
        return 0.0 if math.isinf(smallest) else smallest

    def drop_gradients(self) -> None:
        """Forget the gradients of the window."""
        if not self._is_pending:
            return
        self._is_pending = self._is_finished = self.is_local = False
        self._max_norm, self.factor = None, 1.0
        self.engine.zero_grad()
        if self._stage == 0:
            return
        optimizer = self.engine.optimizer
        optimizer.zero_grad()  # in stage 3, the next micro-step is the first, too
        if self._stage < 3:
            # What the library does where it leaves out a step (stage_1_and_2.py, 0.19.8).
            optimizer.micro_step_id = -1
            optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
            optimizer.all_grad_tensors = dict.fromkeys(optimizer.all_grad_tensors)
            optimizer._release_preflattened_grad_buffers()
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()

    # ---- state -------------------------------------------------------------------------------------------------------

    def full_state_dict(self, *, on_rank_zero: bool) -> dict[str, Any] | None:
        """Return the whole state dict; ``on_rank_zero``: there alone, on the host. Collective: then."""
        if self.parts is None or not on_rank_zero:
            return plain_state_dict(self.engine.module)
        trained = self.parts.whole_weights()
        frozen = self.parts.frozen_weights()
        if trained is None:
            return None
        wholes = {**trained, **frozen}
        owners = {id(p): name for name, p in plain_parameters(self.engine.module)}
        parameters = dict(self.engine.module.named_parameters(remove_duplicate=False))
        found = plain_state_dict(self.engine.module)
        for name, value in found.items():
            owner = owners.get(id(parameters.get(name)))
            found[name] = value.detach().cpu() if owner is None else wholes[owner]
        return found

    def own_state(self, *, with_optimizer: bool) -> dict[str, Any]:
        """Return this rank's part of the weights, and of the optimizer's state."""
        parts = self.parts
        assert parts is not None
        model: dict[str, Any] = {}
        for name, parameter in plain_parameters(self.engine.module):
            part = parts.part(parameter)
            if part is not None:
                model[name] = {"offset": part.offset, "values": part.of(part.flat).detach().clone()}
        buffers = {name: b.detach().clone() for name, b in self.engine.module.named_buffers()}
        optimizers = [{"state": parts.own_state(), "param_groups": parts.groups()}] if with_optimizer else []
        return {"model": model, "buffers": buffers, "optimizers": optimizers, "loss_scale": self._loss_scale()}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``own_state`` returned on this rank. Collective: every rank."""
        parts = self.parts
        assert parts is not None
        for name, parameter in plain_parameters(self.engine.module):
            part = parts.part(parameter)
            if part is not None:
                part.of(part.flat).data.copy_(state["model"][name]["values"])
        parts.publish()
        for name, buffer in self.engine.module.named_buffers():
            buffer.copy_(state["buffers"][name])
        for saved in state["optimizers"]:
            self.load_optimizer_state({**saved, "loss_scale": state["loss_scale"]}, is_whole=False)

    def full_optimizer_state(self) -> dict[str, Any] | None:
        """Return the whole state of the optimizer on rank zero; None elsewhere. Collective: every rank."""
        assert self.parts is not None
        state = self.parts.whole_state()
        if state is None:
            return None
        return {"state": state, "param_groups": self.parts.groups(), "loss_scale": self._loss_scale()}

    def load_optimizer_state(self, state: Mapping[str, Any], *, is_whole: bool) -> None:
        """Load the state of the optimizer, of any engine where it is whole."""
        assert self.parts is not None
        self.parts.load_groups(state["param_groups"])
        self.parts.load_state(state["state"], is_whole=is_whole)
        scaler = self.engine.optimizer.loss_scaler
        for name, value in (state.get("loss_scale") or {}).items():
            setattr(scaler, name, value)

    def _loss_scale(self) -> dict[str, float]:
        """Return the loss scale and how it moves, as plain numbers."""
        scaler = self.engine.optimizer.loss_scaler
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(scaler, name) for name in names if hasattr(scaler, name)}
