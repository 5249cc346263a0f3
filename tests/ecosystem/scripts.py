"""Runs the example scripts of transformers, accelerate, trl and diffusers natively and on echelon, and compares their numbers.

``python -m tests.ecosystem.scripts LIBRARY=FOLDER ... [--only WORD] [--processes N] [--both]``; FOLDER is
a checkout of the library's repository, best at the release in ``requirements.txt``. Models, tokenizers and data are tiny and are made by
``materials.py``; nothing is downloaded. ``recorder/`` records what a script computes: the learning rate, gradient norm and weights
of each optimizer step, the losses, the metrics, the log of the Trainer, and the weights that were saved. It prints one line per case, and
exits with code 1 if a value differs for a reason that is not listed here, or if a script that ends well natively fails on echelon.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.ecosystem.bounded import run_bounded
from tests.ecosystem.run import (
    FIRST_LINE,
    HERE,
    PYTHON,
    TOLERANCE,
    WAYS,
    ProgramFailedError,
    Way,
    compare,
    environment,
    starter,
)

RECORDER = HERE / "recorder"

# The reasons are in docs/ecosystem.md and docs/trainer_compat.md.
_COUNTED_ONCE = "an evaluation on two processes counts each sample once, though they do not fill the last batches"
_NAN_LEFT_OUT = "the logged loss is the mean of the finite losses: a batch in which no token is masked has the loss nan"
_SHORT_BATCH = "transformers' Seq2SeqTrainer counts a short last batch like a whole one in eval_loss"
_FIRST_LENGTH = "without generation_max_length, transformers generates 20 tokens in its first batch and 19 in the others; here always 20"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script of a library with its arguments; the names of files in them are those of ``materials.py``."""

    file: str
    variant: str = ""
    """Distinguishes cases of one file."""
    args: str = ""
    different: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a value's name -> why it differs. ``2: NAME`` holds on two processes only."""
    number_of_processes: tuple[int, ...] = (1, 2)
    corrected: Mapping[str, str] = field(default_factory=dict)
    """Text of the script -> text with which it runs with the pinned releases, or does what the variant says."""

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"{self.file} ({self.variant})" if self.variant else self.file


# One accumulated update has 2 batches of 4; on two processes an epoch has 2 updates.
_TRAINER = (
    "--do_train --do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 2 "
    "--num_train_epochs 2 --learning_rate 1e-3 --logging_steps 1 --eval_strategy epoch --save_strategy epoch --seed 7 --use_cpu "
    "--report_to none --output_dir out --disable_tqdm true"
)
_NO_TRAINER = (
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 2 "
    "--learning_rate 1e-3 --seed 7 --output_dir out --checkpointing_steps epoch"
)
_TRL = (
    "--per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 2 "
    "--learning_rate 1e-3 --logging_steps 1 --eval_strategy epoch --save_strategy epoch --seed 7 --use_cpu --bf16 false "
    "--gradient_checkpointing false --report_to none --output_dir out --disable_tqdm true"
)


def _files(kind: str) -> str:
    return f"--train_file {kind}/train.json --validation_file {kind}/test.json"


_DIFFUSION = (
    "--pretrained_model_name_or_path diffusion --train_data_dir images --resolution 16 --train_batch_size 2 "
    "--gradient_accumulation_steps 2 --learning_rate 1e-3 --lr_warmup_steps 0 --seed 7 --output_dir out --num_train_epochs 2"
)
_IMAGES = {"from torchvision import transforms": "import image_transforms as transforms"}
# The scripts of early 2026 name a member that accelerate 1.15 no longer has.
_TPU = {"DistributedType.TPU": "DistributedType.XLA"}
_TEXTS = "--train_file train.txt --validation_file test.txt"
_BERT = "--model_name_or_path bert-base-cased"
_T5 = "--model_name_or_path t5"
_SHORT = "--max_source_length 32 --max_target_length 16 --num_beams 2"

SCRIPTS: dict[str, tuple[Script, ...]] = {
    "transformers": (
        Script(
            file="text-classification/run_glue.py", args=f"{_BERT} --max_seq_length 32 {_files('pairs')} {_TRAINER}"
        ),
        Script(
            file="text-classification/run_glue.py",
            variant="short last batch",
            args=f"{_BERT} --max_seq_length 32 {_files('pairs')} --max_train_samples 26 {_TRAINER}",
        ),
        Script(
            file="text-classification/run_glue.py",
            variant="regression",
            args=f"{_BERT} --max_seq_length 32 --pad_to_max_length false {_files('regression')} {_TRAINER}",
        ),
        Script(
            file="text-classification/run_glue.py",
            variant="task, best model, prediction",
            args=f"{_BERT} --max_seq_length 32 --task_name mrpc {_TRAINER} --do_predict --max_grad_norm 0.1 --fp16_full_eval false "
            "--load_best_model_at_end --metric_for_best_model accuracy",
        ),
        Script(
            file="text-classification/run_glue_no_trainer.py",
            args=f"{_BERT} --max_length 32 {_files('pairs')} {_NO_TRAINER}",
        ),
        Script(
            file="text-classification/run_glue_no_trainer.py",
            variant="task, cosine",
            args=f"{_BERT} --max_length 32 --task_name mrpc {_NO_TRAINER} --lr_scheduler_type cosine --num_warmup_steps 2",
        ),
        Script(
            file="text-classification/run_classification.py",
            args=f"{_BERT} --max_seq_length 32 {_files('pairs')} --text_column_names sentence1,sentence2 --shuffle_train_dataset "
            f"--metric_name accuracy {_TRAINER}",
        ),
        Script(
            file="language-modeling/run_clm.py",
            args=f"--model_name_or_path gpt2 --block_size 16 {_TEXTS} {_TRAINER}",
            different={"2: *eval_loss": _COUNTED_ONCE, "2: results.perplexity": _COUNTED_ONCE},
        ),
        Script(
            file="language-modeling/run_clm.py",
            variant="whole evaluation batches",
            args=f"--model_name_or_path gpt2 --block_size 16 --max_eval_samples 4 {_TEXTS} {_TRAINER} --per_device_eval_batch_size 2",
        ),
        Script(
            file="language-modeling/run_clm_no_trainer.py",
            args=f"--model_name_or_path gpt2 --block_size 16 {_TEXTS} {_NO_TRAINER}",
            corrected=_TPU,
        ),
        Script(
            file="language-modeling/run_mlm.py",
            args=f"{_BERT} --max_seq_length 32 --line_by_line {_TEXTS} {_TRAINER}",
            different=dict.fromkeys(("log.loss", "*.train_loss"), _NAN_LEFT_OUT),
        ),
        Script(
            file="language-modeling/run_mlm.py",
            variant="many masked tokens",
            args=f"{_BERT} --max_seq_length 32 --line_by_line --mlm_probability 0.5 {_TEXTS} {_TRAINER}",
        ),
        Script(
            file="language-modeling/run_mlm_no_trainer.py",
            args=f"{_BERT} --max_seq_length 32 --line_by_line true {_TEXTS} {_NO_TRAINER}",
            corrected=_TPU,
        ),
        Script(
            file="language-modeling/run_plm.py",
            args=f"--model_name_or_path xlnet --max_seq_length 32 --line_by_line --pad_to_max_length {_TEXTS} {_TRAINER}",
            corrected={"processing_classtokenizer": "processing_class"},
            different=dict.fromkeys(("log.loss", "*.train_loss"), _NAN_LEFT_OUT),
        ),
        Script(
            file="question-answering/run_qa.py",
            args=f"{_BERT} --max_seq_length 24 --doc_stride 8 {_files('questions')} {_TRAINER}",
        ),
        Script(
            file="question-answering/run_qa_no_trainer.py",
            args=f"{_BERT} --max_seq_length 24 --doc_stride 8 {_files('questions')} {_NO_TRAINER}",
        ),
        Script(
            file="question-answering/run_seq2seq_qa.py",
            args=f"{_T5} --max_seq_length 32 --max_answer_length 8 --predict_with_generate {_files('questions')} {_TRAINER}",
        ),
        Script(file="token-classification/run_ner.py", args=f"{_BERT} {_files('entities')} {_TRAINER}"),
        Script(file="token-classification/run_ner_no_trainer.py", args=f"{_BERT} {_files('entities')} {_NO_TRAINER}"),
        Script(file="multiple-choice/run_swag.py", args=f"{_BERT} --max_seq_length 32 {_files('choices')} {_TRAINER}"),
        Script(
            file="multiple-choice/run_swag_no_trainer.py",
            args=f"{_BERT} --max_seq_length 32 {_files('choices')} {_NO_TRAINER}",
        ),
        Script(
            file="summarization/run_summarization.py",
            args=f"{_T5} --text_column text --summary_column summary --source_prefix w1 --predict_with_generate {_SHORT} "
            f"{_files('summaries')} {_TRAINER}",
            different={"1: *eval_loss": _SHORT_BATCH},
        ),
        Script(
            file="summarization/run_summarization_no_trainer.py",
            args=f"{_T5} --text_column text --summary_column summary --source_prefix w1 {_SHORT} {_files('summaries')} {_NO_TRAINER}",
        ),
        Script(
            file="translation/run_translation.py",
            args=f"{_T5} --source_lang en --target_lang ro --source_prefix w1 --predict_with_generate {_SHORT} "
            f"{_files('translations')} {_TRAINER}",
            different={"1: *eval_loss": _SHORT_BATCH, "log.eval_gen_len": _FIRST_LENGTH},
        ),
        Script(
            file="translation/run_translation_no_trainer.py",
            args=f"{_T5} --source_lang en --target_lang ro --source_prefix w1 {_SHORT} {_files('translations')} {_NO_TRAINER}",
        ),
    ),
    "accelerate": (
        Script(file="nlp_example.py", args="--cpu"),
        Script(file="complete_nlp_example.py", args="--cpu --checkpointing_steps epoch --output_dir out"),
        Script(
            file="complete_nlp_example.py",
            variant="steps, tracking",
            args="--cpu --checkpointing_steps 3 --with_tracking --output_dir out --project_dir out",
        ),
        Script(file="by_feature/automatic_gradient_accumulation.py", args="--cpu"),
        Script(file="by_feature/checkpointing.py", args="--cpu --checkpointing_steps epoch --output_dir out"),
        Script(file="by_feature/cross_validation.py", args="--cpu --num_folds 2"),
        Script(file="by_feature/ddp_comm_hook.py", args="--cpu --ddp_comm_hook no"),
        Script(file="by_feature/early_stopping.py", args="--cpu"),
        Script(
            file="by_feature/early_stopping.py",
            variant="at the first higher loss",
            args="--cpu",
            corrected={"EarlyStoppingCallback()": "EarlyStoppingCallback(patience=1)"},
        ),
        Script(file="by_feature/gradient_accumulation.py", args="--cpu --gradient_accumulation_steps 2"),
        Script(
            file="by_feature/gradient_accumulation_for_autoregressive_models.py",
            args="--cpu --gradient_accumulation_steps 2",
        ),
        Script(file="by_feature/local_sgd.py", args="--cpu --gradient_accumulation_steps 1 --local_sgd_steps 2"),
        Script(file="by_feature/memory.py", args="--cpu"),
        Script(file="by_feature/multi_process_metrics.py", args="--cpu"),
        Script(file="by_feature/profiler.py", args="--cpu"),
        Script(file="by_feature/tracking.py", args="--cpu"),
    ),
    "trl": (
        Script(
            file="trl/scripts/sft.py", args=f"--model_name_or_path llama --dataset_name texts --max_length 24 {_TRL}"
        ),
        Script(
            file="trl/scripts/sft.py",
            variant="packed",
            args=f"--model_name_or_path llama --dataset_name texts --max_length 24 --packing --packing_strategy wrapped {_TRL}",
            different=dict.fromkeys(
                ("2: log.eval_loss", "2: log.eval_entropy", "2: log.eval_mean_token_accuracy"), _COUNTED_ONCE
            ),
        ),
        Script(
            file="trl/scripts/sft.py",
            variant="packed, whole evaluation batches",
            args="--model_name_or_path llama --dataset_name texts --max_length 25 --packing --packing_strategy wrapped "
            f"{_TRL} --per_device_eval_batch_size 1",  # 147 tokens are 6 rows
        ),
        Script(
            file="trl/scripts/sft.py",
            variant="assistant's tokens only",
            args="--model_name_or_path llama --dataset_name messages --max_length 48 --assistant_only_loss "
            f"--chat_template_path chat.jinja {_TRL}",
        ),
        Script(
            file="trl/scripts/sft.py",
            variant="LoRA",
            args=f"--model_name_or_path llama --dataset_name texts --max_length 24 --use_peft --lora_r 4 {_TRL}",
        ),
        Script(file="trl/scripts/dpo.py", args=f"--model_name_or_path llama --dataset_name preferences {_TRL}"),
        Script(
            file="trl/scripts/dpo.py",
            variant="LoRA",
            args=f"--model_name_or_path llama --dataset_name preferences --use_peft --lora_r 4 {_TRL}",
        ),
        Script(file="trl/scripts/reward.py", args=f"--model_name_or_path reward --dataset_name comparisons {_TRL}"),
        Script(file="trl/scripts/kto.py", args=f"--model_name_or_path llama --dataset_name feedback {_TRL}"),
        Script(file="examples/scripts/cpo.py", args=f"--model_name_or_path llama --dataset_name preferences {_TRL}"),
        Script(file="examples/scripts/orpo.py", args=f"--model_name_or_path llama --dataset_name preferences {_TRL}"),
        Script(
            file="examples/scripts/reward_modeling.py",
            args=f"--model_name_or_path reward --dataset_name comparisons {_TRL}",
        ),
        Script(
            file="trl/scripts/grpo.py",
            args=f"--model_name_or_path llama --dataset_name prompts --reward_model_name_or_path reward --num_generations 4 "
            f"--max_completion_length 8 {_TRL} --eval_strategy no",
        ),
        Script(
            file="trl/scripts/grpo.py",
            variant="a reward in Python",
            args="--model_name_or_path llama --dataset_name prompts --reward_funcs rewards.short_words --num_generations 4 "
            f"--max_completion_length 8 {_TRL} --eval_strategy no",
        ),
        Script(
            file="trl/scripts/rloo.py",
            args=f"--model_name_or_path llama --dataset_name prompts --reward_model_name_or_path reward --num_generations 4 "
            f"--max_completion_length 8 {_TRL} --eval_strategy no",
        ),
        Script(
            file="trl/scripts/distillation.py",
            args=f"--model_name_or_path llama --teacher_model_name_or_path gpt2 --dataset_name prompts --max_completion_length 8 {_TRL}",
        ),
        Script(
            file="trl/scripts/reward.py",
            variant="LoRA, centered rewards",
            args="--model_name_or_path reward --dataset_name comparisons --use_peft --lora_task_type SEQ_CLS --lora_r 4 "
            f"--center_rewards_coefficient 0.1 {_TRL}",
        ),
    ),
}

SCRIPTS["diffusers"] = (
    Script(
        file="unconditional_image_generation/train_unconditional.py",
        variant="averaged weights",
        args="--model_config_name_or_path unconditional --train_data_dir images --resolution 16 --train_batch_size 2 "
        "--gradient_accumulation_steps 2 --num_epochs 2 --save_images_epochs 1 --save_model_epochs 1 --eval_batch_size 2 "
        "--learning_rate 1e-3 --lr_warmup_steps 2 --use_ema --ddpm_num_steps 20 --ddpm_num_inference_steps 2 "
        "--checkpointing_steps 2 --checkpoints_total_limit 2 --output_dir out",
        # The script has no seed.
        corrected={**_IMAGES, "def main(args):": "def main(args):\n    torch.manual_seed(7)"},
    ),
    Script(
        file="text_to_image/train_text_to_image.py",
        variant="averaged weights",
        args=f"{_DIFFUSION} --use_ema --snr_gamma 5 --checkpointing_steps 2 --checkpoints_total_limit 2 --random_flip",
        corrected=_IMAGES,
    ),
    Script(
        file="text_to_image/train_text_to_image_lora.py",
        args=f"{_DIFFUSION} --rank 2 --lr_scheduler cosine --checkpointing_steps 2",
        corrected=_IMAGES,
    ),
)

# Where the scripts of a library stand in a checkout.
FOLDERS = {"transformers": "examples/pytorch", "accelerate": "examples", "trl": ".", "diffusers": "examples"}

_TIMES = ("*runtime*", "*per_second*", "*flos*", "*_mem_*", "*time*")


@dataclass(frozen=True)
class Recorded:
    """What a script computed, by name, and its output."""

    values: dict[str, Any]
    output: str


def write_materials(folder: Path) -> None:
    """Make the models, tokenizers and data of the scripts in ``folder``."""
    variables = environment(folder, [HERE / "programs"])
    subprocess.run(
        [str(PYTHON), str(HERE / "materials.py"), str(folder)], check=True, env=variables, capture_output=True
    )


def record(
    script: Path,
    args: Iterable[str],
    way: Way,
    num_processes: int,
    *,
    materials: Path,
    corrected: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
) -> Recorded:
    """Run ``script`` in a new copy of ``materials``, and return what it computed.

    Raises:
        ProgramFailedError: the script failed, did not end in time, or made no optimizer step.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        work = Path(folder, "work")
        shutil.copytree(materials, work)
        started, text = script, script.read_text()
        for wrong, right in (corrected or {}).items():
            assert wrong in text, f"{script} has no {wrong}"
            text = text.replace(wrong, right)
        if way.endswith("install()"):
            text = FIRST_LINE + text.replace("from __future__ import annotations\n", "")
        if text != script.read_text():
            started = work / script.name
            started.write_text(text)
        variables = environment(Path(folder), [RECORDER, HERE / "offline", script.parent], source=way != "native")
        command = [str(PYTHON), *starter(way, num_processes), str(started), *args]
        return _record(command, way, num_processes, work=work, variables=variables, timeout_s=timeout_s)


def record_module(
    module: str, args: Iterable[str], way: Way, num_processes: int, *, python: Path, materials: Path, timeout_s: float
) -> Recorded:
    """Run ``module`` of another environment, as ``python -m`` does, in a new copy of ``materials``; see ``record``."""
    with tempfile.TemporaryDirectory(prefix="module-") as folder:
        work = Path(folder, "work")
        shutil.copytree(materials, work)
        variables = environment(Path(folder), [RECORDER, HERE / "stand_ins"], source=way != "native")
        command = [str(python), *starter(way, num_processes), "-m", module, *args]
        return _record(command, way, num_processes, work=work, variables=variables, timeout_s=timeout_s)


def _record(
    command: list[str], way: Way, num_processes: int, *, work: Path, variables: Mapping[str, str], timeout_s: float
) -> Recorded:
    """Run ``command`` in ``work``, and return what each of its processes computed."""
    records = work.parent / "records"
    records.mkdir()
    try:
        done = run_bounded(
            command,
            folder=work,
            timeout_s=timeout_s,
            variables={
                **variables,
                "HF_DATASETS_OFFLINE": "1",
                "RECORD_FOLDER": str(records),
                "RECORD_IN_ORDER": str(int(num_processes > 1)),
                # On echelon, nothing outside keeps the group: its own end must be safe.
                "RECORD_KEEP_GROUP": str(int(way == "native")),
            },
        )
    except subprocess.TimeoutExpired as late:
        raise ProgramFailedError(f"not ended after {timeout_s:.0f} s\n{late.output[-6000:]}") from late
    values = {**_computed(records), **_written(work / "out")}
    if done.returncode != 0:
        raise ProgramFailedError(f"exit code {done.returncode}\n{done.stdout[-6000:]}")
    if not all(values.get(f"rank {rank}", {}).get("steps") for rank in range(num_processes)):
        raise ProgramFailedError(f"a process made no optimizer step\n{done.stdout[-6000:]}")
    return Recorded(values, done.stdout)


def _computed(records: Path) -> dict[str, Any]:
    """Return the records of each rank."""
    found: dict[str, Any] = {}
    for file in sorted(records.glob("rank_*.jsonl")):
        of_rank: dict[str, list[Any]] = defaultdict(list)
        for line in file.read_text().splitlines():
            name, value = json.loads(line)
            of_rank[name].append(value)
        found[file.stem.replace("_", " ")] = of_rank
    return found


def _written(output: Path) -> dict[str, Any]:
    """Return the results and the Trainer's log in ``output``, the folder of the script, and the norm of each saved tensor."""
    found: dict[str, Any] = {}
    results = output / "all_results.json"
    if results.exists():
        found["results"] = _without_times(json.loads(results.read_text()))
    states = [
        output / "trainer_state.json",
        *sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda file: -file.stat().st_mtime),
    ]
    for state in states:
        if state.exists():
            found["log"] = [_without_times(entry) for entry in json.loads(state.read_text())["log_history"]]
            break
    for name in (
        "model.safetensors",
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "unet/diffusion_pytorch_model.safetensors",
    ):
        if (output / name).exists():
            with safe_open(output / name, framework="pt") as file:
                found[name] = {key: float(file.get_tensor(key).double().norm()) for key in file.keys()}  # noqa: SIM118
    return found


def _without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not any(fnmatch(key, pattern) for pattern in _TIMES)}


@dataclass(frozen=True)
class Outcome:
    """Differences above the tolerance, by the name of the value."""

    listed: dict[str, float]
    unexpected: dict[str, float]
    largest: float
    """Of the values that agree."""


def judge(native: Recorded, swapped: Recorded, different: Mapping[str, str], num_processes: int) -> Outcome:
    """Compare two runs; ``different`` as in ``Script``."""
    patterns = [
        key.partition(": ")[2] if key.startswith(f"{num_processes}: ") else key
        for key in different
        if ": " not in key or key.startswith(f"{num_processes}: ")
    ]
    found = compare(native.values, swapped.values)
    above = {name: value for name, value in found.items() if value > TOLERANCE}
    listed = {name: value for name, value in above.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    return Outcome(
        listed=listed,
        unexpected={name: value for name, value in above.items() if name not in listed},
        largest=max((value for name, value in found.items() if name not in above), default=math.nan),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem.scripts", description=__doc__)
    parser.add_argument("checkouts", nargs="+", metavar="LIBRARY=FOLDER")
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--processes", type=int, help="run on this number of processes only")
    parser.add_argument("--both", action="store_true", help="also with install() as the first line, under torchrun")
    parser.add_argument("--keep", type=Path, help="write what each run computed into this folder, as JSON")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="materials-") as folder:
        write_materials(Path(folder))
        for checkout in options.checkouts:
            library, _, source = checkout.partition("=")
            for script in SCRIPTS[library]:
                if options.only not in script.name:
                    continue
                for num_processes in script.number_of_processes:
                    if options.processes in (None, num_processes):
                        file = Path(source).resolve() / FOLDERS[library] / script.file
                        materials = Path(folder, str(num_processes))
                        ways = WAYS if options.both else WAYS[:1]
                        failures += _run_case(script, file, num_processes, materials, ways, options.keep)
    sys.exit(bool(failures))


def _run_case(
    script: Script, file: Path, num_processes: int, materials: Path, ways: Iterable[Way], keep: Path | None
) -> int:
    """Print a line per way, and return how many differ otherwise than listed."""

    def run(way: Way) -> Recorded:
        recorded = record(
            file, shlex.split(script.args), way, num_processes, materials=materials, corrected=script.corrected
        )
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            place = f"{script.name} on {num_processes}, {way}.json".replace("/", " ")
            Path(keep, place).write_text(json.dumps(recorded.values, indent=1))
        return recorded

    name = f"{script.name} on {num_processes}"
    try:
        native = run("native")
    except ProgramFailedError as error:
        print(f"NOT COMPARED {name}: fails natively: {error}", flush=True)
        return 0
    failures = 0
    for way in ways:
        try:
            outcome = judge(native, run(way), script.different, num_processes)
        except ProgramFailedError as error:
            print(f"FAILS {name}, {way}: {error}", flush=True)
            failures += 1
            continue
        failures += bool(outcome.unexpected)
        word = "DIFFERS" if outcome.unexpected else "listed" if outcome.listed else "equal"
        shown = {key: float(f"{value:.2g}") for key, value in (outcome.unexpected or outcome.listed).items()}
        print(f"{word} {name}, {way}: {shown or ''} the others to {outcome.largest:.1g}", flush=True)
    return failures


if __name__ == "__main__":
    main()
