"""A thread computes checksums while a file is written; they match the file on disk."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import xxhash

from echelon.checkpoint import storage, tensor_file

BLOCK = tensor_file.BLOCK_BYTES


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_the_checksum_matches_the_file(size: int, tmp_path: Path) -> None:
    contents = [b"head", torch.arange(size, dtype=torch.int64).to(torch.uint8).numpy().tobytes(), b"tail"]
    before = threading.active_count()
    facts = tensor_file.write_file(tmp_path / "file", contents)
    written = (tmp_path / "file").read_bytes()
    assert written == b"".join(contents)
    assert facts == tensor_file.FileFacts(len(written), xxhash.xxh3_128(written).hexdigest())
    assert threading.active_count() == before


def test_without_a_thread_the_checksum_is_computed_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    content = bytes(range(256)) * (2 * BLOCK // 256 + 1)
    facts = tensor_file.write_file(tmp_path / "file", [content])
    assert facts.xxh3_128 == xxhash.xxh3_128(content).hexdigest()


def test_the_thread_ends_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write", full)
    before = threading.active_count()
    with pytest.raises(OSError, match="No space"):
        tensor_file.write_file(tmp_path / "file", [bytes(9 * BLOCK)])
    assert threading.active_count() == before
