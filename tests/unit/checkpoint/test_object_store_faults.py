"""Checkpoints in a store with S3's interface whose requests fail, and runs that are killed while they save to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from echelon.base.errors import CheckpointError
from echelon.checkpoint import object_store
from echelon.checkpoint.lock import RunLock
from echelon.checkpoint.object_store import ObjectPath
from echelon.checkpoint.read import Checkpoint
from echelon.checkpoint.save import Content, SaveFailedError, save
from echelon.cli.main import _run as main
from tests.checkpoint_ranks import content_of, on_threads, world_of_threads
from tests.object_server import FAULTS, ROOT, VARIABLES, order, serving

WORLD = world_of_threads(0, 1)
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the URL of a server, which the environment names."""
    with serving() as url, pytest.MonkeyPatch.context() as patch:
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": url}.items():
            patch.setenv(name, value)
        object_store._store.cache_clear()
        object_store.exists(ObjectPath("s3://bucket", "none"))  # starts the threads of obstore, which live on
        yield url
    object_store._store.cache_clear()


@pytest.fixture
def run(server: str, request: pytest.FixtureRequest) -> Iterator[ObjectPath]:
    """Yield an empty place in the store; requests do not fail, until the test orders it."""
    order(server)
    yield ObjectPath("s3://bucket", request.node.name)
    order(server)
    object_store._store.cache_clear()  # closes the connections that are kept open


def _num_kills(server: str, num_kills: int, *, share: float, seed: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_uploads", server, str(num_kills), str(share), str(seed)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_killed_at_20_random_requests(server: str) -> None:
    assert _num_kills(server, 20, share=0.02, seed=1).startswith("20 ")


@pytest.mark.soak
def test_a_run_killed_at_200_random_requests(server: str) -> None:
    print(_num_kills(server, 200, share=0.02, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_fail_are_repeated(fault: str, run: ObjectPath, server: str) -> None:
    order(server, share=0.2, faults=[fault], seed=2)
    on_threads(lambda world, gather: save(run / "c", content_of(5, world.rank), world=world, gather=gather), 2)
    checkpoint = Checkpoint(run / "c")
    assert checkpoint.problems() == []
    assert torch.equal(checkpoint.read("w"), torch.full((3,), 5.0))
    lock = RunLock(run / ".lock")
    lock.require()
    lock.release()
    assert order(server)[fault] > 0


@pytest.mark.slow
def test_parts_of_large_files_are_uploaded_and_fetched(
    run: ObjectPath, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 << 20)  # the least that S3 allows
    order(server, share=0.05, faults=["error", "torn", "lost reply", "half a reply"], seed=3)
    tensors = {"a": torch.randn(3 << 20), "b": torch.randn(1 << 20).bfloat16()}
    save(run / "c", Content(tensors=tensors), world=WORLD)
    place = object_store.place_of(run / "c")
    for share in range(2):
        object_store.download(place, tmp_path / "c", share=share, num_shares=2)
    checkpoint = Checkpoint(tmp_path / "c")
    assert checkpoint.problems() == []
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.slow
def test_a_store_that_fails_for_good_is_an_error_and_keeps_the_old_checkpoint(
    run: ObjectPath, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_PATIENCE_S", 0.1)
    save(run / "c", Content(objects={"step": 1}), world=WORLD)
    target = ObjectPath("s3://no-such-bucket", "c")
    with pytest.raises(
        SaveFailedError, match=r"s3://no-such-bucket/c could not be saved: (?s:.*)NoSuchBucket"
    ) as caught:
        save(target, Content(objects={"step": 2}), world=WORLD)
    assert "Debug source" not in str(caught.value)
    assert Checkpoint(run / "c").objects() == {"step": 1}


HOLDS = """
import sys
from echelon.checkpoint import storage
from echelon.checkpoint.lock import RunLock
lock = RunLock(storage.location(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("refuses_conditions", [False, True])
def test_a_second_run_is_refused_by_name_until_the_first_is_killed(
    run: ObjectPath, server: str, refuses_conditions: bool
) -> None:
    order(server, refuses_conditions=refuses_conditions)
    command = [sys.executable, "-c", HOLDS, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=re.escape(f"{run} is locked by another run: process {first.pid} on ")
        ):
            RunLock(run / ".lock")
        first.kill()
        first.wait()
    lock = RunLock(run / ".lock")
    lock.require()
    lock.release()
    assert not object_store.objects_in(run)


@pytest.mark.slow
def test_the_commands_in_the_document_run(
    run: ObjectPath, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ObjectPath("s3://bucket", "run") / "checkpoints"
    weight = torch.randn(5, 2)
    for number in range(2):
        tensors = {"models.0.weight": weight + number}
        save(place / f"checkpoint_{number}", Content(tensors=tensors, progress={"step": number}), world=WORLD)
    monkeypatch.chdir(tmp_path)
    pages = [(ROOT / "docs" / name).read_text() for name in ("checkpoints.md", "checkpoints.zh.md")]
    commands, same = (re.findall(r"^\$ echelon (checkpoint \S+ s3://.*)$", page, re.MULTILINE) for page in pages)
    assert commands == same
    assert [command.split()[1] for command in commands] == ["ls", "verify", "merge"]
    shown = []
    for command in commands:
        assert main(command.split()) == 0, capsys.readouterr()
        shown.append(capsys.readouterr().out)
    assert re.search(r"checkpoint_1 +1 .*complete\ncheckpoint_0 +0 .*complete", shown[0])
    assert shown[1].count("intact: 3 files") == 2
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["weight"], weight + 1)
    assert main(["checkpoint", "merge", "s3://bucket/run", "s3://bucket/merged"]) == 0
    assert list(object_store.objects_in(ObjectPath("s3://bucket", "merged"))) == ["model.safetensors"]
    assert main(["checkpoint", "show", "s3://bucket/run"]) == 0
    assert "weight" in capsys.readouterr().out
