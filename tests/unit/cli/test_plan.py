"""``echelon plan`` answers from a configuration file, without a device."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from transformers import LlamaConfig

from echelon.cli.main import _run
from echelon.cli.plan import parse_size

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


def test_a_model_that_does_not_fit_exits_with_1_and_names_what_to_do(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(_plan(config, "--gpu_memory", "100MB")) == 1
    out = click.unstyle(capsys.readouterr().out)
    assert "DOES NOT FIT: single, micro-batch 1 needs " in out
    assert "no layout fits with a global batch of 1" in out
    assert "no single change makes it fit" in out  # the CUDA context alone is larger


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


def test_a_mesh_must_have_as_many_ranks_as_devices(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(_plan(config, "--device", "T4", "--gpus", "4", "--mesh", "tp=2,dp_shard=4")) == 2
    assert "the mesh has 8 ranks, and there are 4 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("1.5 gb", 1_500_000_000), ("512", 512)]
)
def test_sizes_are_decimal_unless_they_say_gib(text: str, size: int) -> None:
    assert parse_size(text) == size
