"""``echelon estimate-memory`` prints accelerate's table for a local configuration, and nothing is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from echelon.cli.main import _run

VOCABULARY, WIDTH, INNER, LAYERS = 1000, 64, 128, 2
BLOCK = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH)  # bytes in float32
EMBEDDING = 4 * VOCABULARY * WIDTH
TOTAL = EMBEDDING + LAYERS * BLOCK + 4 * WIDTH  # AutoModel has no head; the last is the final norm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    return tmp_path


def _kib(size: float) -> str:
    return f"{round(size / 1024, 2)} KB"


def test_each_dtype_has_its_largest_layer_total_and_training_size(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["estimate-memory", str(folder / "config.json")]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()[2:6]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    mib = f"{round(4 * TOTAL / 1024**2, 2)} MB"
    assert cells == [  # the buffers of rotary embeddings are 2 x 32 bytes
        ["float32", _kib(EMBEDDING), cells[0][2], mib],
        ["float16", _kib(EMBEDDING / 2), cells[1][2], f"{round(2 * TOTAL / 1024**2, 2)} MB"],
        ["int8", _kib(EMBEDDING / 4), cells[2][2], "N/A"],
        ["int4", _kib(EMBEDDING / 8), cells[3][2], "N/A"],
    ]
    totals = [float(row[2].split()[0]) for row in cells]
    assert totals == pytest.approx([TOTAL / 1024 / n for n in (1, 2, 4, 8)], abs=0.1)


def test_several_dtypes_may_follow_the_flag_as_with_accelerate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["estimate-memory", str(folder), "--dtypes", "float16", "int4"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:4]] == ["float16", "int4"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["nowhere/config.json"], "nowhere/config.json does not exist"),
        (["a", "b"], "echelon estimate-memory takes one model, got a, b"),
    ],
)
def test_a_model_that_cannot_be_read_is_an_error(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["estimate-memory", *argv]) == 2
    assert text in capsys.readouterr().err


def test_a_configuration_that_transformers_does_not_know_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert _run(["estimate-memory", str(tmp_path)]) == 2
    assert "transformers cannot load the configuration of" in capsys.readouterr().err
