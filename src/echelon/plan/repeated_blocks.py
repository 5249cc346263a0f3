"""Traces few of many equal blocks, and repeats what one of them did for the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.plan.storages import Operator, Storage

_FEWEST = 8  # blocks; with fewer, the whole model is traced
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)
_TIMES = ("made", "freed", "away_from", "away_until")


class NotPeriodicError(Exception):
    """Blocks that look equal did not do the same, so all of them must be traced."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """A list of equal blocks of which the first three and the last are traced. The third stands for those left out."""

    modules: nn.ModuleList
    name: str
    blocks: tuple[nn.Module, ...]

    @property
    def left_out(self) -> range:
        """Numbers of the blocks that are not traced."""
        return range(3, len(self.blocks) - 1)

    @property
    def traced(self) -> tuple[nn.Module, ...]:
        """The blocks that are traced."""
        return (*self.blocks[:3], self.blocks[-1])

    def twins(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield the parameters of the third block, each with the one in its place in each block that was left out."""
        for number in self.left_out:
            yield from zip(self.blocks[2].parameters(), self.blocks[number].parameters(), strict=True)

    def unit(self, number: int) -> str:
        """Return the name of a block."""
        return f"{self.name}.{number}"

    def holds(self, number: int, unit: str) -> bool:
        """Return whether ``unit`` is a block, or in it."""
        return unit == self.unit(number) or unit.startswith(f"{self.unit(number)}.")


def repeated_blocks(model: nn.Module) -> Iterator[RepeatedBlocks]:
    """Yield the lists in ``model`` of many blocks with the same classes, sizes and settings, outer ones only."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside or not isinstance(module, nn.ModuleList) or len(module) < _FEWEST:
            continue
        first = _signature(module[0])
        if module is not model and all(_signature(block) == first for block in module):
            inside.update(module.modules())
            yield RepeatedBlocks(module, name, tuple(module))


def _signature(block: nn.Module) -> list[Any]:
    found: list[Any] = []
    for name, module in block.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _SIMPLE) and not key.endswith(("idx", "index", "layer_id"))
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, one.shape, one.stride(), one.dtype, one.requires_grad) for key, one in tensors]
        found.append((name, type(module), settings, shapes))
    return found


def repeat_blocks(
    operators: Sequence[Operator], storages: Sequence[Storage], repeated: RepeatedBlocks
) -> tuple[list[Operator], list[Storage]]:
    """Return the operators and storages of a step with those of the blocks that were left out.

    Raises:
        NotPeriodicError: the second and the third block did not do the same.
    """
    return _Repetition(operators, storages, repeated).result()


class _Repetition:
    """Where the blocks' operators are. Numbers of blocks are those of the model; in the lists of segments, the last one is 3."""

    def __init__(self, operators: Sequence[Operator], storages: Sequence[Storage], repeated: RepeatedBlocks) -> None:
        self._operators, self._storages, self._repeated = operators, storages, repeated
        self._count = len(repeated.left_out)
        numbers = (0, 1, 2, len(repeated.blocks) - 1)
        starts: dict[tuple[str, int], int] = {}
        for place, one in enumerate(operators):
            if one.phase != "optimizer" and one.unit.startswith(repeated.name):
                for segment, number in enumerate(numbers):
                    if repeated.holds(number, one.unit):
                        starts.setdefault((one.phase, segment), place)
        if len(starts) != 8:
            raise NotPeriodicError
        self._up = [starts["forward", segment] for segment in range(4)]
        self._down = [starts["backward", segment] for segment in range(4)]
        if sorted([*self._up, *self._down[::-1]]) != [*self._up, *self._down[::-1]]:
            raise NotPeriodicError
        self._up_size = self._up[3] - self._up[2]
        self._down_size = self._down[1] - self._down[2]
        self._segments: list[int | None] = [None] * (len(operators) + 1)  # of each place
        for segment in range(4):
            up, down = self._up[segment], self._down[segment]
            up_end = self._up[segment + 1] if segment < 3 else up + self._up_size
            down_end = self._down[segment - 1] if segment else min(down + self._down_size, len(operators))
            self._segments[up:up_end] = [segment] * (up_end - up)
            self._segments[down:down_end] = [segment] * (down_end - down)

    def result(self) -> tuple[list[Operator], list[Storage]]:
        up, down = self._up, self._down
        self._check()
        operators = list(self._operators[: up[3]])
        for number in self._repeated.left_out:
            operators += self._renamed(up[2], up[3], number)
        operators += self._operators[up[3] : down[2]]
        for number in reversed(self._repeated.left_out):
            operators += self._renamed(down[2], down[1], number)
        operators += self._operators[down[2] :]
        storages = []
        last = self._repeated.left_out.stop
        for one in self._storages:
            block = self._segment(one.made)
            if block == 2:
                storages += [self._moved(one, number) for number in (2, *self._repeated.left_out)]
            else:
                storages.append(self._moved(one, last if block == 3 else block))
        return operators, storages

    def _check(self) -> None:
        for (start, middle, end), old, new in (
            ((self._up[1], self._up[2], self._up[3]), 1, 2),
            ((self._down[2], self._down[1], self._down[0]), 2, 1),
        ):
            name, other = self._repeated.unit(old), self._repeated.unit(new)
            earlier = [(one.unit.replace(name, other), one.line) for one in self._operators[start:middle]]
            if earlier != [(one.unit, one.line) for one in self._operators[middle:end]]:
                raise NotPeriodicError
        kinds = [
            Counter(
                (one.num_bytes, one.kind, *(self._relative(getattr(one, key), block) for key in _TIMES))
                for one in self._storages
                if self._segment(one.made) == block
            )
            for block in (1, 2)
        ]
        if kinds[0] != kinds[1]:
            raise NotPeriodicError

    def _relative(self, place: int | None, block: int) -> Any:
        """Return when something happens to a storage of ``block``, as it would be for another block."""
        if place is None:
            return None
        segment = self._reached(place)
        if segment is None:
            return place
        way, offset = self._offset(place)
        if way == "down" and segment == block - 1:
            # In the block that runs next. If inputs need no gradient, as with adapters, the first block's backward pass is shorter than
            # the others', so that places in it are not those in other blocks.
            return -1, way
        return segment - block, way, offset

    def _reached(self, place: int) -> int | None:
        """Return the block among those traced in which something ends; 4: as soon as the last one has run."""
        return 4 if place == self._up[3] + self._up_size else self._segment(place)

    def _offset(self, place: int) -> tuple[str, int]:
        segment = self._reached(place)
        assert segment is not None, place
        if segment == 4:
            return "up", 0
        is_forward = place < self._down[3]
        return ("up", place - self._up[segment]) if is_forward else ("down", place - self._down[segment])

    def _segment(self, place: int) -> int | None:
        """Return the block among those traced that runs the operator at ``place``."""
        return self._segments[place] if place >= 0 else None

    def _renamed(self, start: int, end: int, number: int) -> Iterator[Operator]:
        third = self._repeated.unit(2)
        for one in self._operators[start:end]:
            inside = self._repeated.holds(2, one.unit)
            unit = self._repeated.unit(number) + one.unit.removeprefix(third)
            yield Operator(one.phase, unit, one.line, one.inside) if inside else one

    def _moved(self, storage: Storage, number: int | None) -> Storage:
        """Return the storage as block ``number`` has it (None: of no block)."""
        own = self._segment(storage.made)
        made = self._time(storage.made, own, number)
        assert made is not None
        return Storage(
            num_bytes=storage.num_bytes,
            made=made,
            freed=self._time(storage.freed, own, number),
            kind=storage.kind,
            away_from=self._time(storage.away_from, own, number),
            away_until=self._time(storage.away_until, own, number),
        )

    def _time(self, place: int | None, own: int | None, number: int | None) -> int | None:
        """Return when something happens to a storage of the traced block ``own`` (None: of no block) as block ``number`` has it."""
        if place is None:
            return None
        segment = self._reached(place)
        if (own, segment) == (1, 3) and place < self._down[3]:  # the next but one, as of the third block
            return self._place(3, *self._offset(place))
        if number is None or own is None or segment is None or own < 2:
            return self._mapped(place)
        return self._place(number + segment - own, *self._offset(place))

    def _mapped(self, place: int) -> int:
        """Return where an operator that was traced is in the whole step."""
        before = (place >= self._up[3]) * self._count * self._up_size
        return place + before + (place >= self._down[2]) * self._count * self._down_size

    def _place(self, number: int, way: str, offset: int) -> int:
        """Return where block ``number`` of the model has the operator at ``offset``."""
        last = self._repeated.left_out.stop
        if number > last:
            return self._mapped(self._up[3] + self._up_size)
        starts = self._up if way == "up" else self._down
        if number in (0, 1, last) or (number == 2 and way == "up"):
            return self._mapped(starts[3 if number == last else number]) + offset
        if way == "up":
            return starts[2] + (number - 2) * self._up_size + offset
        return self._mapped(starts[2]) - (number - 2) * self._down_size + offset


def repeat_sums(sums: dict[str, Any], repeated: RepeatedBlocks) -> dict[str, Any]:
    """Return what is kept by unit, with the units of the blocks that were left out."""
    third, result = repeated.unit(2), dict(sums)
    for unit, value in sums.items():
        if repeated.holds(2, unit):
            result |= {repeated.unit(number) + unit.removeprefix(third): value for number in repeated.left_out}
    return result
