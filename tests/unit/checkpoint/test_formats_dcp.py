"""Checkpoints of torch.distributed.checkpoint: what they may contain, and what is refused. The readers run no code from them."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from echelon.base.errors import CheckpointError
from echelon.base.warnings import EchelonWarning
from echelon.checkpoint.formats.dcp import open_dcp
from echelon.checkpoint.formats.dcp_export import export_dcp
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.regions import ChunkBounds
from echelon.checkpoint.save import Content, save
from echelon.cli.checkpoint import command
from tests.checkpoint_ranks import no_code_and_no_other_files, world_of_threads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
_WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),  # torch.save keeps strides
    "half": torch.ones(3, dtype=torch.bfloat16),
    "small": torch.ones(4).to(torch.float8_e4m3fn),
    "flag": torch.tensor(True),
    "empty": torch.zeros(0, 3),
    "a.view": torch.arange(10.0)[2:5],
}


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def _saved(folder: Path, **state: Any) -> Path:
    dcp.save(state or {"model": _WEIGHTS}, checkpoint_id=folder, no_dist=True)
    return folder


def _metadata(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def _change(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = _metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _replace_entry(folder: Path, key: str, content: bytes) -> None:
    """Put ``content`` at the end of a part, where the index then looks for ``key``."""

    def change(metadata: Metadata) -> None:
        index = next(one for one in metadata.storage_data if one.fqn == key)
        place = metadata.storage_data[index]
        path = folder / place.relative_path
        place.offset, place.length = path.stat().st_size, len(content)
        path.write_bytes(path.read_bytes() + content)

    _change(folder, change)


def test_tensors_of_any_kind_are_read(tmp_path: Path) -> None:
    checkpoint = open_dcp(_saved(tmp_path / "c"))
    assert checkpoint.problems() == []
    assert {name.removeprefix("models.0.") for name in checkpoint.names()} == _WEIGHTS.keys()
    for name, expected in _WEIGHTS.items():
        found = checkpoint.read(f"models.0.{name}")
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.float(), expected.float())
    part = ChunkBounds((1, 1), (2, 2))
    for name in ("a.weight", "turned"):
        assert torch.equal(checkpoint.read(f"models.0.{name}", part), _WEIGHTS[name][1:3, 1:3])


def test_an_index_that_runs_code_is_refused(tmp_path: Path) -> None:
    """Plain ``pickle.load``, which torch uses, runs it."""
    ran = tmp_path / "ran"
    folder = _saved(tmp_path / "c")
    _change(folder, lambda metadata: setattr(metadata, "planner_data", _Bomb(ran)))
    with no_code_and_no_other_files(tmp_path), pytest.raises(CheckpointError, match=r"contains posix\.mkdir"):
        open_dcp(folder)
    assert not ran.exists()
    dcp.FileSystemReader(folder).read_metadata()
    assert ran.exists()


@pytest.mark.parametrize("key", ["model.a.weight", "scheduler.last_epoch"])
def test_an_entry_that_runs_code_is_refused(key: str, tmp_path: Path) -> None:
    ran, stream = tmp_path / "ran", io.BytesIO()
    folder = _saved(tmp_path / "c", model=_WEIGHTS, scheduler={"last_epoch": 3})
    torch.save(_Bomb(ran), stream)
    _replace_entry(folder, key, stream.getvalue())
    with no_code_and_no_other_files(tmp_path), pytest.raises(CheckpointError, match=r"contains posix\.mkdir"):
        open_dcp(folder).read("models.0.a.weight")
    assert not ran.exists()
    stream.seek(0)
    torch.load(stream, weights_only=False)
    assert ran.exists()


# Gadgets from names that are allowed, or look like these: what they return must be nothing but data.
_PICKLES = {
    "a function of torch": b"ctorch\nload\n(Vx\ntR.",
    "a name inside a class": b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93.",
    "a builtin": b"cbuiltins\neval\n(V1\ntR.",
    "attributes of a class": b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dV__setstate__\nctorch\nSize\nstb.",
    "no index": b"(dV1\nV2\ns.",
    "cut off": b"ctorch\n",
    "an extension": b"\x82\x01.",
}


@pytest.mark.parametrize("name", _PICKLES)
def test_an_index_of_anything_else_is_refused(name: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "c")
    good = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(_PICKLES[name])
    with no_code_and_no_other_files(tmp_path), pytest.raises(CheckpointError):
        open_dcp(folder)
    (folder / ".metadata").write_bytes(good)
    assert torch.equal(open_dcp(folder).read("models.0.half"), _WEIGHTS["half"])  # nothing remains of it


def _first(metadata: Metadata) -> Any:
    return metadata.storage_data[next(one for one in metadata.storage_data if one.fqn == "model.a.weight")]


_CHANGES: dict[str, Callable[[Metadata], object]] = {
    "a file outside": lambda m: setattr(_first(m), "relative_path", "../secret"),
    "an absolute path": lambda m: setattr(_first(m), "relative_path", "/etc/passwd"),
    "a negative offset": lambda m: setattr(_first(m), "offset", -1),
    "beyond the file": lambda m: setattr(_first(m), "length", 1 << 40),
    "another entry": lambda m: setattr(_first(m), "offset", 1),
    "a missing chunk": lambda m: m.state_dict_metadata["model.a.weight"].chunks.clear(),
    "a chunk twice": lambda m: m.state_dict_metadata["model.a.weight"].chunks.append(
        type(m.state_dict_metadata["model.a.weight"].chunks[0])(torch.Size([1, 0]), torch.Size([1, 4]))
    ),
    "another shape": lambda m: setattr(m.state_dict_metadata["model.a.weight"], "size", torch.Size([1 << 61, 4])),
    "another dtype": lambda m: setattr(m.state_dict_metadata["model.a.weight"].properties, "dtype", torch.int32),
    "no place": lambda m: m.storage_data.pop(next(one for one in m.storage_data if one.fqn == "model.a.weight")),
    "another number of dimensions": lambda m: setattr(
        m.state_dict_metadata["model.a.weight"], "size", torch.Size([12])
    ),
    "text for sizes": lambda m: setattr(m.state_dict_metadata["model.a.weight"], "size", "34"),
    "compressed": lambda m: setattr(_first(m), "transform_descriptors", ["zstd"]),
    "another key": lambda m: m.storage_data.update({MetadataIndex("model.a.weight", torch.Size([-1, 0])): _first(m)}),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_an_inconsistent_index_is_refused(name: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "c")
    (tmp_path / "secret").write_bytes(b"x" * 10_000)
    _change(folder, _CHANGES[name])
    with no_code_and_no_other_files(tmp_path), pytest.raises(CheckpointError):
        open_dcp(folder).read("models.0.a.weight")


def _as_archive(data_pkl: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(48))
        archive.writestr("archive/version", "3")
    return stream.getvalue()


def _tensor_pickle(
    *, numel: int = 12, offset: int = 0, size: tuple[int, ...] = (3, 4), stride: tuple[int, ...] = (4, 1)
) -> bytes:
    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"

    storage = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI%d\ntQ" % numel
    rest = b"I%d\n" % offset + numbers(size) + numbers(stride) + b"I00\nccollections\nOrderedDict\n)RtR."
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest


_ENTRIES = {
    "beyond its storage": _as_archive(_tensor_pickle(offset=1)),
    "strides beyond its storage": _as_archive(_tensor_pickle(stride=(4, 2))),
    "a storage beyond its file": _as_archive(_tensor_pickle(numel=1000)),
    "negative strides": _as_archive(_tensor_pickle(stride=(4, -1))),
    "compressed": _as_archive(_tensor_pickle(), compression=zipfile.ZIP_DEFLATED),
    "another shape": _as_archive(_tensor_pickle(size=(4, 3), stride=(3, 1))),
    "no archive": b"PK\3\4" + bytes(100),
    "empty": b"",
}


@pytest.mark.parametrize("name", _ENTRIES)
def test_a_malformed_entry_is_refused(name: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "c")
    _replace_entry(folder, "model.a.weight", _as_archive(_tensor_pickle()))
    assert torch.equal(open_dcp(folder).read("models.0.a.weight"), torch.zeros(3, 4))
    _replace_entry(folder, "model.a.weight", _ENTRIES[name])
    with no_code_and_no_other_files(tmp_path), pytest.raises(CheckpointError):
        open_dcp(folder).read("models.0.a.weight")


def test_truncated_and_missing_files_are_named(tmp_path: Path) -> None:
    (part,) = _saved(tmp_path / "c").glob("*.distcp")
    os.truncate(part, part.stat().st_size - 1)
    assert "is truncated" in open_dcp(tmp_path / "c").problems()[0]
    part.unlink()
    assert "cannot be read" in open_dcp(tmp_path / "c").problems()[0]


def test_an_object_that_is_no_plain_data_is_named(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "c", model=_WEIGHTS, scheduler={"last_epoch": Path("x")})
    with pytest.raises(CheckpointError, match="contains pathlib"):
        open_dcp(folder)


def test_objects_keep_their_types(tmp_path: Path) -> None:
    state = {
        "last_epoch": 3,
        "base_lrs": [0.1, 0.2],
        "betas": (0.9, 0.99),
        "dtype": torch.bfloat16,
        "lr": torch.tensor([0.5, 1.5])[1:],
        "nothing": None,
        "bytes": b"\xff\x00",
        "names": {"b", "a"},
    }
    checkpoint = open_dcp(
        _saved(tmp_path / "c", model=_WEIGHTS, lr_scheduler={k: v for k, v in state.items() if k != "lr"})
    )
    (found,) = checkpoint.objects()["schedulers"]
    assert found == {key: value for key, value in state.items() if key != "lr"}
    assert {type(value) for value in found.values()} == {type(value) for value in state.values()} - {torch.Tensor}


def test_which_tensors_are_the_model_must_be_clear(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    with pytest.raises(CheckpointError, match="under generator, other"):
        open_dcp(_saved(tmp_path / "a", generator={"w": tensor}, other={"w": tensor}))
    with pytest.raises(CheckpointError, match=r"all parameters of the optimizer under optimizer\.param_groups \(v\)"):
        open_dcp(
            _saved(tmp_path / "b", model={"w": tensor}, optimizer={"state": {}, "param_groups": [{"params": ["v"]}]})
        )
    assert open_dcp(_saved(tmp_path / "c", model={"w": tensor}, step=tensor)).names() == ["models.0.w"]


def test_two_models_with_an_optimizer_each(tmp_path: Path) -> None:
    def state(name: str, factor: float) -> dict[str, Any]:
        return {
            "state": {name: {"momentum_buffer": torch.full((2,), factor)}},
            "param_groups": [{"lr": factor, "params": [name]}],
        }

    folder = _saved(
        tmp_path / "c",
        generator={"w": torch.zeros(2)},
        critic={"v": torch.ones(2)},
        optimizer_0=state("w", 2.0),
        optimizer_10=state("v", 4.0),
        optimizer_9=state("v", 3.0),
    )
    checkpoint = open_dcp(folder)
    values = {name: float(checkpoint.read(name)[0]) for name in checkpoint.names()}
    assert values == {
        "models.0.w": 0.0,
        "models.1.v": 1.0,
        "optimizers.0.models.0.w.momentum_buffer": 2.0,
        "optimizers.1.models.1.v.momentum_buffer": 3.0,
        "optimizers.2.models.1.v.momentum_buffer": 4.0,
    }
    assert [groups[0]["lr"] for groups in checkpoint.objects()["optimizer_groups"]] == [2.0, 3.0, 4.0]


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _saved(tmp_path / "c", model={"w": torch.ones(2, 3)}, epoch=7)
    command.main(["show", str(folder), "--json"], standalone_mode=False)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["format"], shown["tensors"][0]["name"], shown["layout"]["not_read"]) == (
        "sharded",
        "models.0.w",
        ["epoch"],
    )
    command.main(["merge", str(folder), str(tmp_path / "weights")], standalone_mode=False)
    assert (tmp_path / "weights" / "model.safetensors").exists()
    with pytest.warns(EchelonWarning) as caught:
        command.main(["convert", str(folder), str(tmp_path / "own")], standalone_mode=False)
    assert any("also holds epoch" in str(one.message) for one in caught)
    assert Checkpoint(tmp_path / "own").problems() == []
    assert torch.equal(Checkpoint(tmp_path / "own").read("models.0.w"), torch.ones(2, 3))


def test_tied_weights_and_extra_states_are_written_under_each_name(tmp_path: Path) -> None:
    tied, parts = torch.ones(3), torch.arange(6.0).reshape(2, 3)
    content = Content(
        tensors={"models.0.one": tied, "models.0.two": tied, "models.0.parts": parts},
        objects={"extra_states": [{"m._extra_state": {"calls": 3}}], "schedulers": [{"last_epoch": 4, "lrs": [0.1]}]},
    )
    save(tmp_path / "own", content, world=world_of_threads(0, 1), gather=lambda payload: [payload])
    (tmp_path / "out").mkdir()
    export_dcp(Checkpoint(tmp_path / "own"), tmp_path / "out")
    wanted = {
        "model": {"one": torch.zeros(3), "two": torch.zeros(3), "parts": torch.zeros(2, 3), "m._extra_state": None},
        "scheduler": {"last_epoch": 0, "lrs": []},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(wanted["model"]["one"], tied)
    assert torch.equal(wanted["model"]["two"], tied)
    assert torch.equal(wanted["model"]["parts"], parts)
    assert wanted["model"]["m._extra_state"] == {"calls": 3}
    assert wanted["scheduler"] == {"last_epoch": 4, "lrs": [0.1]}
    back = open_dcp(tmp_path / "out")
    assert back.objects()["extra_states"] == [{"m._extra_state": {"calls": 3}}]
    assert back.objects()["schedulers"] == [{"last_epoch": 4, "lrs": [0.1]}]


def test_shards_of_deepspeed_are_refused_with_its_own_tool(tmp_path: Path) -> None:
    shards = tmp_path / "c" / "pytorch_model"
    shards.mkdir(parents=True)
    (shards / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")
    (tmp_path / "c" / "random_states_0.pkl").write_bytes(b"x")
    for folder in (tmp_path / "c", shards):
        with pytest.raises(CheckpointError, match="shards of DeepSpeed") as error:
            command.main(["convert", str(folder), str(tmp_path / "out")], standalone_mode=False)
        assert f"python -m deepspeed.utils.zero_to_fp32 {folder} OUT" in str(error.value)
        assert "only on a checkpoint that you trust" in str(error.value)


def test_the_other_files_of_accelerate_are_read(tmp_path: Path) -> None:
    """``save_state`` of Accelerate with FSDP2 and two processes."""
    folder = tmp_path / "c"
    _saved(folder / "pytorch_model_fsdp_0", model={"w": torch.ones(2)})
    state = {"state": {"w": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.5, "params": ["w"]}]}
    _saved(folder / "optimizer_0", optimizer=state)
    for rank in range(2):
        torch.save({"step": 7, "random_state": (rank,)}, folder / f"random_states_{rank}.pkl")
    torch.save({"last_epoch": 7}, folder / "scheduler.bin")
    torch.save({"count": 1}, folder / "custom_checkpoint_0.pkl")
    checkpoint = open_dcp(folder)
    objects = checkpoint.objects()
    assert (objects["accelerator"], objects["schedulers"]) == ({"step": 7, "num_models": 1}, [{"last_epoch": 7}])
    assert objects["custom.0"] == {"count": 1}
    assert [(checkpoint.rank_objects(rank) or {})["random"] for rank in range(2)] == [
        {"random_state": (0,)},
        {"random_state": (1,)},
    ]
    command.main(["convert", str(folder), str(tmp_path / "own")], standalone_mode=False)  # without a warning
    own = Checkpoint(tmp_path / "own")
    assert own.problems() == []
    assert own.names() == ["models.0.w", "optimizers.0.models.0.w.exp_avg"]
    assert own.objects()["custom.0"] == {"count": 1}
    assert (own.manifest.world_size, (own.rank_objects(1) or {})["random"]) == (2, {"random_state": (1,)})
