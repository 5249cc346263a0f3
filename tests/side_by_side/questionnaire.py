"""Answers accelerate's questionnaire at random, and records the variables that its launcher sets for each file.

``python questionnaire.py FOLDER COUNT``, with the peers' Python, writes ``FOLDER/<i>.yaml`` and ``FOLDER/found.json``, which maps each
file to the variables of its ranks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

from accelerate.commands import launch
from accelerate.commands.config import cluster
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

_TEXTS = {"ip address": "10.0.0.1", "(by id)": "0,1", "separated by a comma": "A=1", "json deepspeed": "ds.json"}


def _field(text: str, convert: Any = None, default: Any = None, error_message: str | None = None) -> Any:
    if "yes/no" in text.lower():
        answer = random.choice(["yes", "no"])
        return convert(answer) if convert else answer
    if default is not None and random.random() < 0.5:
        return default
    if convert is int:
        return random.choice([1, 2, 4])
    if convert is float:
        return 0.5
    return next((answer for part, answer in _TEXTS.items() if part in text.lower()), default or "SomeLayer")


def _options(text: str, options: Any = (), convert: Any = None, default: int = 0) -> Any:
    choice = random.randrange(len(options))
    return convert(choice) if convert else choice


def _variables(path: str) -> dict[str, str] | None:
    """Return the variables that the launcher adds for ranks of a plain, FSDP or DeepSpeed run; None for other runs."""
    args = launch.launch_command_parser().parse_args(["--config_file", path, "--num_processes", "2", "train.py"])
    args, defaults, _ = launch._validate_launch_command(args)
    if args.tpu or args.use_megatron_lm or args.mixed_precision == "fp8" or args.num_machines > 1:
        return None
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        found = prepare_deepspeed_cmd_env(args)[1]
    else:
        found = prepare_multi_gpu_env(args)
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def main(folder: str, count: int) -> None:
    cluster._ask_field, cluster._ask_options = _field, _options
    for name in ("deepspeed", "fp8", "transformer_engine", "msamp", "torchao", "transformers"):
        setattr(cluster, f"is_{name}_available", lambda *args, **kwargs: True)
    found = {}
    for i in range(count):
        random.seed(i)
        path = f"{folder}/{i}.yaml"
        try:
            cluster.get_cluster_input().to_yaml_file(path)
        except (RuntimeError, ValueError, NotImplementedError):
            continue  # accelerate refuses these answers
        load_config_from_file(path)
        found[path] = _variables(path)
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], int(sys.argv[2]))
