"""The example in docs/checkpoints.md runs, and the tables of the document match the code."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from echelon.checkpoint import typed_json
from echelon.checkpoint.regions import ShardPart
from echelon.checkpoint.save import Content, save
from echelon.checkpoint.tensor_file import _AS_BYTES
from tests.checkpoint_ranks import on_threads

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text()


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "3"
    assert done.stdout.splitlines()[1].startswith("checkpoint_1 ['")
    assert done.stdout.endswith("checkpoint_2 is not a folder: manifest.json is missing']\n")


def _read(folder: Path) -> dict[str, np.ndarray]:
    """Read a checkpoint of float32 tensors by the document alone."""
    text = (folder / "manifest.json").read_bytes()
    body = text[len('{"xxh3_128":"","manifest":') + 32 : -2]
    assert json.loads(text)["xxh3_128"] == xxhash.xxh3_128(body).hexdigest()
    manifest = json.loads(body)
    assert (manifest["format"], manifest["version"]) == ("echelon checkpoint", 1)
    data = {}
    for name, facts in manifest["files"].items():
        data[name] = (folder / name).read_bytes()
        assert facts == {"size": len(data[name]), "xxh3_128": xxhash.xxh3_128(data[name]).hexdigest()}
    tensors = {}
    for name, tensor in manifest["tensors"].items():
        assert tensor["dtype"] == "float32"
        tensors[name] = np.full(tensor["shape"], np.nan, dtype="<f4")
        for rank, offset, lengths in tensor["chunks"]:
            file = data[f"rank_{rank:05}.safetensors"]
            (length,) = struct.unpack("<Q", file[:8])
            is_whole = lengths == tensor["shape"]
            entry = json.loads(file[8 : 8 + length])[name if is_whole else f"{name}|{','.join(map(str, offset))}"]
            begin, end = entry["data_offsets"]
            values = np.frombuffer(file[8 + length + begin : 8 + length + end], dtype="<f4").reshape(entry["shape"])
            tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, lengths))] = values
    return tensors | {alias: tensors[name] for alias, name in manifest["aliases"].items()}


def test_another_program_can_read_it(tmp_path: Path) -> None:
    whole = torch.randn(7, 3)

    def run(world: Any, gather: Any) -> None:
        own = ShardPart((7, 3), (4 * world.rank, 0), whole[4 * world.rank : 4 * world.rank + 4])
        content = Content(tensors={"split": own, "whole": whole, "tied": whole, "number": torch.tensor(2.5)})
        save(tmp_path / "c", content, world=world, gather=gather)

    on_threads(run, 2)
    found = _read(tmp_path / "c")
    assert found.keys() == {"split", "whole", "tied", "number"}
    assert all(np.array_equal(found[name], whole.numpy()) for name in ("split", "whole", "tied"))
    assert found["number"] == 2.5


def test_every_type_and_dtype_is_in_the_document() -> None:
    section = TEXT[TEXT.index("typed JSON\n\nEach of") :]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `$")]
    assert {name for row in rows for name in re.findall(r"\$\w+", row)} == {*typed_json._DECODERS, "$tensor"}
    for dtype in _AS_BYTES:
        assert f"`{dtype}`" in TEXT
