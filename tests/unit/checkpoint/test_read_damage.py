"""Damaged checkpoints are skipped and their files named; malicious checkpoints are rejected without side effects."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from echelon.accelerator.checkpoint.folders import newest_whole
from echelon.base.errors import CheckpointError
from echelon.checkpoint import typed_json
from echelon.checkpoint.manifest import MANIFEST
from echelon.checkpoint.read import Checkpoint, newest, open_verified
from tests.checkpoint_ranks import no_code_and_no_other_files, save_on_threads, world_of_threads
from tests.toy_storage import ToyStorage

WORLD = world_of_threads(0, 1)


# ---- damage ----------------------------------------------------------------------------------------------------------


def _damage(draw: random.Random, path: Path) -> str:
    data = bytearray(path.read_bytes())
    kind = draw.choice(["flip", "flip", "flip", "truncate", "extend", "delete"])
    if kind == "delete":
        path.unlink()
        return kind
    if kind == "flip":
        position = draw.randrange(len(data) * 8)
        data[position // 8] ^= 1 << position % 8
    elif kind == "truncate":
        del data[draw.randrange(len(data)) :]
    else:
        data += draw.randbytes(draw.choice([1, 4096]))
    path.write_bytes(data)
    return kind


def _damage_each(tmp_path: Path, num_cases: int) -> None:
    old, new = tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"
    save_on_threads(old, 1)
    save_on_threads(new, 2)
    names = sorted(path.name for path in new.iterdir())
    assert len(names) == 6
    for seed in range(num_cases):
        draw = random.Random(seed)
        path = new / draw.choice(names)
        intact = path.read_bytes()
        kind = _damage(draw, path)
        found, ((skipped, why),) = newest_whole(WORLD, tmp_path, prefix="checkpoint_")
        assert (found, skipped) == (old, new), (seed, kind)
        assert path.name.split(".")[0] in why, (seed, kind, why)
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            open_verified(new, world=WORLD)
        path.write_bytes(intact)
    assert newest_whole(WORLD, tmp_path, prefix="checkpoint_") == (new, [])


@pytest.mark.slow
def test_200_kinds_of_damage_are_detected_and_the_file_is_named(tmp_path: Path) -> None:
    _damage_each(tmp_path, 200)


@pytest.mark.soak
def test_2000_kinds_of_damage_are_detected_and_the_file_is_named(tmp_path: Path) -> None:
    _damage_each(tmp_path, 2000)


def test_no_intact_checkpoint_is_not_an_error_and_lists_the_reasons(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_1").mkdir()
    found = newest([tmp_path / "checkpoint_1", tmp_path / "checkpoint_0"], world=WORLD)
    assert found.checkpoint is None
    assert [why for _, why in found.skipped] == [
        f"{tmp_path / 'checkpoint_1'} is not a checkpoint: manifest.json is missing",
        f"{tmp_path / 'checkpoint_0'} is not a folder: manifest.json is missing",
    ]


# ---- hostile checkpoints, whose checksums are right ------------------------------------------------------------------


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/echelon-was-here",)


def _seal(body: bytes) -> bytes:
    return b'{"xxh3_128":"%s","manifest":%s}\n' % (xxhash.xxh3_128_hexdigest(body).encode(), body)


def _manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["manifest"]
    return content


def _write_manifest(folder: Path, content: Any) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / MANIFEST).write_bytes(_seal(body))


def _replace(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file, and their checksum into the manifest."""
    (folder / name).write_bytes(data)
    content = _manifest(folder)
    content["files"][name] = {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    _write_manifest(folder, content)


def _header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(folder: Path, header: bytes, rest: bytes | None = None, length: int | None = None) -> None:
    _, own = _header_of(folder)
    data = struct.pack("<Q", len(header) if length is None else length) + header + (own if rest is None else rest)
    _replace(folder, FILE, data)


def _with_a_hole(folder: Path) -> None:
    """Let a tensor have more elements than are stored; reading them would show memory that nobody has written."""
    header, _ = _header_of(folder)
    header["w|0"] = header.pop("w")
    _with_header(folder, json.dumps(header).encode())
    layout = {"dtype": "float32", "shape": [5], "chunks": [[0, [0], [3]]]}
    _write_manifest(folder, _put(_manifest(folder), ("tensors", "w"), layout))


FILE = "rank_00000.safetensors"
Attack = Callable[[Path], None]
HOSTILE = [None, True, -1, 2**63, 1e308, "../../x", "/etc/passwd", "x" * 100_000, [], [[[]]], {}, {"$path": "/"}]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = _put(value[path[0]], path[1:], new)
    return value


def _rename_key(content: dict[str, Any], section: str, new: str) -> dict[str, Any]:
    first = next(iter(content[section].values()))
    content[section] = {new: first, **content[section]}
    return content


def _attacks(folder: Path) -> Iterator[tuple[str, Attack]]:
    content = _manifest(folder)
    for path in _leaves(content):
        for hostile in HOSTILE:
            yield (
                f"manifest {path} = {str(hostile)[:20]}",
                lambda f, p=path, h=hostile: _write_manifest(f, _put(content, p, h)),
            )
    for name in (
        "../escape.safetensors",
        "/etc/passwd",
        "rank_00000.safetensors/../x",
        "",
        ".",
        "a\0b",
        "manifest.json",
    ):
        yield f"file {name!r}", lambda f, n=name: _write_manifest(f, _rename_key(_manifest(f), "files", n))
    yield "two keys", lambda f: _write_manifest(f, b'{"format":1,"format":2}')
    yield "deep manifest", lambda f: _write_manifest(f, b"[" * 10**6)
    yield (
        "manifest: deep config",
        lambda f: _write_manifest(f, _manifest(f) | {"config": json.loads("[" * 900 + "]" * 900)}),
    )
    yield "alias of itself", lambda f: _write_manifest(f, _manifest(f) | {"aliases": {"x": "x"}})
    yield "alias of nothing", lambda f: _write_manifest(f, _manifest(f) | {"aliases": {"x": "nothing"}})
    huge = {"dtype": "float64", "shape": [2**61, 8], "chunks": [[0, [0, 0], [2**61, 8]]]}
    yield "shape overflow", lambda f: _write_manifest(f, _put(_manifest(f), ("tensors", "w"), huge))
    empty = {"dtype": "float64", "shape": [2**61, 8, 0], "chunks": []}
    yield "empty overflow", lambda f: _write_manifest(f, _put(_manifest(f), ("tensors", "w"), empty))
    twice = {"dtype": "float32", "shape": [3], "chunks": [[0, [0], [2]], [0, [1], [2]]]}
    yield "overlap", lambda f: _write_manifest(f, _put(_manifest(f), ("tensors", "w"), twice))
    yield "quantized", lambda f: _write_manifest(f, _put(_manifest(f), ("tensors", "w", "dtype"), "quint8"))
    for name in (MANIFEST, "objects.json", "rank_00000.json", FILE):
        for protocol in (0, 2, 5):
            bomb = pickle.dumps(_Bomb(), protocol=protocol)
            yield (
                f"pickle {protocol} in {name}",
                lambda f, n=name, b=bomb: (
                    (f / n).write_bytes(b) if n == MANIFEST else _replace(f, n, b)  # type: ignore[func-returns-value]
                ),
            )
        same = str(folder / name)  # the very bytes, elsewhere
        for target in (same, "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", "nowhere"):
            yield f"{name} -> {target}", lambda f, n=name, t=target: ((f / n).unlink(), (f / n).symlink_to(t))[1]
        yield f"{name} is a pipe", lambda f, n=name: ((f / n).unlink(), os.mkfifo(f / n))[1]
        yield f"{name} is a folder", lambda f, n=name: ((f / n).unlink(), (f / n).mkdir())[1]
    for text in (
        b'{"step":{"$tensor":"nothing"}}',
        b'{"step":{"$tensor":{}}}',
        b'{"step":{"$nothing":1}}',
        b"[]",
        b"1",
        b"",
    ):
        yield f"objects {text[:30]!r}", lambda f, t=text: _replace(f, "objects.json", t)
    yield "objects: duplicate", lambda f: _replace(f, "objects.json", b'{"step":2,"step":3}')
    yield "objects: deep", lambda f: _replace(f, "objects.json", b'{"step":' + b"[" * 10**5)
    yield "objects: numbers", lambda f: _replace(f, "objects.json", b'{"step":' + b"9" * 10**6 + b"}")
    bomb = typed_json.to_bytes({"step": {"$array": ["|O", [1], "AAAAAAAAAAA="]}})
    yield "objects: object array", lambda f: _replace(f, "objects.json", bomb)
    for length in (2**64 - 1, 2**63, 2**40, 10**8 + 1, 10**7):
        yield f"header of {length}", lambda f, n=length: _with_header(f, b"{}", length=n)
    header, _ = _header_of(folder)
    entry = header["w"]
    for changed in (
        {**entry, "data_offsets": [0, 2**62]},
        {**entry, "data_offsets": [-8, 4]},
        {**entry, "data_offsets": [4, 0]},
        {**entry, "data_offsets": [0]},
        {**entry, "shape": [2**62, 2**62]},
        {**entry, "shape": [-3]},
        {**entry, "shape": [True]},
        {**entry, "dtype": "F64"},
        {**entry, "dtype": "PICKLE"},
        {**entry, "dtype": "I32"},
        None,
        [],
    ):
        text = json.dumps({**header, "w": changed}).encode()
        yield f"header w = {str(changed)[:60]}", lambda f, t=text: _with_header(f, t)
    yield "manifest and header agree on a tensor with a hole", _with_a_hole
    shared = json.dumps({**header, "v": entry}).encode()
    yield "header: two at one place", lambda f: _with_header(f, shared)
    yield "header: duplicate", lambda f: _with_header(f, b'{"w":%s,"w":%s}' % ((json.dumps(entry).encode(),) * 2))
    yield "header: deep", lambda f: _with_header(f, b'{"w":' + b"[" * 10**6)
    yield "header: many", lambda f: _with_header(f, json.dumps({str(i): entry for i in range(20_000)}).encode())
    yield "header: more data", lambda f: _with_header(f, json.dumps(header).encode(), rest=bytes(1 << 20))
    yield "header: no data", lambda f: _with_header(f, json.dumps(header).encode(), rest=b"")


def _load(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    return {**checkpoint.objects(), "mine": checkpoint.rank_objects(0), **tensors}


def _same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.slow
def test_malicious_checkpoints_are_rejected_or_harmless(tmp_path: Path) -> None:
    source, victim = tmp_path / "source", tmp_path / "victim"
    save_on_threads(source, 2, world_size=1)
    expected = _load(Checkpoint(source))
    attacks = list(_attacks(source))
    assert len(attacks) > 200
    num_refused = 0
    for label, attack in attacks:
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(source, victim)
        attack(victim)
        started = time.process_time()
        with no_code_and_no_other_files(tmp_path):
            try:
                found = _load(open_verified(victim, world=WORLD))
            except CheckpointError:
                num_refused += 1
            else:
                # Facts for people may say anything; the state may not.
                assert label.startswith("manifest"), label
                assert _same_state(found, expected), label
        assert time.process_time() - started < 1, label
    assert num_refused > 0.8 * len(attacks)
    assert not os.path.exists("/tmp/echelon-was-here")


def _fuzz(num_cases: int) -> None:
    storage = ToyStorage()
    folder = Path("/toy/a")
    with storage.used():
        save_on_threads(folder, 2, world_size=1)
    names = {name: storage._find(folder / name) for name in storage.entries(folder)}
    intact = {name: bytes(storage.files[inode]) for name, inode in names.items() if inode is not None}
    head, tail = len(_seal(b"")) - 2, 2
    outcomes = {True: 0, False: 0}
    for seed in range(num_cases):
        draw = random.Random(seed)
        name = draw.choice(sorted(intact))
        data = bytearray(intact[name][head:-tail] if name == MANIFEST else intact[name])
        for _ in range(draw.choice([1, 1, 2, 8])):
            position = draw.randrange(len(data))
            kind = draw.randrange(4)
            if kind == 0:
                data[position] = draw.randrange(256)
            elif kind == 1:
                data[position : position + draw.randrange(1, 9)] = b""
            elif kind == 2:
                data[position:position] = draw.choice(
                    [b"9", b"[", b"{", b'"', b"-", b"1e9", b"null", b'"$set":', b"\xff"]
                )
            else:
                other = draw.randrange(len(data))
                data[position : position + 6] = data[other : other + 6]
            data = data or bytearray(b"{")
        manifest = intact[MANIFEST][head:-tail]
        if name == MANIFEST:
            manifest = bytes(data)
        else:
            content = json.loads(manifest)
            content["files"][name] = {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(bytes(data))}
            manifest = json.dumps(content).encode()
            storage.files[names[name]] = data  # type: ignore[index]
        storage.files[names[MANIFEST]] = bytearray(_seal(manifest))  # type: ignore[index]
        try:
            with storage.used():
                checkpoint = Checkpoint(folder)
                if checkpoint.problems():
                    raise CheckpointError("damaged")
                _load(checkpoint)
            outcomes[True] += 1
        except CheckpointError:
            outcomes[False] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {name}: {bytes(data)[:2000]!r}") from error
        for each, inode in names.items():
            if each in (name, MANIFEST):
                storage.files[inode] = bytearray(intact[each])  # type: ignore[index]
    assert min(outcomes.values()) > num_cases // 20, outcomes


@pytest.mark.slow
def test_fuzzed_checkpoints_are_rejected_or_read() -> None:
    with no_code_and_no_other_files(Path("/toy")):
        _fuzz(10_000)


@pytest.mark.soak
def test_many_fuzzed_checkpoints_are_rejected_or_read() -> None:
    with no_code_and_no_other_files(Path("/toy")):
        _fuzz(100_000)
