"""Ten scripts as tutorials since 2021 have them run on one process and on two, and learn what they set out to learn.

They import Trainer and TrainingArguments from echelon, and all else as they always did. Six run here on one number of
processes; the rest are soak tests, including MNIST in a notebook.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_on_ranks

SCRIPTS = Path(__file__).resolve().parent / "trainer_scripts"
_TIMES = ("runtime", "per_second", "preparation_time")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The results of a script on one rank."""

    metrics: dict[str, float]
    answers: Any
    weights: str
    history: list[dict[str, float]]
    steps: int
    world_size: int

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.history if name in entry]


def _run(name: str, folder: str) -> Found:
    """Run a script on this rank, in ``folder``."""
    os.chdir(folder)
    path, argv, modules = sys.path[:], sys.argv, {*sys.modules}
    sys.path[:0] = [str(SCRIPTS), *([str(SCRIPTS / "standins")] if "mnist" in name else [])]
    sys.argv = [f"{name}.py"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as in a user's program: some settings have other names today
            scope = runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    finally:
        sys.path[:], sys.argv = path, argv
        for module in {*sys.modules} - modules:
            if module.partition(".")[0] in ("small", "torchvision"):
                del sys.modules[module]
        os.chdir(Path(__file__).parent)
    trainer = scope["trainer"]
    weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    found = Found(
        metrics={key: value for key, value in scope["metrics"].items() if not key.endswith(_TIMES)},
        answers=scope.get("answers"),
        weights=hashlib.sha256(weights).hexdigest(),
        history=trainer.state.log_history,
        steps=trainer.state.global_step,
        world_size=trainer.args.world_size,
    )
    trainer.end()
    return found


def _mnist(found: Found, folder: Path) -> None:
    assert found.steps == 2 * -(-2000 // (32 * found.world_size))
    assert found.metrics["eval_accuracy"] == found.logged("eval_accuracy")[-1] > 0.75  # chance level: 0.1
    assert len(found.logged("eval_accuracy")) == 3  # after each epoch, and at the end
    assert any((folder / "logs").rglob("events*"))


def _reviews(found: Found, folder: Path) -> None:
    assert found.metrics["eval_f1"] == max(found.logged("eval_f1")) > 0.9
    assert found.answers == ["good", "bad"]
    assert len([*(folder / "results").glob("checkpoint-*")]) == 3
    best = {path.name for path in (folder / "best").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= best
    assert not any("optimizer" in name or "state" in name for name in best)
    assert (folder / "best_tokenizer" / "tokenizer_config.json").is_file()


def _causal_lm(found: Found, folder: Path) -> None:
    assert found.metrics["perplexity"] < 1.5  # of 34 characters
    assert found.answers == "上霜举头望明月低"
    (checkpoint,) = (folder / "gpt2-poem").glob("checkpoint-*")
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "trainer_state.json"}
    assert files <= {path.name for path in checkpoint.iterdir()}
    assert json.loads((folder / "gpt2-poem" / "eval_results.json").read_text())["perplexity"] < 1.5


def _seq2seq(found: Found, folder: Path) -> None:
    assert found.metrics["eval_exact"] > 0.8
    assert found.metrics["eval_gen_len"] > 4
    assert sum(a == b for a, b in zip(found.answers, ["北京", "东京", "巴黎", "柏林", "伦敦"], strict=False)) >= 4
    assert len(found.answers) == 12


def _tokens(found: Found, folder: Path) -> None:
    assert found.metrics["eval_recall"] > 0.8  # of the letters of names
    assert found.metrics["eval_count"] == 215  # each labeled letter once, those with -100 never
    assert found.answers == [23, True]


def _regression(found: Found, folder: Path) -> None:
    assert found.metrics["eval_mse"] == pytest.approx(min(found.logged("eval_mse")), rel=1e-5)
    assert found.metrics["eval_mse"] < 0.5 * found.metrics["variance"]


def _multilabel(found: Found, folder: Path) -> None:
    assert found.metrics["eval_f1"] == max(found.logged("eval_f1")) > 0.8


def _lora(found: Found, folder: Path) -> None:
    assert found.metrics["eval_loss"] == pytest.approx(min(found.logged("eval_loss")), rel=1e-5)
    assert found.metrics["eval_accuracy"] > 0.8
    assert found.answers == found.metrics["eval_accuracy"]
    assert (folder / "adapter" / "adapter_model.safetensors").stat().st_size < 30_000
    for saved in (folder / "adapter", *(folder / "bert-lora").glob("checkpoint-*")):
        assert (saved / "adapter_config.json").is_file()
        assert not (saved / "model.safetensors").exists()


def _search(found: Found, folder: Path) -> None:
    assert found.answers["learning_rate"] == 1e-2  # with the other value the weights do not change
    assert found.metrics["eval_accuracy"] > 0.8
    assert found.metrics["best"] > 0.8


def _resume(found: Found, folder: Path) -> None:
    assert found.answers is True
    assert found.metrics["equal_losses"] == 1.0


CHECKS: dict[str, Callable[[Found, Path], None]] = {
    "s01_mnist": _mnist,
    "s02_reviews": _reviews,
    "s03_causal_lm": _causal_lm,
    "s04_seq2seq": _seq2seq,
    "s05_tokens": _tokens,
    "s06_regression": _regression,
    "s07_multilabel": _multilabel,
    "s08_lora": _lora,
    "s09_search": _search,
    "s10_resume": _resume,
}
# MNIST, the slowest script, runs in the notebook test.
_SOAK = ("s01_mnist", "s02_reviews", "s06_regression", "s07_multilabel")  # on any number of processes
_CHEAP = {(name, 1 + number % 2) for number, name in enumerate(CHECKS, 1) if name not in _SOAK}
CASES = [
    pytest.param(name, size, marks=[] if (name, size) in _CHEAP else [pytest.mark.soak])
    for name in CHECKS
    for size in (1, 2)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_the_script_learns_and_its_ranks_agree(name: str, world_size: int, tmp_path: Path) -> None:
    ranks = run_on_ranks(_run, name, str(tmp_path), world_size=world_size, init_group=False, timeout=240)
    first = ranks[0]
    assert first.world_size == world_size
    for rank in ranks[1:]:
        assert (rank.weights, rank.answers, rank.metrics) == (first.weights, first.answers, first.metrics)
    CHECKS[name](first, tmp_path)


_CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = json.load(sys.stdin)
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
NotebookClient(notebook, kernel_name="python3", timeout=150).execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""

_LAUNCH = """
from echelon import notebook_launcher

def train():
    trainer = main()
    print("found", trainer.args.process_index, trainer.args.world_size, trainer.evaluate()["eval_accuracy"])
    trainer.end()

notebook_launcher(train, args=(), num_processes=2)
"""


@pytest.mark.soak  # test_notebook.py also covers two launches in one kernel
def test_mnist_trains_twice_in_one_kernel(tmp_path: Path) -> None:
    source = (SCRIPTS / "s01_mnist.py").read_text().partition('if __name__ == "__main__":')[0]
    smaller = source.replace("range(2000)", "range(640)").replace("range(501)", "range(101)")
    cells = [f"import sys; sys.path.insert(0, {str(SCRIPTS / 'standins')!r})", smaller, _LAUNCH, _LAUNCH]
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", _CLIENT],
        input=json.dumps(cells), capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
        env={**inherited, **own, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = (_found(outputs) for outputs in json.loads(done.stdout)[2:])
    assert [words[:2] for words in first] == [["0", "2"], ["1", "2"]]
    assert first[0][2] == first[1][2]
    assert float(first[0][2]) > 0.5
    assert second == first  # the first run leaves no state in the kernel


def _found(outputs: list[dict[str, Any]]) -> list[list[str]]:
    text = "".join(str(output.get("text", "")) for output in outputs)
    return sorted(line.split()[1:] for line in text.splitlines() if line.startswith("found "))
