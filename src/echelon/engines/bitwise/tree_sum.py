"""Makes gradients bit-identical on any number of ranks by summing an update's batch shards in a fixed binary tree.

The leaves of the tree are the canonical shards, numbered 0 to C - 1. Rank r of W holds the shards from ``r * C // W`` up to
``(r + 1) * C // W``. Floating-point addition is not associative, so the tree fixes the order of every sum, no matter which
ranks hold the operands. A rank sums the largest subtrees that it holds completely; the rest is summed after an exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from echelon.data.global_batch_slices import Contribution, shards_of
from echelon.engines.shards import local_as, local_tensors

_SMALL = 2**18  # in elements; for smaller sizes, one all-gather is faster than two exchanges of parts
Values = list[torch.Tensor | None]
"""A leaf's gradients, or a sum of gradients. An entry is None if no leaf had that gradient; a leaf with none is empty."""


@dataclass(frozen=True, slots=True)
class SumNode:
    """The sum over the leaves from ``index * 2**level`` up to (but not including) ``(index + 1) * 2**level``."""

    level: int
    index: int

    @property
    def leaves(self) -> range:
        """The leaves below this node in an infinite tree."""
        return range(self.index << self.level, (self.index + 1) << self.level)

    @property
    def children(self) -> tuple[SumNode, SumNode]:
        """The two halves of this node."""
        return SumNode(self.level - 1, 2 * self.index), SumNode(self.level - 1, 2 * self.index + 1)

    @property
    def parent(self) -> SumNode:
        """The sum of this node and its sibling."""
        return SumNode(self.level + 1, self.index // 2)

    @property
    def sibling(self) -> SumNode:
        """The other half of the parent."""
        return SumNode(self.level, self.index ^ 1)


def top_of(num_leaves: int) -> SumNode:
    """Return the root of the tree."""
    return SumNode((num_leaves - 1).bit_length(), 0)


def roots_of(leaves: range, *, num_leaves: int) -> list[SumNode]:
    """Return, in order, the largest nodes whose leaves are all in ``leaves``. A rank can compute their sums alone."""
    roots: list[SumNode] = []
    pending = [top_of(num_leaves)] if leaves else []
    while pending:
        node = pending.pop()
        own = range(node.leaves.start, min(node.leaves.stop, num_leaves))
        if own.start >= leaves.start and own.stop <= leaves.stop:
            roots += [node] if own else []
        elif own.start < leaves.stop and leaves.start < own.stop:
            pending += reversed(node.children)
    return roots


class TreeSum:
    """Sums all leaves, which are lists of tensors. Every rank has at least one leaf."""

    def __init__(self, *, num_leaves: int, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        """Create a sum over the ranks of ``group`` (None: the default group), of which this one is number ``rank``."""
        self._num_leaves = num_leaves
        self._world_size = world_size
        self._group = group
        self._leaves = [shards_of(r, world_size=world_size, num_shards=num_leaves) for r in range(world_size)]
        self._roots = [roots_of(leaves, num_leaves=num_leaves) for leaves in self._leaves]
        self._rank = rank
        self._next = self._leaves[rank].start
        self._found: dict[SumNode, Values] = {}

    def reset(self) -> None:
        """Start a new sum."""
        self._next = self._leaves[self._rank].start
        self._found = {}

    def add(self, values: Values) -> None:
        """Add this rank's next leaf, and take ownership of its tensors."""
        node, siblings = self._climb(self._next)
        self._next += 1
        for sibling in siblings:
            values = _add(self._found.pop(sibling), values)
        self._found[node] = values

    def finish(self, last: Values | None, like: Sequence[torch.Tensor]) -> Values:
        """Return the sum, which is bit-identical on every rank. An entry is None if no leaf on any rank had a value.

        Args:
            last: this rank's last leaf, or None if it was already added. It is not modified, so ``finish`` may be called
                again with another last leaf.
            like: tensors with the same shapes as the sum and a common dtype and device.

        Collective: call on every rank.
        """
        found = dict(self._found)
        if last is not None:
            (node, siblings), total = self._climb(self._next), last
            for sibling in siblings:
                total = _sum(found.pop(sibling), total)
            found[node] = total
        if self._world_size == 1:
            return self._clone_shared(found[self._roots[0][0]] or [None] * len(like), last)
        summed = self._exchange([_flat(found[node], like) for node in self._roots[self._rank]])
        present = summed[-len(like) :].tolist()
        parts = summed[: -len(like)].split([t.numel() for t in like])  # type: ignore[no-untyped-call]
        return [part.view_as(one) if there else None for part, one, there in zip(parts, like, present)]

    def _clone_shared(self, total: Values, last: Values | None) -> Values:
        """Return ``total``, cloning the tensors that a later ``finish`` needs unmodified."""
        kept = {id(value) for values in (*self._found.values(), last or ()) for value in values}
        return [value.clone() if value is not None and id(value) in kept else value for value in total]

    def _climb(self, leaf: int) -> tuple[SumNode, list[SumNode]]:
        """Return the node that ``leaf`` completes, and the complete sibling nodes to add on the way up."""
        node, siblings, own = SumNode(0, leaf), [], self._roots[self._rank]
        while node not in own:
            sibling = node.sibling
            if sibling.leaves.start > leaf and sibling.leaves.start < self._num_leaves:
                break  # added later
            if sibling.leaves.start < leaf:
                siblings.append(sibling)
            node = node.parent
        return node, siblings

    def _exchange(self, mine: list[torch.Tensor]) -> torch.Tensor:
        """Compute the rest of the tree."""
        nodes = [node for roots in self._roots for node in roots]

        def add(rows: Sequence[torch.Tensor]) -> torch.Tensor:
            total = subtree_sum(dict(zip(nodes, rows)), top_of(self._num_leaves))
            assert total is not None, "every rank has a leaf"
            return total

        return sum_by_segment(mine, counts=[len(roots) for roots in self._roots], add=add, group=self._group)


def subtree_sum(found: Mapping[SumNode, torch.Tensor], node: SumNode) -> torch.Tensor | None:
    """Return the sum at ``node`` of the nodes in ``found``; None if there is none below it."""
    if node in found or not node.level:
        return found.get(node)
    left, right = (subtree_sum(found, child) for child in node.children)
    return left + right if left is not None and right is not None else left if right is None else right


def sum_by_segment(
    mine: Sequence[torch.Tensor],
    *,
    counts: Sequence[int],
    add: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return ``add`` of the tensors of all ranks. Each rank adds one segment of the elements, or all elements if there are few.

    Args:
        mine: this rank's tensors, 1-D.
        counts: the number of tensors of each rank of ``group``.
        add: returns the sum of all tensors' segments, which are given in the order of the ranks.
        group: the ranks (None: the default group).

    Collective: call on every rank of ``group``.
    """
    world_size, size, like = len(counts), mine[0].numel(), mine[0]
    if size <= _SMALL:
        most = max(counts)
        sent = like.new_zeros(most, size)
        torch.stack(list(mine), out=sent[: len(mine)])
        got = like.new_empty(world_size * most, size)
        dist.all_gather(list(got.chunk(world_size)), sent, group=group)
        return add([got[r * most + i] for r, count in enumerate(counts) for i in range(count)])
    width = -(-size // world_size)
    padded = like.new_zeros(len(mine), world_size * width)
    padded[:, :size].copy_(torch.stack(list(mine)))
    segments = padded.view(len(mine), world_size, width).transpose(0, 1).contiguous()
    received = like.new_empty(sum(counts), width)
    dist.all_to_all_single(
        received.view(-1),
        segments.view(-1),
        [count * width for count in counts],
        [len(mine) * width] * world_size,
        group=group,
    )
    whole = like.new_empty(world_size * width)
    dist.all_gather(list(whole.chunk(world_size)), add(list(received)), group=group)
    return whole[:size]


def _local_gradients(parameters: Sequence[torch.Tensor]) -> Values:
    with torch.no_grad():  # else a DTensor returns another view each time
        return [None if p.grad is None else local_tensors([p.grad])[0] for p in parameters]


def _add(left: Values, right: Values) -> Values:
    """Add ``right`` into ``left``."""
    both = [i for i, (a, b) in enumerate(zip(left, right)) if a is not None and b is not None]
    if both:
        torch._foreach_add_([left[i] for i in both], [right[i] for i in both])  # type: ignore[misc]
    return _merged(left, right)


def _sum(left: Values, right: Values) -> Values:
    """Return ``left + right`` without modifying either."""
    both = [i for i, (a, b) in enumerate(zip(left, right)) if a is not None and b is not None]
    merged = _merged(left, right)
    if both:
        sums = torch._foreach_add([left[i] for i in both], [right[i] for i in both])  # type: ignore[misc]
        for i, total in zip(both, sums):
            merged[i] = total
    return merged


def _merged(left: Values, right: Values) -> Values:
    return list(left or right) if not left or not right else [b if a is None else a for a, b in zip(left, right)]


def _flat(values: Values, like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the values, with zeros for missing ones, followed by flags that mark which values are present."""
    values = values or [None] * len(like)
    parts = [torch.zeros_like(one) if value is None else value for value, one in zip(values, like)]
    present = like[0].new_tensor([value is not None for value in values])
    return torch.cat([*(part.reshape(-1) for part in parts), present])


class ShardedUpdate(ABC):
    """Computes an update's gradients from batch shards that are the same on any number of ranks. Engines create it."""

    @abstractmethod
    def begin(self, contribution: Contribution) -> None:
        """Start a micro-step by adding the previous one's gradients to the sum, unless its contribution was padding."""

    @abstractmethod
    def before_backward(self) -> None:
        """Prepare for a backward pass. A second pass in the last micro-step adds to the shard's gradients, not to the sum."""

    @abstractmethod
    def finish(self) -> None:
        """Replace the gradients with the sum over all shards after a backward pass in the last micro-step.

        Collective: call on every rank.
        """

    @abstractmethod
    def has_reached(self, parameters: Collection[int]) -> bool:
        """Return whether a backward pass of this micro-step has reached one of the parameters with these ids on this rank."""

    @abstractmethod
    def forget_earlier(self, parameters: Collection[int]) -> None:
        """Do not add gradients of earlier updates to the sums of the parameters with these ids."""

    @abstractmethod
    def discard(self) -> None:
        """Discard the update."""


class EarlierGradients:
    """Gradients of earlier updates that the loop did not clear, which are added to an update's sums."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor | None] | None = []

    def begin_update(self) -> None:
        """Note that a new update begins; the loop may still clear gradients in its first micro-step."""
        self._found = None

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the gradients of ``parameters`` before the update's first backward pass; later calls do nothing."""
        if self._found is None:
            self._found = [p.grad for p in parameters]
            for parameter in parameters:
                parameter.grad = None

    def add_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add what was taken to the gradients of ``parameters``."""
        assert self._found is not None
        for parameter, earlier in zip(parameters, self._found):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def forget(self, parameters: Sequence[torch.Tensor], cleared: Collection[int]) -> None:
        """Forget the gradients of those of ``parameters`` whose ids are in ``cleared``."""
        if self._found:
            self._found = [None if id(p) in cleared else one for p, one in zip(parameters, self._found)]

    def discard(self) -> None:
        """Forget what was taken."""
        self._found = []


class ReplicatedUpdate(ShardedUpdate):
    """Sums gradients for engines whose ranks hold full, unreduced gradients, or unreduced gradients of the same parts."""

    def __init__(
        self,
        parameters: Callable[[], Sequence[torch.Tensor]],
        *,
        num_shards: int,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create the sum for ``parameters()``, which returns the parameters that get gradients, in the same order on every rank.

        ``group`` has the ranks with different shards (None: the default group), of which this one is number ``rank``.
        """
        self._parameters = parameters
        self._new_tree = partial(TreeSum, num_leaves=num_shards, rank=rank, world_size=world_size, group=group)
        self._trees: dict[tuple[torch.dtype, torch.device], TreeSum] = {}
        self._left = len(shards_of(rank, world_size=world_size, num_shards=num_shards))
        self._num_own = self._left
        self._is_counted = False
        self._local: list[torch.Tensor | None] | None = None  # gradients of the last micro-step, after ``finish``
        self._earlier = EarlierGradients()

    def begin(self, contribution: Contribution) -> None:
        if contribution.micro_step == 0:
            for tree in self._trees.values():
                tree.reset()
            self._left = self._num_own
            self._earlier.begin_update()
        else:
            self._earlier.take(self._parameters())
            if self._left:
                self._add_to_trees()
            for parameter in self._parameters():
                parameter.grad = None
        self._is_counted, self._local = not contribution.is_padding, None

    def _add_to_trees(self) -> None:
        self._left -= 1
        for kind, parameters in self._by_kind().items():
            self._tree(kind).add(_local_gradients(parameters) if self._is_counted else [])

    def _by_kind(self) -> dict[tuple[torch.dtype, torch.device], list[torch.Tensor]]:
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in self._parameters():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        return kinds

    def _tree(self, kind: tuple[torch.dtype, torch.device]) -> TreeSum:
        if kind not in self._trees:
            self._trees[kind] = self._new_tree()
        return self._trees[kind]

    def before_backward(self) -> None:
        self._earlier.take(self._parameters())
        if self._local is not None:
            for parameter, gradient in zip(self._parameters(), self._local):
                parameter.grad = gradient
            self._local = None

    def finish(self) -> None:
        self._local = [p.grad for p in self._parameters()]
        for kind, parameters in self._by_kind().items():
            last = (_local_gradients(parameters) if self._is_counted else []) if self._left else None
            for parameter, total in zip(parameters, self._tree(kind).finish(last, local_tensors(parameters))):
                parameter.grad = local_as(total, parameter) if total is not None else None
        self._earlier.add_to(self._parameters())

    def has_reached(self, parameters: Collection[int]) -> bool:
        local = [p.grad for p in self._parameters()] if self._local is None else self._local
        return any(id(p) in parameters and gradient is not None for p, gradient in zip(self._parameters(), local))

    def forget_earlier(self, parameters: Collection[int]) -> None:
        self._earlier.forget(self._parameters(), parameters)

    def discard(self) -> None:
        self._trees.clear()
        self._local = None
        self._earlier.discard()
