"""Decides which rank writes which tensors of a save. The plan is kept until some rank has other tensors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from sys import intern
from typing import Any

import torch
import xxhash

from echelon.base.errors import CheckpointError, DesyncError
from echelon.checkpoint.manifest import chunk_key, encode_layouts
from echelon.checkpoint.regions import ChunkBounds, LocalShard, ShardPart, assign_writers, box_of
from echelon.checkpoint.tensor_file import require_dtype

Gather = Callable[[bytes], list[bytes]]
"""All-gathers bytes. Returns every rank's bytes, in rank order."""


def gather_json(value: Any, gather: Gather) -> list[Any]:
    """Return the values from all ranks, in rank order. Equal ones are one object, which is parsed once."""
    texts = gather(json.dumps(value).encode())
    values = {text: json.loads(text) for text in set(texts)}
    return [values[text] for text in texts]


class Planner:
    """Decides which rank writes what, and keeps the plan for the next save.

    To find out whether the plan still holds, ranks compare only hashes of what they describe. The first of the ranks that
    share a folder makes a new plan, and tells the others what they write.
    """

    def __init__(self) -> None:
        self._key = ""
        """Hash of the descriptions of all ranks for which the plan was made."""
        self._own: Sequence[int] = ()
        """Positions, among this rank's tensors, of those that it writes."""
        self._values: Sequence[tuple[str, torch.Tensor]] = ()
        self._description = b""
        self.layouts = b"{}"
        """The chunks of all tensors, as the manifest lists them; only on the first rank."""
        self.aliases: Mapping[str, str] = {}
        """Additional names of tensors; only on the first rank."""

    def describe(self, tensors: Mapping[str, torch.Tensor | ShardPart], *, may_differ: Collection[str]) -> list[str]:
        """Note the tensors that this rank holds, and return what the other ranks must know to ``update`` the plan.

        Args:
            may_differ: names of tensors whose values may differ between ranks.

        Raises:
            CheckpointError: a tensor cannot be saved.
        """
        values, shards, aliases = [], [], {}
        seen: dict[Any, str] = {}
        for name, tensor in tensors.items():
            shape, box, own = box_of(tensor)
            dtype = str(own.dtype).removeprefix("torch.")
            require_dtype(dtype)
            if own.device.type == "meta":
                raise CheckpointError(
                    f"{name} is on the meta device, so it has no values to save", do="load the weights first"
                )
            values.append((chunk_key(name, shape, box), own))
            shards.append([name, dtype, shape, box.offset, box.lengths, name in may_differ])
            view = (own.device, own.data_ptr(), dtype, shape, box, own.stride())
            if own.numel() and seen.setdefault(view, name) != name:
                aliases[name] = seen[view]
        self._values = values
        self._description = json.dumps([shards, aliases], separators=(",", ":")).encode()
        return [xxhash.xxh3_128_hexdigest(self._description), self._key]

    def update(
        self,
        announced: Sequence[Sequence[str]],
        *,
        rank: int,
        writers: Sequence[Sequence[int]],
        run: Callable[[Callable[[], Any]], list[Any]],
        gather: Gather,
    ) -> list[tuple[str, torch.Tensor]]:
        """Make a new plan if the tensors of any rank have changed. Return those that this rank writes, with their names in its file.

        Args:
            announced: what ``describe`` returned on each rank.
            writers: for each rank, the ranks that write to the same folder.
            run: calls a function on every rank and returns the results of all ranks.

        Collective: call on every rank.

        Raises:
            CheckpointError: tensors overlap, or some of their elements are missing.
            DesyncError: ranks have different tensors with the same name.
        """
        values, description = self._values, self._description
        self._values, self._description = (), b""  # only the plan is kept
        digests, first_writers = [digest for digest, _ in announced], [ranks[0] for ranks in writers]
        key = xxhash.xxh3_128_hexdigest(json.dumps([digests, first_writers]).encode())
        if all(kept == key for _, kept in announced):
            return [values[i] for i in self._own]
        self._key = ""  # until all ranks have the new plan
        senders = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        sent = gather(zlib.compress(description, 1) if senders[digests[rank]] == rank else b"")

        @lru_cache(maxsize=1)
        def described(digest: str) -> Any:
            return json.loads(zlib.decompress(sent[senders[digest]]))

        def assign() -> Any:
            if rank != first_writers[rank]:
                return None
            try:
                return self._assign({other: digests[other] for other in writers[rank]}, described)
            except (CheckpointError, DesyncError) as error:
                return {"error": [isinstance(error, DesyncError), error.what, error.do]}

        plans = run(assign)
        for plan in plans:
            if isinstance(plan, dict):
                is_desync, what, do = plan["error"]
                raise (DesyncError if is_desync else CheckpointError)(what, do=do)
        writes = int(plans[first_writers[rank]][writers[rank].index(rank)], 16)
        self._own = [i for i in range(len(values)) if writes >> i & 1]
        self._key = key
        return [values[i] for i in self._own]

    def _assign(self, digests: Mapping[int, str], described: Callable[[str], Any]) -> list[str]:
        """Assign the tensors to the ranks in ``digests``. Return for each of them the bits of ``_own``, as hexadecimal digits."""
        names: dict[int, list[str]] = {}
        self.aliases = _common_aliases(dict.fromkeys(digests.values()), described)

        def shards(rank: int) -> Iterator[LocalShard]:
            names[rank] = []
            for name, dtype, shape, offset, lengths, may_differ in described(digests[rank])[0]:
                names[rank].append(intern(name))  # ranks have the same names
                if name not in self.aliases:
                    box = ChunkBounds(tuple(offset), tuple(lengths))
                    yield LocalShard(names[rank][-1], dtype, tuple(shape), box, may_differ)

        layouts = assign_writers({rank: shards(rank) for rank in digests})
        self.layouts = encode_layouts(layouts)
        writes: dict[int, set[str]] = {rank: set() for rank in digests}
        for name, layout in layouts.items():
            for chunk in layout.chunks:
                writes[chunk.rank].add(name)
        return [f"{sum(1 << i for i, name in enumerate(names[rank]) if name in writes[rank]):x}" for rank in digests]


def _common_aliases(digests: Collection[str], described: Callable[[str], Any]) -> dict[str, str]:
    """Return the first rank's tensor aliases on which all ranks that hold the tensor agree."""
    common: dict[str, str] | None = None
    for digest in digests:
        shards, aliases = described(digest)
        names = {shard[0] for shard in shards}
        common = aliases if common is None else common
        common = {name: first for name, first in common.items() if name not in names or aliases.get(name) == first}
        if not common:
            break
    return common or {}
