"""The tensors in a manifest are read without parsing all of it as JSON; what that yields must be what the JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from echelon.base.errors import CheckpointError
from echelon.checkpoint.manifest import encode_layouts, manifest_blocks, read_manifest
from echelon.checkpoint.regions import Chunk, ChunkBounds, ChunkTable, TensorLayout
from echelon.checkpoint.tensor_file import FileFacts

_FILES = {f"rank_{rank:05}.safetensors": FileFacts(1000, "0" * 32) for rank in (0, 3)}


def _layout(shape: tuple[int, ...], *chunks: tuple[int, tuple[int, ...], tuple[int, ...]]) -> TensorLayout:
    table = ChunkTable.of([Chunk(rank, ChunkBounds(offset, lengths)) for rank, offset, lengths in chunks], len(shape))
    return TensorLayout("float32", shape, table)


_LAYOUTS = {
    "a": _layout((4, 2), (0, (0, 0), (1, 2)), (3, (1, 0), (3, 1)), (0, (1, 1), (3, 1))),
    'a "name"\\ \u00e9 ,"tensors":{': _layout((3,), (3, (0,), (3,))),
    "empty": _layout((0, 3)),
    "scalar": _layout((), (3, (), ())),
}


def _written(folder: Path, **changed: Any) -> bytes:
    content: dict[str, Any] = {
        "token": "0" * 16,
        "created": "",
        "world_size": 4,
        "progress": None,
        "config": {"x": 1, "tensors": {"y": 2}},  # not the tensors
        "layout": {"tensors": {}},
        "files": _FILES,
        "tensors": encode_layouts(_LAYOUTS),
        "aliases": {"b": "a", "tensors": "a"},
    }
    blocks = manifest_blocks(**{**content, **changed})
    (folder / "manifest.json").write_bytes(b"".join(blocks))
    return b"".join(blocks[1:-1])


@pytest.mark.parametrize("config", [None, {"x": 1, "tensors": {"y": 2}}])
def test_a_manifest_says_the_same_in_any_form_of_json(config: Any, tmp_path: Path) -> None:
    body = _written(tmp_path, config=config)
    found = read_manifest(tmp_path)
    assert found.tensors == _LAYOUTS
    assert (found.config, found.aliases) == (config, {"b": "a", "tensors": "a"})
    indented = json.dumps(json.loads(body), indent=1).encode()
    text = b'{"xxh3_128":"%s","manifest":%s}\n' % (xxhash.xxh3_128_hexdigest(indented).encode(), indented)
    (tmp_path / "manifest.json").write_bytes(text)
    assert read_manifest(tmp_path) == found


@pytest.mark.parametrize(
    "tensors",
    [
        b'{"a":{"dtype":"float32","shape":[5],"chunks":[[0,[9223372036854775807],[1]],[0,[0],[4]]]}}',  # 2**63 - 1
        b'{"a":{"dtype":"float32","shape":[4],"chunks":[[0,[0],[99999999999999999999]]]}}',
        b'{"a":{"dtype":"float32","shape":[4],"chunks":[[0,[],[4]]]}}',
        b'{"a":{"dtype":"float32","shape":[4],"chunks":[[0,[0],[4]],]}}',
        b'{"a":{"dtype":"float32","shape":[4],"chunks":[[1,[0],[4]]]}}',  # without a file
        b'{"a":{"dtype":"float32","shape":[400],"chunks":[[0,[0],[400]]]}}',  # more than its file holds
        b'{"a":{"dtype":"float32","shape":[1],"chunks":[[0,[0],[1]]]},"a":{"dtype":"float32","shape":[1],"chunks":[[0,[0],[1]]]}}',
        b'{"a":{"dtype":"float32","shape":[1],"chunks":[[0,[0],[1]]]},}',
    ],
)
def test_tensors_that_are_not_as_a_save_writes_them_are_rejected(tensors: bytes, tmp_path: Path) -> None:
    _written(tmp_path, tensors=tensors, aliases={}, config=None)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(tmp_path)
