"""The examples beyond the MNIST and review scripts: each runs as its docstring says, and equals a plain loop on one process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import run_on_ranks
from tests.launch.conftest import Command, Result
from tests.launch.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
CONFIGS = EXAMPLES / "configs"
NOTEBOOK = EXAMPLES / "mnist_notebook.ipynb"
README = [EXAMPLES / "README.md", EXAMPLES / "README.zh.md"]
MODULES = {"mnist_data.py", "mnist_net.py", "reviews_data.py"}  # imported by examples, but no examples
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# Losses and weights after some dozen float32 updates: the sums over the samples have a different order, which AdamW magnifies.
RTOL = 1e-4


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _order(num_samples: int, seed: int) -> torch.Tensor:
    """Return the order of an epoch with ``parity="exact"``, as docs/parity.md defines it."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))


def _run(command: Command, start: str, script: str, *arguments: str) -> Result:
    """Start an example with ``python``, with ``torchrun`` on two processes, or with ``echelon launch START``."""
    program = [str(EXAMPLES / script), *arguments]
    if start == "python":
        done = command.run([sys.executable, *program], OMP_NUM_THREADS="1")
    elif start == "torchrun":
        done = command.run([*TORCHRUN, *program], OMP_NUM_THREADS="1")
    else:
        done = command.launch("--cpu", *start.split(), *program, OMP_NUM_THREADS="1")
    assert done.code == 0, done.out + done.err
    return done


def _numbers(pattern: str, text: str) -> list[float]:
    (match,) = re.findall(pattern, text)
    return [float(value) for value in ([match] if isinstance(match, str) else match)]


# ---- the table in README ---------------------------------------------------------------------------------------------


def _named_in(page: Path) -> set[str]:
    names = re.findall(r"^\| \[?`(?:examples/)?([\w./]+)`", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for name in names if Path(name).suffix in (".py", ".sh", ".ipynb")}


@pytest.mark.parametrize("page", README, ids=lambda page: page.name)
def test_the_table_lists_every_example(page: Path) -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    assert _named_in(page) == files - MODULES


def test_both_tables_have_the_same_commands_and_times() -> None:
    def columns(page: Path) -> list[tuple[str, str, str]]:
        rows = re.findall(r"^\| \[?`([\w.]+\.(?:py|sh|ipynb))`.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(("| `", "| [`"))]
        cells = [line.split(" | ") for line in lines if any(f"`{row}`" in line for row in rows)]
        return [(cell[0], "".join(re.findall(r"\d+", cell[2])), cell[3]) for cell in cells]

    english, chinese = (columns(page) for page in README)
    assert english == chinese != []
    for _, _, command in english:
        for path in re.findall(r"examples/[\w./]+", command):
            assert (ROOT / path).exists(), path


# ---- ragged_language_model.py ----------------------------------------------------------------------------------------


def _plain_ragged_losses() -> tuple[float, float]:
    """Return the first and the last loss of a loop that adds up the losses of single texts."""
    example = _module("ragged_language_model")
    texts, (model, optimizer) = example.make_texts(), example.build()
    losses = []
    for epoch in range(example.EPOCHS):
        for places in _order(len(texts), example.SEED + epoch).split(example.BATCH_SIZE):
            optimizer.zero_grad()
            sums = [
                F.cross_entropy(model(text[None, :-1])[0], text[1:], reduction="sum")
                for text in (texts[place] for place in places)
            ]
            loss = torch.stack(sums).sum() / sum(len(texts[place]) - 1 for place in places)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses[0], losses[-1]


def _check_ragged(printed: str, num_processes: int) -> None:
    (count, first) = _numbers(rf"(\d+) updates on {num_processes} processes, first loss ([\d.]+)", printed)
    last, told = _numbers(r"last loss ([\d.]+); of a plain loop on one process ([\d.]+)", printed)
    assert count == 16
    assert (first, last) == pytest.approx(_plain_ragged_losses(), rel=RTOL)
    assert told == pytest.approx(last, rel=RTOL)
    assert last < 0.9 * first


@pytest.mark.slow
def test_every_token_of_ragged_batches_counts_the_same(tmp_path: Path) -> None:
    printed, other = run_on_ranks(
        run_program,
        str(EXAMPLES / "ragged_language_model.py"),
        str(tmp_path),
        world_size=2,
        init_group=False,
        timeout=120,
    )
    _check_ragged(printed, 2)
    assert "loss" not in other


@pytest.mark.soak
@pytest.mark.parametrize(
    ("start", "num_processes"),
    [
        ("python", 1),
        ("--num_processes 1", 1),
        ("--num_processes 2", 2),
        ("--num_processes 3 --oversubscribe", 3),
        ("torchrun", 2),
    ],
)
def test_the_ragged_language_model_runs_under_each_starter(start: str, num_processes: int, command: Command) -> None:
    _check_ragged(_run(command, start, "ragged_language_model.py").out, num_processes)


# ---- llama_nd.py -------------------------------------------------------------------------------------------------------


def _plain_llama_losses(*, has_experts: bool) -> list[float]:
    """Return each epoch's mean loss per token of a loop in one process."""
    example = _module("llama_nd")
    texts, model = example.make_texts(), example.build(has_experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    history = []
    for epoch in range(example.EPOCHS):
        sums = []
        for places in _order(len(texts), example.SEED + epoch).split(example.BATCH_SIZE):
            optimizer.zero_grad()
            ids, labels = (torch.stack([texts[place][key] for place in places]) for key in ("input_ids", "labels"))
            logits = model(input_ids=ids).logits[:, :-1]
            targets = labels[:, 1:]
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            num = (targets != example.IGNORED).sum()
            (total / num).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sums.append((total.item(), num.item()))
        history.append(sum(total for total, _ in sums) / sum(num for _, num in sums))
    return history


def _train_llama(has_experts: bool) -> list[float]:
    losses: list[float] = _module("llama_nd").train(has_experts)
    return losses


_MESHES = {
    "shard 2 x tp 2": ({"DP_SHARD": "2", "TP": "2"}, False),
    "replicate 2 x pp 2": ({"DP_REPLICATE": "2", "PP": "2"}, False),
    "replicate 2 x shard 2": ({"DP_REPLICATE": "2", "DP_SHARD": "2"}, False),
    "ep 2": ({"DP_SHARD": "4", "EP": "2"}, True),
}


@pytest.mark.soak  # four processes import transformers
@pytest.mark.parametrize("mesh", _MESHES)
def test_the_llama_has_the_losses_of_one_process_on_any_mesh(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, has_experts = _MESHES[mesh]
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for axis, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{axis}_SIZE", size)
    expected = _plain_llama_losses(has_experts=has_experts)
    for found in run_on_ranks(_train_llama, has_experts, world_size=4, init_group=False, timeout=240):
        assert found == pytest.approx(expected, rel=RTOL)
    if not has_experts:
        printed = re.findall(
            r"^epoch \d: loss ([\d.]+) per token", (ROOT / "docs" / "parallelism.md").read_text(), re.M
        )
        assert [float(loss) for loss in printed] == pytest.approx(expected, rel=RTOL)


# ---- gpt2_zero3.py ---------------------------------------------------------------------------------------------------


def _plain_gpt2_losses() -> tuple[float, float]:
    """Return the loss of the last update, and then of the test set."""
    example = _module("gpt2_zero3")
    train_set, test_set = example.load_text()
    model = example.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for places in _order(len(train_set), example.SEED).split(example.BATCH_SIZE):
        loss = model(input_ids=train_set[places], labels=train_set[places]).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return loss.item(), model.eval()(input_ids=test_set, labels=test_set).loss.item()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("start", "num_processes"),
    [
        ("python", 1),
        ("--num_processes 1", 1),
        ("--num_processes 2", 2),
        (f"--config_file {CONFIGS / 'zero3.yaml'}", 2),
        (f"--config_file {CONFIGS / 'zero3.yaml'} --num_processes 1", 1),
        (f"--num_processes 2 --deepspeed {CONFIGS / 'ds_config.json'}", 2),
        (f"--num_processes 1 --deepspeed {CONFIGS / 'ds_config.json'}", 1),
        ("--num_processes 2 --use_fsdp --fsdp_version 2", 2),
        ("--num_processes 1 --use_fsdp --fsdp_version 2", 1),
    ],
    ids=["python", "1", "ddp", "yaml", "yaml-1", "deepspeed", "deepspeed-1", "fsdp2", "fsdp2-1"],
)
def test_a_gpt2_has_the_same_losses_with_every_way_to_shard_it(
    start: str, num_processes: int, command: Command
) -> None:
    from transformers import GPT2LMHeadModel

    done = _run(command, start, "gpt2_zero3.py", "--output", "gpt2")
    last_loss, test_loss = _numbers(r"32 updates, last loss ([\d.]+), test loss ([\d.]+)", done.out)
    assert (last_loss, test_loss) == pytest.approx(_plain_gpt2_losses(), rel=RTOL)
    held = re.findall(r"rank (\d) holds ([\d,]+) of ([\d,]+) parameters", done.out)
    assert sorted(rank for rank, _, _ in held) == [str(rank) for rank in range(num_processes)]
    counts = {int(count.replace(",", "")) for _, count, _ in held}
    is_sharded = num_processes > 1 and start != "--num_processes 2"
    assert counts == {220_544 // num_processes if is_sharded else 220_544}  # every tensor's first dim is even

    _, test_set = _module("gpt2_zero3").load_text()
    again = GPT2LMHeadModel.from_pretrained(command.directory / "gpt2").eval()
    with torch.no_grad():
        loss = again(input_ids=test_set, labels=test_set).loss.item()
    assert loss == pytest.approx(test_loss, rel=1e-5)  # five printed digits


# ---- lora.py ---------------------------------------------------------------------------------------------------------


def _plain_lora_losses() -> tuple[float, float]:
    """Return the losses of the test set before and after training, with the Trainer's defaults written out."""
    from peft import LoraConfig, get_peft_model

    example = _module("lora")
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(example.base_model(None), config)
    train_set, test_set = (torch.stack([row["input_ids"] for row in rows]) for rows in example.load_text())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 32)

    def test_loss() -> float:
        with torch.no_grad():
            return float(model(input_ids=test_set, labels=test_set).loss)

    before = test_loss()
    for epoch in range(2):
        for places in _order(len(train_set), 42 + epoch).split(16):  # 42: TrainingArguments(seed=)
            optimizer.zero_grad()
            model(input_ids=train_set[places], labels=train_set[places]).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return before, test_loss()


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads transformers' old name
@pytest.mark.parametrize("start", ["python", "--num_processes 2", "torchrun"])
def test_lora_trains_like_a_plain_loop_and_its_adapter_can_be_merged(start: str, command: Command) -> None:
    pytest.importorskip("peft")
    done = _run(command, start, "lora.py", "--output", "adapter")
    assert "training 16,384 of 136,960 parameters" in done.out
    pattern = r"test loss ([\d.]+) before, ([\d.]+) after; of the saved adapter, merged: ([\d.]+)"
    before, after, merged = _numbers(pattern, done.out)
    assert (before, after) == pytest.approx(_plain_lora_losses(), rel=RTOL)
    assert merged == pytest.approx(after, rel=1e-5)
    assert (command.directory / "adapter" / "adapter_model.safetensors").stat().st_size < 100_000
    assert not (command.directory / "adapter" / "model.safetensors").exists()


# ---- elastic_resume.py, fault_drill.py, slurm.sh ---------------------------------------------------------------------


def _plain_elastic_weights() -> dict[str, torch.Tensor]:
    example = _module("elastic_resume")
    torch.manual_seed(0)
    x = torch.randn(example.NUM_SAMPLES, 16)
    y = (x @ torch.randn(16, 4)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(example.EPOCHS):
        for places in _order(len(x), 7 + epoch).split(example.BATCH_SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(x[places]), y[places]).backward()
            optimizer.step()
    return model.state_dict()


def _check_elastic_weights(file: Path) -> None:
    weights = torch.load(file, weights_only=True)
    for name, value in _plain_elastic_weights().items():
        torch.testing.assert_close(weights[name], value, rtol=0.0, atol=1e-4)  # 80 updates of up to 1e-2, in float32


def _starts(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^processes: (\d), updates so far: (\d+)$", text, re.MULTILINE)


@pytest.mark.soak
@pytest.mark.parametrize("start", ["python", "--num_processes 2", "torchrun"])
def test_the_elastic_run_equals_a_plain_loop_on_one_process(start: str, command: Command) -> None:
    _run(command, start, "elastic_resume.py", "--folder", "run")
    _check_elastic_weights(command.directory / "run" / "weights.pt")


@pytest.mark.soak
def test_the_elastic_run_resumes_in_mid_epoch_on_1_then_3_then_2_processes(command: Command) -> None:
    done = _run(command, "python", "elastic_resume.py")
    starts = _starts(done.out)
    assert [count for count, _ in starts] == ["1", "3", "2", "1"]
    first, second, third, alone = (int(step) for _, step in starts)
    assert (first, alone) == (0, 0)
    assert 15 <= second < 40 < 55 <= third < 80  # the signal arrives within a few updates; an epoch has 40
    (difference,) = _numbers(r"largest difference of a weight .*: ([\d.e+-]+)$", done.out.strip())
    assert difference < 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_fault_drill_ends_with_the_weights_of_the_undisturbed_run(num_processes: int, command: Command) -> None:
    done = _run(command, "python", "fault_drill.py", "--num_processes", str(num_processes))
    rank = num_processes - 1
    assert f"rank {rank} is killed after update 33" in done.out
    assert _starts(done.out) == [(str(num_processes), "0"), (str(num_processes), "0"), (str(num_processes), "30")]
    assert f"echelon: rank {rank} failed first: killed by SIGKILL (signal 9)" in done.err
    assert "echelon: restart 1 of 1" in done.err
    first, second = re.findall(r"finished after (\d+) updates, last loss of rank 0: ([\d.]+)", done.out)
    assert first == second
    assert done.out.rstrip().endswith("the final weights of the two runs are equal, bit for bit")


SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\necho "$@" > scontrol\n'


def _sbatch(command: Command, num_processes: int, *arguments: str) -> Result:
    """Run the batch script as Slurm does on one machine, with programs in place of srun and scontrol."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        command.write(f"bin/{name}", text)
        (command.directory / "bin" / name).chmod(0o755)
    if not (command.directory / "examples").exists():
        (command.directory / "examples").symlink_to(EXAMPLES)
    path = f"{command.directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    launch_args = f"--cpu --num_processes {num_processes}"
    variables = {"SLURM_JOB_ID": "42", "LAUNCH_ARGS": launch_args, "OMP_NUM_THREADS": "1"}
    return command.run(["bash", str(EXAMPLES / "slurm.sh"), *arguments], PATH=path, **variables)


def test_the_slurm_script_is_valid_and_requests_what_echelon_submit_does() -> None:
    script = EXAMPLES / "slurm.sh"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = script.read_text()
    options = re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--time", "--open-mode", "--signal", "--requeue"} <= set(options)
    assert text.index("#SBATCH --requeue") < text.index("launch_args=")  # sbatch reads options up to the first command
    assert os.access(script, os.X_OK)


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_slurm_script_trains_and_requeues_itself(num_processes: int, command: Command) -> None:
    folder = command.directory / "outputs" / "slurm-42"
    first = _sbatch(command, num_processes, "--preempt_at", "15")
    assert first.code == 143, first.out + first.err
    assert (command.directory / "scontrol").read_text() == "requeue 42\n"
    second = _sbatch(command, num_processes)
    assert second.code == 0, second.out + second.err
    assert _starts(second.out)[0][0] == str(num_processes)
    assert int(_starts(second.out)[0][1]) >= 15
    _check_elastic_weights(folder / "weights.pt")
    assert not list(folder.glob(".token-*"))


# ---- mnist_notebook.ipynb --------------------------------------------------------------------------------------------

_CLIENT = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, kernel_name="python3", timeout=400).execute()
json.dump(notebook, sys.stdout)
"""


def _epochs(notebook: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the epochs that each cell has printed."""
    streams: Iterable[str] = (
        "".join(part for output in cell["outputs"] if output.get("name") == "stdout" for part in output["text"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    )
    lines = [[line for line in text.splitlines() if line.startswith("epoch ")] for text in streams]
    return [found for found in lines if found]


def test_the_notebook_is_kept_with_its_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    two, one = _epochs(notebook)
    assert two == one
    assert len(two) == 2
    assert not re.search(r"/(?:home|root|tmp|work)/", NOTEBOOK.read_text(encoding="utf-8"))


@pytest.mark.soak
def test_the_notebook_runs_in_a_kernel(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (command.directory / "data").symlink_to(EXAMPLES / "data")
    homes = dict.fromkeys(
        ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"), str(command.directory)
    )
    done = command.run([sys.executable, "-c", _CLIENT, str(NOTEBOOK)], **homes)
    assert done.code == 0, done.err
    notebook = json.loads(done.out)
    two, one = _epochs(notebook)
    assert two == one
    (accuracy,) = _numbers(r"test accuracy ([\d.]+) %", two[-1])
    assert accuracy > 90

    # The same accuracy by a plain loop over the images, with the saved weights.
    scope: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(command.directory)
    exec(cells[0] + "\n" + cells[1], scope)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1152, 10),
    )
    model.load_state_dict(torch.load(command.directory / "outputs" / "mnist_notebook.pt", weights_only=True))
    images, labels = scope["test_set"].tensors
    with torch.no_grad():
        correct = sum(int(model(image[None]).argmax() == label) for image, label in zip(images, labels, strict=True))
    assert accuracy == pytest.approx(100 * correct / 2000, abs=0.051)  # one image of 2,000 may be on the border
