"""An optimizer for sharded parameters that updates each of them as a whole, on one of the ranks that hold its shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.base.sharded import shape_and_offset_at
from echelon.distributed.small_messages import bytes_of
from echelon.engines.optimizer_copy import copy_optimizer, load_own_state, no_full_state


class GatheredOptimizer(Optimizer):
    """Gathers each parameter and its gradient on one rank, updates it there with a copy of ``optimizer``, and scatters the result.

    Parameters are divided among the ranks by size. The ranks exchange the shards of all of them at once, and so the results. State is
    kept where a parameter is updated, so each rank holds about as much as with shards. Groups that are elementwise are updated as shards.

    It shares the parameter group dicts with ``optimizer``, so a learning rate set there takes effect here. It also takes over
    the state and the step hooks.

    Args:
        optimizer: steps on some of the tensors equal steps on all of them together (``OptimizerBehavior.by_tensor``), and it can be
            copied (``why_not_copied``).
        elementwise: for each parameter group, whether steps on shards equal steps on the whole parameters.

    Collective: create it from the same optimizer and step it on every rank.

    Source: the division of work is that of Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.3, with one owner of
    each matrix in place of a gather on every rank.
    """

    def __init__(self, optimizer: Optimizer, *, elementwise: Sequence[bool]) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.rank = dist.get_rank()
        self.elementwise = list(elementwise)
        self.part = copy_optimizer(optimizer, [{**group, "params": []} for group in optimizer.param_groups])
        self.state = optimizer.state
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        optimizer.state = defaultdict(dict)
        self._divisions: dict[tuple[int, ...], _Division] = {}  # by ranks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its parameters are updated as wholes."""
        super().add_param_group(param_group)
        if hasattr(self, "part"):  # else torch's constructor adds the first groups
            self.elementwise.append(False)
            self.part.param_groups.append({**self.param_groups[-1], "params": []})

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Return the rank that updates ``parameter`` and holds its state; None if each rank updates its shard or its own copy."""
        self._assign_owners()
        for division in self._divisions.values():
            if parameter in division.owners:
                return division.ranks[division.owners[parameter]]
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step. Collective: call on every rank."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._assign_owners()
        whole: dict[torch.Tensor, torch.Tensor] = {}
        for division in self._divisions.values():
            division.gather(whole)
        here: list[tuple[torch.Tensor, torch.Tensor]] = []  # a parameter, and the tensor that this rank steps for it
        for own, group, is_elementwise in zip(self.part.param_groups, self.param_groups, self.elementwise, strict=True):
            pairs = [
                (p, whole.get(p) if _is_gathered(p, is_elementwise=is_elementwise) else p)
                for p in group["params"]
                if p.grad is not None
            ]
            kept = [(p, stepped) for p, stepped in pairs if stepped is not None]
            own.update({name: value for name, value in group.items() if name != "params"})
            own["params"] = [stepped for _, stepped in kept]
            here += kept
        of_all = {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}
        self.part.state = defaultdict(dict, of_all)
        self.part.state.update({stepped: self.state[p] for p, stepped in here if p in self.state})
        self.part.step()
        for own, group in zip(self.part.param_groups, self.param_groups):
            group.update({name: value for name, value in own.items() if name != "params"})
            own["params"] = []
        for p, stepped in here:
            if stepped in self.part.state:
                self.state[p] = self.part.state.pop(stepped)
        self.state.update(self.part.state)
        for division in self._divisions.values():
            division.scatter(whole)
        return loss

    def _assign_owners(self) -> None:
        by_ranks: dict[tuple[int, ...], list[DTensor]] = {}
        for group, is_elementwise in zip(self.param_groups, self.elementwise, strict=True):
            for p in group["params"]:
                if _is_gathered(p, is_elementwise=is_elementwise):
                    by_ranks.setdefault(tuple(p.device_mesh.mesh.flatten().tolist()), []).append(p)
        for ranks, parameters in by_ranks.items():
            if ranks not in self._divisions:
                self._divisions[ranks] = _Division(parameters[0].device_mesh, self.rank)
            self._divisions[ranks].assign(parameters)

    # ---- state ---------------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Return the state dict in torch's format with only this rank's part of the state."""
        self.part.state = defaultdict(dict)  # between steps, all state is here
        return {**self.part.state_dict(), **Optimizer.state_dict(self)}

    def state_dict(self) -> dict[str, Any]:
        """Raise UsageError, because no rank has the full state."""
        raise no_full_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state dict, in which state that has no owner is sharded like its parameter."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        own = {
            number: value
            for number, value in state_dict["state"].items()
            if not isinstance(number, int)
            or number >= len(parameters)  # torch reports the mismatch of the groups
            or self.owner(parameters[number]) in (None, self.rank)
        }
        load_own_state(self, self.part, state_dict, own)


def _is_gathered(parameter: torch.Tensor, *, is_elementwise: bool) -> bool:
    return isinstance(parameter, DTensor) and not is_elementwise


_Box = tuple[slice, ...]


class _Division:
    """Which of the ranks that hold the shards of some parameters updates which parameter.

    Args:
        mesh: the mesh of the parameters, or another one with the same ranks.
        rank: this rank.
    """

    def __init__(self, mesh: Any, rank: int) -> None:
        self._mesh = mesh
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self._own = self.ranks.index(rank)
        self.owners: dict[torch.Tensor, int] = {}
        """By parameter: the place of its owner in ``ranks``."""
        self._boxes: dict[torch.Tensor, list[_Box | None]] = {}
        """By parameter, for each of the ranks: the slices of its shard; None if it is empty."""
        self._senders: dict[torch.Tensor, list[int]] = {}
        """By parameter: which of the ranks send their shards."""
        self._loads = [0] * len(self.ranks)  # elements of each rank's parameters
        self._group: dist.ProcessGroup | None = None

    def assign(self, parameters: Sequence[DTensor]) -> None:
        """Give each new parameter to the rank that has the least, from the largest to the smallest. Owners do not change later."""
        new = [p for p in parameters if p not in self.owners]
        for p in sorted(new, key=lambda p: -p.numel()):
            owner = self._loads.index(min(self._loads))
            self.owners[p] = owner
            self._loads[owner] += p.numel()
            boxes = [_box(p, rank) for rank in self.ranks]
            # Of the ranks that hold the same shard, the first one sends it.
            first = {str(box): i for i, box in reversed(list(enumerate(boxes))) if box is not None}
            self._boxes[p], self._senders[p] = boxes, sorted(first.values())

    def gather(self, whole: dict[torch.Tensor, torch.Tensor]) -> None:
        """Set ``whole`` for each parameter that this rank updates and that has a gradient. Collective: call on all of the ranks."""
        outgoing: list[list[torch.Tensor]] = [[] for _ in self.ranks]
        incoming: list[list[torch.Tensor]] = [[] for _ in self.ranks]
        for p in self._active():
            owner, boxes = self.owners[p], self._boxes[p]
            if self._own in self._senders[p]:
                outgoing[owner] += [p.grad.to_local(), p.to_local()]
            if owner == self._own:
                local = p.to_local()
                target = torch.empty(p.shape, dtype=p.dtype, device=local.device)
                target.grad = torch.empty(p.shape, dtype=p.grad.dtype, device=local.device)
                whole[p] = target.requires_grad_(p.requires_grad)
                for sender in self._senders[p]:
                    incoming[sender] += [target.grad[boxes[sender]], target.detach()[boxes[sender]]]
        self._exchange(outgoing, incoming)

    def scatter(self, whole: dict[torch.Tensor, torch.Tensor]) -> None:
        """Write the updated parameters into the shards of all ranks. Collective: call on all of the ranks."""
        outgoing: list[list[torch.Tensor]] = [[] for _ in self.ranks]
        incoming: list[list[torch.Tensor]] = [[] for _ in self.ranks]
        for p in self._active():
            owner, boxes = self.owners[p], self._boxes[p]
            if owner == self._own:
                for receiver, box in enumerate(boxes):
                    if box is not None:
                        outgoing[receiver].append(whole[p].detach()[box])
            if boxes[self._own] is not None:
                incoming[owner].append(p.to_local())
        self._exchange(outgoing, incoming)

    def _active(self) -> Iterator[Any]:
        p: Any
        for p in self.owners:
            if p.grad is not None:
                assert p.grad.placements == p.placements, (p.grad.placements, p.placements)
                yield p

    def _exchange(self, outgoing: list[list[torch.Tensor]], incoming: list[list[torch.Tensor]]) -> None:
        """Send the tensors in ``outgoing`` to each rank, and copy those that each rank has sent into ``incoming``."""
        if self._group is None:
            self._group = _group_of(self._mesh)
        sent = [bytes_of(tensor) for tensors in outgoing for tensor in tensors]
        targets = [tensor for tensors in incoming for tensor in tensors]
        device = next((tensor.device for tensor in (*sent, *targets)), self._mesh.device_type)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        message = torch.cat([empty, *sent])
        received = empty.new_empty(sum(target.nbytes for target in targets))
        dist.all_to_all_single(
            received,
            message,
            [sum(tensor.nbytes for tensor in tensors) for tensors in incoming],
            [sum(tensor.nbytes for tensor in tensors) for tensors in outgoing],
            group=self._group,
        )
        for target, part in zip(targets, torch.split(received, [target.nbytes for target in targets])):
            # A copy, because a part may begin between two values of its dtype.
            target.copy_(part.clone().view(target.dtype).view(target.shape))


def _box(parameter: DTensor, rank: int) -> _Box | None:
    """Return the slices of the whole parameter that ``rank`` holds; None if it holds nothing."""
    (coordinate,) = (parameter.device_mesh.mesh == rank).nonzero().tolist()
    shape, offset = shape_and_offset_at(parameter, coordinate)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape)) if all(shape) else None


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """Return a process group of all ranks of ``mesh``. Collective among them."""
    if mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group()
        return group
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made
