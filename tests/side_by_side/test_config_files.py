"""Files that `accelerate config` writes for random answers load, and ranks get the same variables as in accelerate."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from echelon.base.errors import ConfigError
from echelon.config.derive import check, derive
from echelon.config.files import from_file
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import from_flags
from echelon.launch.environment import rank_variables
from tests.side_by_side.run import HERE

COUNT = 60
# Defaults that accelerate's launcher passes on; echelon does not pass defaults on, because they would look like choices.
UNSAID = {
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_MIXED_PRECISION": "no",
    **{f"ACCELERATE_DYNAMO_USE_{name}": "false" for name in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION")},
    "FSDP_SHARDING_STRATEGY": "full_shard",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_VERSION": "1",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch",
    "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
    **{f"ACCELERATE_DEEPSPEED_OFFLOAD_{name}_DEVICE": "none" for name in ("OPTIMIZER", "PARAM")},
}
# Additional variables of echelon: a "false" in the file, and the paths that accelerate reads but its launcher omits.
MORE = {
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_CPU_AFFINITY",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
} | {f"ACCELERATE_DEEPSPEED_OFFLOAD_{name}_NVME_PATH" for name in ("OPTIMIZER", "PARAM")}
REFUSED = (
    "distributed_type: XLA",
    "distributed_type: MEGATRON_LM",
    "mpirun_hostfile",
    "fp8_backend",
)


def test_files_of_accelerate_config_load_and_give_the_ranks_the_same_variables(
    peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.chdir(tmp_path)
    command = [str(peers), str(HERE / "questionnaire.py"), str(tmp_path), str(COUNT)]
    foreign = ("ACCELERATE_", "ECHELON_", "FSDP_", "PARALLELISM_CONFIG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    subprocess.run(command, check=True, capture_output=True, env={**environment, "HF_HOME": str(tmp_path)})
    found = json.loads((tmp_path / "found.json").read_text())
    compared, refused = 0, []
    for path, theirs in found.items():
        layers = [from_flags({"num_processes": ("2", "--num_processes")})]
        try:
            resolved = derive(resolve(RunConfig, [*layers, from_file(path)]))
            check(resolved)
        except ConfigError as error:
            refused.append(str(error))
            continue
        if theirs is None:
            continue
        compared += 1
        names = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
        ours = rank_variables(resolved, num_processes=2, num_threads=None, has_accelerator=True)
        ours = {name: value.lower() for name, value in ours.items() if name.startswith(names)}
        theirs = {name: value.lower() for name, value in theirs.items() if name.startswith(names)}
        if "ACCELERATE_CPU_AFFINITY" in theirs:  # both libraries accept either value
            theirs["ACCELERATE_CPU_AFFINITY"] = "true"
        theirs.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # names of keys for a check that echelon makes before the start
        ours.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        assert {name: ours.get(name, UNSAID.get(name)) for name in theirs} == theirs, path
        dynamo = {name for name in ours if "DYNAMO" in name}  # accelerate omits them in a DeepSpeed run
        assert ours.keys() - theirs.keys() <= MORE | dynamo, path
    assert compared > COUNT / 3
    assert [error for error in refused if not any(text in error for text in REFUSED)] == []
