"""``echelon checkpoint`` on what a Trainer leaves: its output folder, checkpoint-N of both formats, weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echelon.cli.main import _run
from echelon.trainer import Trainer
from tests.trainer_models import DATA, Line, arguments


def _trained(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    settings = arguments(folder, max_steps=4, save_strategy="steps", save_steps=2, **options)
    model = Line()
    Trainer(model, settings, train_dataset=DATA).train()
    return model.state_dict()


def _are_equal(file: Path, weights: dict[str, torch.Tensor]) -> bool:
    found = load_file(file)
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("options", [{}, {"save_only_model": True}, {"checkpoint_format": "transformers"}])
def test_weights_are_merged_and_shown(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, weights = tmp_path / "run", _trained(tmp_path / "run", **options)
    capsys.readouterr()
    for source in (run, run / "checkpoint-4"):
        out = tmp_path / f"out of {source.name}"
        assert _run(["checkpoint", "merge", str(source), str(out)]) == 0
        assert _are_equal(out / "model.safetensors", weights)
        assert _run(["checkpoint", "show", str(source)]) == 0
        told = capsys.readouterr()
        assert ("checkpoint-4, the newest of 2" in told.err) is (source == run)
        assert "weight" in told.out
        assert "[1, 1]" in told.out


def test_the_output_folder_is_listed_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _trained(tmp_path)
    capsys.readouterr()
    assert _run(["checkpoint", "ls", str(tmp_path), "--verify"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "name",
        "checkpoint-4",
        "checkpoint-2",
    ]
    assert _run(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": intact: 7 files") == 2
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert _run(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "checkpoint-2: damaged\n" in capsys.readouterr().out
    assert _run(["checkpoint", "merge", str(weights.parent), str(tmp_path / "out")]) == 1
    assert "model.safetensors" in capsys.readouterr().err


def test_a_training_is_exported_with_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, weights = tmp_path / "run", _trained(tmp_path / "run")
    for layout, optimizer in (("accelerate", "optimizer.bin"), ("transformers", "optimizer.pt")):
        out = tmp_path / layout
        assert _run(["checkpoint", "export", str(run), str(out), "--format", layout]) == 0
        assert _are_equal(out / "model.safetensors", weights)
        state = torch.load(out / optimizer, weights_only=True)["state"]
        assert sorted(values["step"].item() for values in state.values()) == [4, 4]
        assert _run(["checkpoint", "export", str(out), str(tmp_path / "again"), "--format", layout]) == 2
        assert f"is in {layout}'s format, not in echelon's" in capsys.readouterr().err
    _trained(tmp_path / "weights", save_only_model=True)
    assert _run(["checkpoint", "export", str(tmp_path / "weights"), str(tmp_path / "3"), "--format", "accelerate"]) == 1
    assert "export its weights with" in capsys.readouterr().err
