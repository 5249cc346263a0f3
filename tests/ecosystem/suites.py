"""Runs the test suites of the libraries themselves, natively and on echelon, and compares the outcome test by test.

``python -m tests.ecosystem.suites accelerate=FOLDER transformers=FOLDER ...``; FOLDER is a checkout of the library's repository, best at the
release in ``requirements.txt``. It prints the counts, and each test that passes natively, fails on echelon and is not listed here with a reason; if
there is one, it exits with code 1. Tests that need a download fail in both ways and are not compared.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.ecosystem.bounded import run_bounded
from tests.ecosystem.run import HERE, PYTHON, ROOT

_PRIVATE = "reads or replaces a private name, or mocks an object of the native implementation"
_TEXT = "compares the text of an error or a warning, or the logger that writes it"
_UNSUPPORTED = "needs context or sequence parallelism, which are not supported"
_SAFETENSORS = "expects raw .dat files: offloaded weights are safetensors with a checksum"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tests of one library that use accelerate or the Trainer."""

    files: tuple[str, ...]
    """Files and folders of the checkout."""
    copied: str = "tests"
    """Folder of the tests. It is copied, so that they import the installed library and not the checkout."""
    skipped: str = ""
    """Expression of ``pytest -k``: tests that need a download or another machine."""
    variables: dict[str, str] = field(default_factory=dict)
    removed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """File -> lines that import what the pinned release no longer has, for tests that are not compared."""
    different: dict[str, str] = field(default_factory=dict)
    """Name of a test -> why its outcome differs."""


SUITES: dict[str, Suite] = {
    "accelerate": Suite(
        files=tuple(
            f"tests/test_{name}.py"
            for name in (
                "accelerator",
                "big_modeling",
                "data_loader",
                "dataclasses",
                "hooks",
                "kwargs_handlers",
                "logging",
                "memory_utils",
                "modeling_utils",
                "offload",
                "optimizer",
                "scheduler",
                "state_checkpointing",
                "utils",
            )
        ),
        # torchdata's own class and its state: echelon's loaders save a state of their own, with any DataLoader.
        skipped="StatefulDataLoaderTester or stateful_dataloader",
        different={
            **dict.fromkeys(("test_offload_state_dict", "test_offload_weight"), _SAFETENSORS),
            **dict.fromkeys(
                (
                    "test_lambda_scheduler_steps_with_optimizer_multiprocess",
                    "test_lambda_scheduler_steps_with_optimizer_single_process",
                ),
                _PRIVATE + " (AcceleratedOptimizer._is_overflow)",
            ),
            **dict.fromkeys(("test_get_mesh", "test_build_device_mesh"), _PRIVATE + " (_get_mesh, init_device_mesh)"),
            **dict.fromkeys(("test_cp_torch_handler", "test_sp_deepspeed_handler"), _UNSUPPORTED),
            **dict.fromkeys(
                ("test_accelerator_state_after_reset", "test_partial_state_after_reset"),
                _PRIVATE + " (_reset_state, which has no effect: each Accelerator has its own state)",
            ),
            **dict.fromkeys(
                ("test_can_pickle_dataloader_0", "test_can_pickle_dataloader_1"),
                _PRIVATE + " (Accelerator._dataloaders)",
            ),
            "test_is_accelerator_prepared": _PRIVATE + " (_is_accelerate_prepared)",
            "test_prepare_model_8bit_cpu_offload_raises_valueerror_not_typeerror": _PRIVATE,
            "test_env_var_device": "expects the device cpu:64; a CPU has no index here",
            "test_batch_sampler_shards_with_splits_no_even": "a short last batch is split evenly; natively it fills the first ranks",
            "test_dataloader_inheritance": "expects an AttributeError for attributes that echelon's loaders do have",
            "test_ensure_dataloader_gets_cleaned_up": "expects that reference counts free a loader at once; here the garbage collector does",
            "test_with_save_limit": "counts the files of the project's folder, where echelon also keeps .checkpoints.lock",
            **dict.fromkeys(
                (
                    "test_split_batches_validates_non_divisible_batch_size",
                    "test_invalid_registration",
                    "test_check_os_kernel_warning_when_release_lt_min",
                    "test_convert_dict_to_env_variables",
                    "test_honor_type",
                    "test_save_safetensor_shared_memory",
                    "test_check_device_map_invalid_keys",
                    "test_load_checkpoint_in_model_unexpected_keys_0",
                    "test_load_checkpoint_in_model_unexpected_keys_1",
                    "test_set_module_tensor_checks_shape",
                ),
                _TEXT,
            ),
        },
    ),
    "transformers": Suite(
        files=("tests/trainer/",),
        skipped="Hub or Ray or Wandb or DataCollator or distributed or Distributed or compile",
        variables={"ECHELON_CHECKPOINT_FORMAT": "transformers"},  # the tests look for the files of its checkpoints
        removed={"tests/trainer/test_trainer.py": ("GlueDataset,", "GlueDataTrainingArguments,")},
        different={
            **dict.fromkeys(
                (
                    "test_duplicate_callback_warning",
                    "test_missing_stateful_callback_warning",
                    "test_warning_without_default_flow_callback",
                    "test_accelerator_config_from_dict_grad_accum_num_steps",
                    "test_can_resume_training",
                    "test_log_level",
                    "test_metric_for_best_model_behavior",
                    "test_label_smoothing_multi_label_incompatibility",
                ),
                _TEXT,
            ),
            **dict.fromkeys(
                ("test_anyprecision_adamw", "test_no_torchdistx_anyprecision_adamw"),
                "adamw_anyprecision is refused: see trainer_compat.md",
            ),
            "test_optim_supported_1_adafactor": "expects the class of transformers; echelon's has the same formula and arguments",
            "test_accelerator_config_not_instantiated": "expects NotImplementedError; a class in the place of an instance is a ConfigError",
            "test_accelerator_custom_state": "expects an error of use_configured_state, which nothing here depends on",
            **dict.fromkeys(
                (
                    "test_get_eval_dataloader_with_persistent_workers",
                    "test_get_eval_dataloader_without_persistent_workers",
                ),
                _PRIVATE + " (Accelerator.prepare)",
            ),
            "test_compare_trainer_and_checkpoint_args_logging": (
                "resumes in the middle of an epoch with other data, which is an error without allow_changed_data=True"
            ),
            "test_integration_with_trainer": "looks for JITCheckpointCallback; echelon's Trainer saves on the signal itself",
            "test_logging_inf_nan_filter": "expects the loss 0 where no loss is finite; it is nan here",
        },
    ),
    "pytorch-accelerated": Suite(files=("test/",), copied="test"),
}


@dataclass(frozen=True)
class Comparison:
    """Outcomes of the tests of a suite."""

    native: dict[str, str]
    swapped: dict[str, tuple[str, str]]
    """Outcome and the end of its traceback."""

    @property
    def compared(self) -> list[str]:
        """Tests that pass natively."""
        return [name for name, outcome in self.native.items() if outcome == "passed"]

    @property
    def different(self) -> list[str]:
        """Tests that pass natively but not on echelon."""
        return [name for name in self.compared if self.swapped.get(name, ("missing", ""))[0] != "passed"]


def function_of(test: str) -> str:
    """Return the name of the test function, which stays when a release moves the test to another file or class."""
    return test.rpartition("::")[2].partition("[")[0]


def compare(suite: Suite, checkout: Path, *, timeout_s: float = 3600.0) -> Comparison:
    """Run ``suite`` from ``checkout`` in both ways."""
    native = {name: outcome for name, (outcome, _) in _run(suite, checkout, "native", timeout_s).items()}
    return Comparison(native, _run(suite, checkout, "swapped", timeout_s))


def _run(suite: Suite, checkout: Path, way: str, timeout_s: float) -> dict[str, tuple[str, str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ECHELON_", "ACCELERATE_"))}
    source = [str(ROOT / "src")] if way == "swapped" else []
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        copy, record = Path(folder, "checkout"), Path(folder, "record.jsonl")
        shutil.copytree(checkout / suite.copied, copy / suite.copied)
        for file, lines in suite.removed.items():
            text = (copy / file).read_text()
            (copy / file).write_text(
                "".join(line for line in text.splitlines(keepends=True) if line.strip() not in lines)
            )
        for name in ("conftest.py", "pyproject.toml", "setup.cfg"):
            if (checkout / name).is_file():
                shutil.copy(checkout / name, copy)
        selection = ["-k", f"not ({suite.skipped})"] if suite.skipped else []
        options = [
            "-q",
            "-p",
            "suite_plugin",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "--tb=short",
            "--continue-on-collection-errors",
        ]
        done = run_bounded(
            [str(PYTHON), "-m", "pytest", *options, *selection, *suite.files],
            folder=copy,
            timeout_s=timeout_s,
            variables={
                **inherited,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **suite.variables,
                "SUITE_WAY": way,
                "SUITE_RECORD": str(record),
                "PYTHONPATH": os.pathsep.join(filter(None, [*source, str(HERE), os.environ.get("PYTHONPATH", "")])),
            },
        )
        if not record.is_file():
            raise SystemExit(f"pytest ran no test of {checkout}:\n{done.stdout[-4000:]}")
        outcomes: dict[str, tuple[str, str]] = {}
        for line in record.read_text().splitlines():
            one = json.loads(line)
            if outcomes.get(one["test"], ("",))[0] != "failed":  # a failure of the test's end counts, too
                outcomes[one["test"]] = one["outcome"], one["text"]
    return outcomes


def main() -> None:
    unexpected = 0
    for argument in sys.argv[1:]:
        name, _, checkout = argument.partition("=")
        suite = SUITES[name]
        found = compare(suite, Path(checkout).resolve())
        listed = [test for test in found.different if function_of(test) in suite.different]
        rest = [test for test in found.different if test not in listed]
        unexpected += len(rest)
        print(
            f"{name}: {len(found.compared)} of {len(found.native)} tests pass natively; on echelon {len(found.compared) - len(found.different)} "
            f"of these pass, {len(listed)} differ for a listed reason, {len(rest)} differ otherwise"
        )
        for test in listed:
            print(f"  listed: {test}: {suite.different[function_of(test)]}")
        for test in rest:
            outcome, text = found.swapped.get(test, ("missing", ""))
            print(f"  {outcome}: {test}\n    {text.strip()[-600:]}")
        passed = {function_of(test) for test, (outcome, _) in found.swapped.items() if outcome == "passed"}
        failed = {function_of(test) for test in found.different}
        for function in sorted(set(suite.different) & passed - failed):
            print(f"  {function} is listed, but passes")
    sys.exit(bool(unexpected))


if __name__ == "__main__":
    main()
