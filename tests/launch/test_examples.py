"""The MNIST examples at all levels: alone, under echelon launch and under torchrun, on a part of the data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness import run_on_ranks
from tests.launch.programs import run_program

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
LIMIT = 256
LAUNCH = [sys.executable, "-m", "echelon", "launch", "--no_warm", "--cpu", "--num_processes", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _run(command: list[str] | None, example: str, weights: Path) -> str:
    script = str(EXAMPLES / f"{example}.py")
    arguments = ["--limit", str(LIMIT), "--save", str(weights)]
    if command is None:
        folder = str(weights.parent)
        (printed,) = run_on_ranks(
            run_program, script, folder, arguments=arguments, world_size=1, init_group=False, timeout=120
        )
        return str(printed)
    done = subprocess.run(
        [*command, script, *arguments],
        cwd=weights.parent,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "find_unused_parameters" not in done.stderr  # torch's warning about what the Trainer chose itself
    return done.stdout


def _accuracy_by_a_plain_loop(weights: Path) -> float:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from mnist_data import mnist
        from mnist_net import Net
    finally:
        sys.path.remove(str(EXAMPLES))
    net = Net()
    net.load_state_dict(torch.load(weights, weights_only=True))
    net.eval()
    images, labels = mnist(False, limit=LIMIT).tensors
    with torch.no_grad():
        right = sum(int((net(image[None]).argmax() == label).item()) for image, label in zip(images, labels))
    return 100 * right / len(labels)


# The command (None: in this process), the ranks and the steps of each.
STARTERS = {"python": (None, 1, 4), "launch": (LAUNCH, 2, 2), "torchrun": (TORCHRUN, 2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "starters"),
    [
        ("mnist_ddp", ["python"]),
        pytest.param("mnist_accelerator", ["launch"], marks=pytest.mark.soak),
        ("mnist_trainer", ["python"]),
        pytest.param("mnist_accelerator", ["python"], marks=pytest.mark.soak),
        *(
            pytest.param(level, ["launch", "torchrun"], marks=pytest.mark.soak)
            for level in ("mnist_ddp", "mnist_accelerator", "mnist_trainer")
        ),
    ],
)
def test_each_level_runs_under_each_starter(example: str, starters: list[str], tmp_path: Path) -> None:
    accuracies = {}
    for name in starters:
        command, world, steps = STARTERS[name]
        weights = tmp_path / f"{name}.pt"
        output = _run(command, example, weights)
        assert len(re.findall(rf"world: rank \d of {world} ", output)) == world, output
        ranks = re.findall(r"rank (\d): (\d+) steps, weights ([0-9a-f]{12})", output)
        assert sorted(rank for rank, _, _ in ranks) == [str(rank) for rank in range(world)], output
        assert {int(count) for _, count, _ in ranks} == {steps}
        assert len({digest for _, _, digest in ranks}) == 1, output
        (told,) = re.findall(r"test accuracy ([\d.]+) %", output)
        assert float(told) == pytest.approx(_accuracy_by_a_plain_loop(weights), abs=0.006)  # two printed digits
        accuracies[name] = told
    if len(starters) > 1:
        assert accuracies["launch"] == accuracies["torchrun"]  # the same two ranks, the same bits


def test_examples_are_short() -> None:
    for example in ("mnist_ddp", "mnist_accelerator", "mnist_trainer"):
        assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) < 80


def test_a_folder_as_torchvision_leaves_it_is_read(tmp_path: Path) -> None:
    import gzip
    import importlib.util

    spec = importlib.util.spec_from_file_location("mnist_data", EXAMPLES / "mnist_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for source in (EXAMPLES / "data" / "mnist").glob("t10k-*.gz"):
        (raw / source.stem).write_bytes(gzip.decompress(source.read_bytes()))
    images, labels = module.mnist(False, tmp_path).tensors
    own_images, own_labels = module.mnist(False).tensors
    assert torch.equal(images, own_images)
    assert torch.equal(labels, own_labels)
    assert tuple(images.shape) == (10_000, 1, 28, 28)
    with pytest.raises(SystemExit, match="give --data the folder"):
        module.mnist(True, tmp_path)
    (raw / "train-images-idx3-ubyte").write_bytes(b"not MNIST")
    with pytest.raises(SystemExit, match="not an IDX file"):
        module.mnist(True, tmp_path)
