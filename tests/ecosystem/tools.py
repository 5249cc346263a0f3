"""Runs LLaMA-Factory and ms-swift natively and on echelon, and compares their numbers.

``python -m tests.ecosystem.tools [--only WORD] [--processes N] [--keep FOLDER]``, after ``make ecosystem``. Each tool has an environment
of its own, because it needs older releases of transformers and trl. The cases are trained as the tools' own launchers do it: with the
module that they start, in its documented configuration. ``factories.py`` makes the model and the data.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.ecosystem.run import HERE, PYTHON, ROOT, ProgramFailedError, environment
from tests.ecosystem.scripts import Outcome, judge, record_module

TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run of a tool."""

    module: str
    """The module that the tool's launcher starts on each process."""
    args: str
    different: Mapping[str, str] = field(default_factory=dict)
    """As in ``scripts.Script``."""
    number_of_processes: tuple[int, ...] = (1, 2)


def python_of(tool: str) -> Path:
    """Return the interpreter of the environment that has ``tool``."""
    return ROOT / f".venv-{tool}" / "bin" / "python"


_LOW = "model_name_or_path=qwen3-bfloat16 bf16=true"
_SWIFT = (
    "--model_type qwen3 --template qwen3_nothinking --output_dir out --add_version false --logging_steps 1 --per_device_train_batch_size 2 "
    "--per_device_eval_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --max_steps 6 --eval_steps 3 --save_steps 6 "
    "--report_to none --split_dataset_ratio 0.23 --use_cpu true --max_length 64 --dataset_num_proc 1 --dataloader_num_workers 0 --seed 7 "
    "--attn_impl sdpa --warmup_ratio 0.1 --gradient_checkpointing false --lora_rank 4"
)
# ms-swift sets fp16 for float32 weights, which has no effect natively without a GPU.
_FLOAT = f"{_SWIFT} --model qwen3-float32 --torch_dtype float32 --fp16 false"


# Before 5.23, transformers divides the loss by the number of all labels, also by the first of each row, which no logit predicts.
_FIRST_LABEL = "the number of tokens by which the loss is divided leaves out the first label of each row"
# A Trainer of transformers 5 does not call an override of create_optimizer_and_scheduler, echelon's does; ms-swift removes empty groups of
# the optimizer in its override of create_optimizer only.
_GROUPS = "the optimizer has an empty group more"


def _factory(args: str, *numbers: int, **different: str) -> Case:
    return Case(
        module="llamafactory.launcher",
        args=f"train.yaml {args}",
        number_of_processes=numbers or (1, 2),
        different=different,
    )


def _swift(args: str, *numbers: int, kind: str = "sft") -> Case:
    different = {} if "--tuner_type full" in args else {"*steps.learning_rate": _GROUPS}
    return Case(module=f"swift.cli.{kind}", args=args, number_of_processes=numbers or (1, 2), different=different)


CASES: dict[str, dict[str, Case]] = {
    "llamafactory": {
        "sft, full": _factory("finetuning_type=full"),
        "sft, LoRA": _factory(""),
        "sft, full, bf16": _factory(f"finetuning_type=full {_LOW}"),
        "sft, LoRA, bf16": _factory(_LOW),
        "sft, QLoRA": _factory(f"quantization_bit=4 quantization_method=bnb {_LOW}"),
        "pt": _factory(
            "stage=pt dataset=pt finetuning_type=full",
            **dict.fromkeys(("*loss*", "*perplexity", "log.grad_norm"), _FIRST_LABEL),
        ),
        "dpo, LoRA": _factory("stage=dpo dataset=pairs"),
        "kto, LoRA": _factory("stage=kto dataset=feedback"),
        "reward": _factory("stage=rm dataset=pairs"),
    },
    "swift": {
        "sft, full": _swift(f"{_FLOAT} --dataset data/sft.jsonl --tuner_type full"),
        "sft, LoRA": _swift(f"{_FLOAT} --dataset data/sft.jsonl --tuner_type lora"),
        "sft, full, bf16": _swift(
            f"{_SWIFT} --model qwen3-bfloat16 --torch_dtype bfloat16 --dataset data/sft.jsonl --tuner_type full"
        ),
        "dpo, LoRA": _swift(f"--rlhf_type dpo {_FLOAT} --dataset data/pairs.jsonl --tuner_type lora", kind="rlhf"),
        "kto, LoRA": _swift(f"--rlhf_type kto {_FLOAT} --dataset data/feedback.jsonl --tuner_type lora", kind="rlhf"),
        "reward, LoRA": _swift(f"--rlhf_type rm {_FLOAT} --dataset data/pairs.jsonl --tuner_type lora", kind="rlhf"),
    },
}


def write_materials(folder: Path) -> None:
    """Make the models, the tokenizer and the data of the cases in ``folder``."""
    variables = environment(folder, [HERE / "programs"])
    command = [str(PYTHON), str(HERE / "factories.py"), str(folder)]
    subprocess.run(command, check=True, env=variables, capture_output=True)


def compare_case(
    tool: str, name: str, num_processes: int, *, materials: Path, keep: Path | None = None
) -> tuple[Outcome, str]:
    """Run a case natively and on echelon; return how they differ, and echelon's output.

    Raises:
        ProgramFailedError: see ``scripts.record``.
    """
    case = CASES[tool][name]
    runs = {}
    for way in ("native", "launch --as"):
        runs[way] = record_module(
            case.module,
            shlex.split(case.args),
            way,  # type: ignore[arg-type]
            num_processes,
            python=python_of(tool),
            materials=materials,
            timeout_s=TIMEOUT_S,
        )
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{tool} {name} on {num_processes}, {way}.json").write_text(json.dumps(runs[way].values, indent=1))
    return judge(runs["native"], runs["launch --as"], case.different, num_processes), runs["launch --as"].output


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem.tools", description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--processes", type=int, help="run on this number of processes only")
    parser.add_argument("--keep", type=Path, help="write what each run computed into this folder, as JSON")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="materials-") as folder:
        write_materials(Path(folder))
        for tool, cases in CASES.items():
            for name in cases:
                for number in cases[name].number_of_processes:
                    if options.only not in f"{tool} {name}" or options.processes not in (None, number):
                        continue
                    try:
                        outcome, _ = compare_case(tool, name, number, materials=Path(folder), keep=options.keep)
                    except ProgramFailedError as error:
                        print(f"FAILS {tool} {name} on {number}: {error}", flush=True)
                        failures += 1
                        continue
                    failures += bool(outcome.unexpected)
                    word = "DIFFERS" if outcome.unexpected else "listed" if outcome.listed else "equal"
                    shown = outcome.unexpected or outcome.listed or ""
                    print(f"{word} {tool} {name} on {number}: {shown} the others to {outcome.largest:.1g}", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
