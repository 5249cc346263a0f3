"""Handles accumulation, clipping, steps and state for a model that DeepSpeed trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.warnings import warn
from echelon.distributed.ddp.replica import Structure
from echelon.engines.base import ShardedState, ShardedTensor
from echelon.engines.deepspeed.flat_shards import FlatShards, UsedParameters, count_ranks, full_shape
from echelon.engines.state_dicts import plain_name, plain_parameters, plain_state_dict
from echelon.engines.stepper import Stepper, multiply_gradients
from echelon.world.world import World


class DeepSpeedModel:
    """Drives a DeepSpeed engine.

    The library reduces an accumulation window's gradients in the backward pass that is declared as its boundary. A second
    boundary pass before the step would replace the first one's gradients. This class therefore declares no pass as the
    boundary and reduces the gradients when they are needed, so a loop may call ``backward`` any number of times.

    Stages 1 to 3 do not expose gradients, so an update's factor is applied through the loss scale.
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
        """The optimizer whose groups schedulers modify. With stages 1 to 3 it steps the flat tensors."""
        self.stepper = stepper
        """Steps the optimizer and scales the loss with stage 0."""
        self.factor = 1.0
        """Factor that has not yet been applied to this update's gradients."""
        self.is_local = False
        """Whether the last backward pass was unsynchronized."""
        self.last_norm = torch.zeros(())
        """Gradient norm of the last update."""
        self._stage = int(engine.zero_optimization_stage())
        self._clipping = clipping
        self._loop_clips = loop_clips
        self._max_norm: float | None = None  # norm to which the loop clips this update
        self._is_pending = False  # whether the window has gradients
        self._is_finished = False  # whether these gradients are reduced
        self._has_retained = False  # whether a backward pass of the window has retained its graph
        self._is_warned = False
        self._dtypes = {name: p.dtype for name, p in plain_parameters(engine.module)}
        self._parameters = [(name, p, p.requires_grad) for name, p in plain_parameters(engine.module)]
        self._structure = Structure(engine.module)
        self._hook: Any = engine.register_forward_pre_hook(self._before_forward, prepend=True)
        self._trained = {id(p) for group in groups for p in group if p.requires_grad}
        self.shards: FlatShards | None = None
        self._used: UsedParameters | None = None
        if self._stage > 0:
            # DeepSpeed drops empty groups and does not number frozen parameters.
            trained = [own for group in groups if (own := [p for p in group if p.requires_grad])]
            self.shards = FlatShards(library, engine, trained, rank=world.rank, world_size=world.world_size)
            names = {id(p): name for name, p in plain_parameters(engine.module)}
            self._used = UsedParameters(
                engine.optimizer,
                self.shards,
                [(names[id(p)], p) for own in trained for p in own if id(p) in names],
                is_ordered=self._stage >= 2,
            )

    def release(self) -> None:
        """Remove all hooks from the user's model."""
        if self.shards is not None:
            self.shards.release()
        if self._used is not None:
            self._used.release()
        self._hook.remove()
        self.engine.destroy()

    # ---- the window --------------------------------------------------------------------------------------------------

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if self._structure.is_changed:
            self._require_parameters()

    def _require_parameters(self) -> None:
        # In stage 0 the library reduces all existing gradients.
        changed = (
            [name for name, p, trained in self._parameters if p.requires_grad is not trained] if self._stage else []
        )
        if self._structure.is_changed:
            known = {id(p) for _, p, _ in self._parameters}
            changed += [name for name, p in plain_parameters(self.engine.module) if id(p) not in known]
            self._structure.renew(self.engine.module)
        if changed:
            raise UsageError(
                f"parameters were added, frozen or unfrozen after prepare() ({', '.join(changed[:3])}"
                f"{' and others' if len(changed) > 3 else ''}), but DeepSpeed trains only the parameters that required gradients "
                "during prepare()",
                where="backward(), deepspeed engine",
                do="freeze and unfreeze parameters before prepare(), and run each training phase as a separate script (with "
                "save_model()), or use engine='fsdp2' or 'ddp', which support these changes",
            )

    def backward(self, loss: torch.Tensor, *, retain_graph: bool, is_local: bool) -> None:
        """Add the gradients of ``loss`` to the accumulation window. Collective with stages 2 and 3.

        Raises:
            UsageError: parameters were added, replaced, frozen or unfrozen after ``prepare``.
        """
        self._require_parameters()
        if self._is_finished and self._stage > 0:
            raise UsageError(
                "backward() was called between clipping and step(), but DeepSpeed cannot add to clipped gradients",
                where="deepspeed engine",
                do="clip after the last backward(), right before step()",
            )
        if self._stage > 0:
            # The forward pass of DeepSpeed's wrapper clears this flag. After two forward passes, the second backward pass would
            # otherwise replace the gradients of the first (0.19.8).
            self.engine.optimizer.clear_backward_seen_flag()
        self.engine.set_gradient_accumulation_boundary(False)
        if self.factor != 1.0:
            # Engine.finish_gradients has been called, so this loss contains the factor, which is still to be applied to all gradients.
            loss = loss / self.factor
        try:
            self.engine.backward(self.stepper.scale(loss), retain_graph=retain_graph, scale_wrt_gas=False)
        except RuntimeError as error:
            if self._stage < 3 or not self._has_retained:
                raise
            raise UsageError(
                "a backward pass failed after one with retain_graph=True. A graph cannot be used twice, because ZeRO stage 3 releases the "
                "weights in each backward pass",
                where="backward(), deepspeed engine",
                do="add up the losses and call backward() once for each forward pass, or use ZeRO stage 2 or the fsdp2 engine",
            ) from error
        self._has_retained |= retain_graph
        self._is_pending, self._is_finished = True, False
        self.is_local = is_local and self._stage < 2

    def finish(self) -> None:
        """Reduce the accumulation window's gradients. Collective: call on every rank."""
        if self._is_finished or not self._is_pending:
            return
        if self.is_local and not self._is_warned:
            self._is_warned = True
            warn(
                _(
                    "the last backward pass did not synchronize gradients across ranks, because it ran inside "
                    "no_sync(). DeepSpeed will reduce the gradients now, so the result is correct. Run the last "
                    "backward pass before step() outside no_sync()."
                )
            )
        self._is_finished, self.is_local = True, False
        unused = self._find_unused() if self._stage == 0 else []
        self.engine.set_gradient_accumulation_boundary(True)
        if self._stage >= 2:
            self.engine.optimizer.finalize_gradient_accumulation_boundary()
        else:
            self.engine.allreduce_gradients()
        if self._used is not None:
            self._used.finish()
        if self._stage == 0:
            for parameter in unused:
                parameter.grad = None  # the library has made zeros, with which the optimizer would decay the weights
            multiply_gradients(self.engine.module.parameters(), self.factor)
            self.factor = 1.0

    def _find_unused(self) -> list[nn.Parameter]:
        """Return the parameters that have no gradients on any rank. Collective: call on every rank."""
        parameters = list(self.engine.module.parameters())
        counts = count_ranks([p.grad is not None for p in parameters])
        return [parameter for parameter, count in zip(parameters, counts) if not count]

    def unscale(self) -> None:
        """Unscale the gradients with stage 0; other stages do not expose gradients."""
        if self._stage == 0:
            self.finish()
            self.stepper.unscale(self.optimizer)

    def clip(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Make the next step clip the gradients to ``max_norm``; return their norm. Collective: call on every rank."""
        self.finish()
        if self._stage == 0:
            self.unscale()
            self.last_norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
            self._max_norm = max_norm
            return self.last_norm
        if norm_type != 2.0:
            raise UsageError(
                f"DeepSpeed clips only by the 2-norm, but got norm_type={norm_type:g}",
                where="clip_grad_norm_()",
                do="omit norm_type, or use the fsdp2 engine",
            )
        given = {id(p) for p in parameters if p.requires_grad}
        others = given - self._trained
        if given != self._trained:
            raise UsageError(
                f"clip_grad_norm_() got {len(others)} parameters that the optimizer does not step, but DeepSpeed clips only those that "
                "it trains"
                if others
                else f"clip_grad_norm_() got {len(given)} parameters, but DeepSpeed clips all {len(self._trained)} parameters that it "
                "trains",
                where="clip_grad_norm_(), deepspeed engine",
                do="pass model.parameters(), freeze those that the optimizer does not step (requires_grad_(False)), or use the fsdp2 "
                "engine",
            )
        self._max_norm = max_norm
        self.last_norm = self._norm()
        return self.last_norm

    def _norm(self) -> torch.Tensor:
        """Return the reduced gradients' norm with stages 1 to 3. Collective: call on every rank."""
        if not self._is_pending:
            return torch.zeros(())
        optimizer = self.engine.optimizer
        if self._stage < 3:
            scaled = optimizer.scaled_global_norm()
        else:
            combine: Any = import_module("deepspeed.runtime.utils").combine_grad_norm_groups
            scaled = combine(optimizer._get_norm_groups())
        norm = torch.as_tensor(scaled, dtype=torch.float32) * (self.factor / optimizer.loss_scale)
        # The library returns -1 for infinite gradients.
        return torch.where(norm < 0, math.inf, norm)

    def step(self) -> bool:
        """Perform the optimizer step; return False if gradients were infinite. Collective: call on every rank."""
        if not self._is_pending:
            return True
        self.finish()
        try:
            return self._step_stage_0() if self._stage == 0 else self._step_shards()
        finally:
            self._is_pending = self._is_finished = self._has_retained = False
            self._max_norm, self.factor = None, 1.0

    def _step_stage_0(self) -> bool:
        if self._clipping is not None and not (self._loop_clips and self._max_norm is not None):
            self.unscale()
            self.last_norm = nn.utils.clip_grad_norm_(self.engine.module.parameters(), self._clipping)
        if self.stepper.scaler is None:
            self.engine.step()
            return True
        is_taken = self.stepper.step(self.optimizer)
        self.engine.zero_grad()
        if is_taken and self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.step()
        return is_taken

    def _step_shards(self) -> bool:
        assert self.shards is not None
        assert self._used is not None
        self.shards.adopt_changes()
        optimizer = self.engine.optimizer
        optimizer.clip_grad = self._effective_clipping()
        optimizer.loss_scale = optimizer.loss_scale / self.factor
        self.engine.step()
        optimizer.loss_scale = optimizer.loss_scale * self.factor
        self.last_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)
        is_taken = bool(self.engine.was_step_applied())
        self._used.end_update(is_taken=is_taken)
        return is_taken

    def _effective_clipping(self) -> float:
        """Return the norm that this update is clipped to, or 0 if it is not clipped."""
        norms = [self._max_norm] if self._max_norm is not None else []
        if self._clipping is not None and not (self._loop_clips and norms):
            norms.append(self._clipping)
        smallest = min(norms, default=math.inf)
        return 0.0 if math.isinf(smallest) else smallest

    def discard_gradients(self) -> None:
        """Discard the accumulation window's gradients."""
        if not self._is_pending:
            return
        self._is_pending = self._is_finished = self._has_retained = self.is_local = False
        self._max_norm, self.factor = None, 1.0
        self.stepper.note_cleared(self.optimizer)
        self.engine.zero_grad()
        if self._used is None:
            return
        self._used.end_update(is_taken=False)
        optimizer = self.engine.optimizer
        optimizer.zero_grad()  # stage 3 counts micro-steps here
        if self._stage < 3:
            # The library does the same when it skips a step (stage_1_and_2.py, 0.19.8).
            optimizer.micro_step_id = -1
            optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
            optimizer.all_grad_tensors = dict.fromkeys(optimizer.all_grad_tensors)
            optimizer._release_preflattened_grad_buffers()
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()

    # ---- state -------------------------------------------------------------------------------------------------------

    def full_state_dict(self, *, on_rank_zero: bool) -> dict[str, Any] | None:
        """Return the full state dict, or, with ``on_rank_zero``, gather it only on rank zero's CPU. Collective if ``on_rank_zero``."""
        if self.shards is None or not on_rank_zero:
            return plain_state_dict(self.engine.module)
        self.shards.adopt_changes()  # those since the last step
        trained = self.shards.full_weights()
        frozen = self.shards.frozen_weights()
        if trained is None:
            return None
        full = {**trained, **frozen}
        owners = {id(p): name for name, p in plain_parameters(self.engine.module)}
        parameters = dict(self.engine.module.named_parameters(remove_duplicate=False))
        found = plain_state_dict(self.engine.module)
        for name, value in found.items():
            owner = owners.get(id(parameters.get(name)))
            found[name] = value.detach().cpu() if owner is None else full[owner]
        return found

    def sharded_state(self, rank: int) -> ShardedState | None:
        shards = self.shards
        state = plain_state_dict(self.engine.module)
        if shards is None or not all(isinstance(value, torch.Tensor) for value in state.values()):
            return None
        shards.require_in_memory()
        shards.adopt_changes()
        parameters = {plain_name(name): p for name, p in self.engine.module.named_parameters(remove_duplicate=False)}
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        tensors: dict[str, ShardedTensor] = {}
        for name, value in state.items():
            parameter = parameters.get(name)
            if parameter is None:
                gather = partial(_whole, value, rank)
                tensors[name] = ShardedTensor(dtype=value.dtype, shape=value.shape, is_sharded=False, gather=gather)
            elif first.setdefault(id(parameter), name) != name:
                aliases[name] = first[id(parameter)]
            else:
                tensors[name] = ShardedTensor(
                    dtype=torch.float32 if parameter.requires_grad else parameter.dtype,
                    shape=full_shape(parameter),
                    is_sharded=True,
                    gather=partial(_gathered, shards, parameter),
                )
        return ShardedState(names=list(state), aliases=aliases, tensors=tensors)

    def full_optimizer_state(self) -> dict[str, Any] | None:
        """Return the full optimizer state on rank zero, or None on other ranks. Collective: call on every rank."""
        assert self.shards is not None
        state = self.shards.full_state()
        if state is None:
            return None
        return {"state": state, "param_groups": self.shards.groups(), "loss_scale": self._loss_scale()}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load the full optimizer state from any engine."""
        assert self.shards is not None
        self.shards.load_groups(state["param_groups"])
        self.shards.load_state(state["state"])
        scaler = self.engine.optimizer.loss_scaler
        for name, value in (state.get("loss_scale") or {}).items():
            setattr(scaler, name, value)

    def _loss_scale(self) -> dict[str, float]:
        """Return the loss scaler's state as plain numbers."""
        scaler = self.engine.optimizer.loss_scaler
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(scaler, name) for name in names if hasattr(scaler, name)}


def _whole(value: torch.Tensor, rank: int, to: int) -> torch.Tensor | None:
    return value.detach().cpu() if rank == to else None


def _gathered(shards: FlatShards, parameter: nn.Parameter, to: int) -> torch.Tensor | None:
    return shards.full_weight(parameter, to=to)
