"""``echelon plan`` answers from a configuration file, without a device."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from transformers import LlamaConfig

from echelon.cli.main import _run
from echelon.plan.facts import StepSettings
from echelon.plan.sizes import parse_size
from echelon.plan.sources import PlannedStep, StepChoices

WIDTH, INNER, LAYERS, VOCABULARY = 32, 64, 2, 128
BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
PARAMETERS = LAYERS * BLOCK + 2 * VOCABULARY * WIDTH + WIDTH


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    return str(folder / "config.json")


def _plan(config: str, *argv: str) -> list[str]:
    return ["plan", "--model", config, "--seq", "16", *argv]


def test_a_model_that_fits_says_so_first_and_exits_with_0(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(_plan(config, "--device", "T4")) == 0
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert lines[0].startswith("LlamaForCausalLM: ")
    assert "mixed precision fp16" in lines[0]  # a T4 does not compute bf16
    assert lines[1] == "on 1 x T4 (15.7 GB)"
    assert lines[3].startswith("FITS: single, micro-batch 1 needs ")
    assert "kept free" in lines[5]


def test_the_json_has_the_bytes_of_adamw_with_float32_masters_exactly(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert _run(_plan(config, "--gpu_memory", "1.5GB", "--json", "-o", str(page))) == 0
    found = json.loads(capsys.readouterr().out)
    memory = found["asked"]["memory"]
    # Each tensor is rounded up to 512 bytes; the largest are multiples of it, so that only norms differ.
    assert memory["master weights"] == pytest.approx(4 * PARAMETERS, abs=5 * 512)
    assert memory["optimizer state"] == pytest.approx(8 * PARAMETERS, abs=4 * 5 * 512 * LAYERS * 9)
    assert found["asked"]["peak"] == sum(memory.values())
    assert found["asked"]["margin"] == 1_500_000_000 - found["asked"]["peak"] - found["asked"]["reserve"]
    text = page.read_text()
    assert "FITS: single" in text
    assert "https://" not in text.partition("<script>")[0]


@pytest.mark.slow
def test_a_model_that_does_not_fit_exits_with_1_and_names_what_to_do(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(_plan(config, "--gpu_memory", "100MB")) == 1
    out = click.unstyle(capsys.readouterr().out)
    assert "DOES NOT FIT: single, micro-batch 1 needs " in out
    assert "no layout fits with a global batch of 1" in out
    assert "no single change makes it fit" in out  # the CUDA context alone is larger


@pytest.mark.slow
def test_a_number_is_explained_by_its_formula(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(_plan(config, "--device", "H100", "--explain", "optimizer")) == 0
    assert "optimizer state" in capsys.readouterr().out
    assert _run(_plan(config, "--device", "H100", "--explain", "weather")) == 2
    assert "there is no formula for 'weather'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "--model"),
        (["--model", "nowhere.json"], "the memory of the devices is unknown"),
        (["--model", "nowhere.json", "--device", "H100"], "nowhere.json does not exist"),
        (["--model", "a", "--device", "Z9"], "Z9"),
        (["--model", "a", "--device", "H100", "--interconnect", "string"], "string"),
        (["--model", "a", "--gpu_memory", "many"], "'many' is not a size such as 80GB"),
        (["--model", "a", "--mesh", "dp=2", "--device", "T4"], "'dp=2' is not AXIS=N"),
        (["--model", "a", "--device", "T4", "--lora", "alpha"], "'alpha' is not the size of adapters"),
    ],
)
def test_what_cannot_be_planned_is_an_error(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["plan", *argv]) == 2
    assert text in capsys.readouterr().err


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from echelon import Accelerator

width = int(sys.argv[sys.argv.index("--width") + 1])
model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 3))
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=16)
optimizer = torch.optim.AdamW(model.parameters())
accelerator = Accelerator(ARGUMENTS)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
print("training")
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def _write(folder: Path, arguments: str, text: str = SCRIPT) -> str:
    path = folder / "train.py"
    path.write_text(text.replace("ARGUMENTS", arguments))
    return str(path)


def _asked(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    _run(["plan", "--device", "T4", "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["asked"]
    return found


def test_a_script_is_planned_with_its_own_batch_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, "mixed_precision='bf16', gradient_accumulation_steps=2")
    asked = _asked(capsys, path, "--width", "1000")
    assert (asked["engine"], asked["global_batch"]) == ("single", 32)
    assert (asked["settings"]["micro_batch"], asked["accumulation"]) == (16, 2)
    assert asked["settings"]["mixed_precision"] == "bf16"
    sizes = (8 * 1000, 1000, 3 * 1000, 3)
    assert asked["memory"]["parameters"] == sum(-(-4 * size // 512) * 512 for size in sizes)
    asked = _asked(capsys, "--batch", "4", "--mixed-precision", "no", "--engine", "fsdp2", path, "--width", "1000")
    assert (asked["engine"], asked["settings"]["micro_batch"]) == ("fsdp2", 4)
    assert asked["settings"]["mixed_precision"] == "no"


@pytest.mark.slow
def test_the_engine_of_a_script_is_kept(tmp_path: Path) -> None:
    path = _write(tmp_path, "engine='zero1'")
    argv = [sys.executable, "-m", "echelon", "plan", "--device", "T4", "--gpus", "4", "--json", path, "--width", "10"]
    asked = json.loads(subprocess.run(argv, capture_output=True, check=True, text=True).stdout)["asked"]
    assert (asked["engine"], asked["mesh"]["dp_replicate"]) == ("zero1", 4)


def test_what_is_asked_replaces_what_the_script_has_chosen() -> None:
    settings = StepSettings(micro_batch=2)
    choices = StepChoices(engine="fsdp2", stage=2, cpu_offload=True, sizes={"tp": 2})
    source: Any = None
    step = PlannedStep(title="", source=source, settings=settings, accumulation=3, choices=choices)
    layout = step.layout(8)
    assert (layout.engine, layout.stage, layout.cpu_offload, layout.tp, layout.dp_shard) == ("fsdp2", 2, True, 2, 4)
    assert layout.accumulation == 3
    layout = step.layout(8, engine="ddp")
    assert (layout.engine, layout.cpu_offload, layout.tp, layout.dp_replicate) == ("ddp", False, 1, 8)
    assert step.layout(8, stage=3, sizes={"tp": 4}).dp_shard == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("arguments", "share"), [("split_batches=True", 4), ("parity='exact'", 4), ("", 16)])
def test_a_batch_that_the_ranks_share_is_divided(
    arguments: str, share: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = _asked(capsys, "--gpus", "4", _write(tmp_path, arguments), "--width", "10")
    assert asked["settings"]["micro_batch"] == share


def test_a_setting_that_the_model_does_not_have_is_a_refused_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(["plan", "--gpu-memory", "50MB", "--gpus", "2", "--json", _write(tmp_path, ""), "--width", "10"])
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    refused = {one["settings"]["activation_checkpointing"] for one in layouts if one["refused"]}
    assert refused >= {"selective"}
    (reason,) = {one["refused"] for one in layouts if one["mesh"]["cp"] > 1}
    assert reason == "Sequential calls no scaled_dot_product_attention, which cp divides"


def test_the_example_with_a_trainer_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).resolve().parents[3] / "examples" / "mnist_trainer.py"
    logger = logging.getLogger("echelon")
    level = logger.level
    try:
        asked = _asked(capsys, "--batch", "1", str(example), "--limit", "256", "--batch_size", "32")
    finally:
        logger.setLevel(level)  # which the script's Trainer sets
    assert (asked["engine"], asked["settings"]["micro_batch"]) == ("single", 1)


def test_a_script_that_fails_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, "engine='fsdp3'")
    assert _run(["plan", "--device", "T4", path, "--width", "10"]) == 2
    assert f"in {path}:13: ConfigError" in capsys.readouterr().err


def test_options_after_the_script_go_to_the_script_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nassert sys.argv[1:] == ['--gpu_memory=80GB', '--rate', '0.1']\n")
    assert _run(["plan", "--device", "T4", str(script), "--gpu_memory=80GB", "--rate", "0.1"]) == 2
    error = capsys.readouterr().err
    assert "--gpu_memory after the script goes to the script; for echelon plan, write it before" in error
    assert "--rate after" not in error
    assert "ends without a step" in error


def test_a_script_and_options_of_models_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path, "")
    assert _run(["plan", "--device", "T4", "--seq", "8", path]) == 2
    assert "--seq is for --model" in capsys.readouterr().err
    assert _run(["plan", "--device", "T4", "--model", "a", path]) == 2
    assert "there are a script and a model" in capsys.readouterr().err
    assert _run(["plan", "--device", "T4", str(tmp_path / "no.py")]) == 2
    assert "no.py does not exist" in capsys.readouterr().err


def test_a_mesh_must_have_as_many_ranks_as_devices(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(_plan(config, "--device", "T4", "--gpus", "4", "--mesh", "tp=2,dp_shard=4")) == 2
    assert "the mesh has 8 ranks, and there are 4 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("1.5 gb", 1_500_000_000), ("512", 512)]
)
def test_sizes_are_decimal_unless_they_say_gib(text: str, size: int) -> None:
    assert parse_size(text) == size
