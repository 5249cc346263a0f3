"""``echelon launch --plan``: predicts the memory of a run before it starts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from echelon.base.device import total_memory
from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.config.derive import section_in_use
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.launch.environment import inherited, is_of_rank, rank_variables
from echelon.launch.script import Script

_MESH = "parallelism_config_"
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")


def plan_first(
    script: Script, resolved: Resolved[RunConfig], *, devices: int, machines: int, has_accelerator: bool
) -> tuple[int, dict[str, Any]]:
    """Print the plan of the run, and return what the run's record keeps of it.

    The number is 0 if the run fits, 1 if it does not, and 2 if the script cannot be planned.

    Args:
        devices: processes of this machine, each on a device of its own.
        machines: number of machines, with as many processes each.
        has_accelerator: whether the run uses the accelerators of this machine, whose memory is then the default.

    Raises:
        ConfigError: the memory is unknown, or the run is none that a plan knows.
    """
    value, origins = resolved.value, resolved.origins
    where = str(origins["plan"])
    if script.kind != "script":
        raise ConfigError(
            _("plan needs a Python script"), where=where, do=_("pass the script's file, or remove the setting plan")
        )
    if section_in_use(resolved) == "deepspeed_config":
        raise ConfigError(
            _("plan cannot run a script with DeepSpeed's settings without memory"),
            where=where,
            do=_("remove the setting plan"),
        )
    if (value.parallelism_config_sp_size or 1) > 1:
        raise ConfigError(
            _("a plan does not know the mesh axis sp"),
            where=str(origins["parallelism_config_sp_size"]),
            do=_("remove the setting plan"),
        )
    memory = value.gpu_memory or (total_memory() if has_accelerator else None)
    if memory is None:
        raise ConfigError(
            _("the memory of the devices is unknown, because the run uses no accelerator of this machine"),
            where=where,
            do=_("add --gpu_memory 80GB, or remove the setting plan"),
        )
    sizes = {axis: getattr(value, f"{_MESH}{axis}_size") or 1 for axis in _AXES}
    mesh = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    argv = [sys.executable, "-m", "echelon", "plan", "--gpus", str(devices), "--nodes", str(machines)]
    argv += ["--gpu_memory", str(memory)]
    if mesh:
        argv += ["--mesh", ",".join(mesh)]
    # The script runs as one process, which has all settings of the ranks but the sizes of the mesh.
    alone: dict[str, Any] = {name: None for name in origins if name.startswith(_MESH)}
    settings = replace(
        resolved, value=replace(value, **alone, use_parallelism_config=False, num_processes=1, num_machines=1)
    )
    variables = rank_variables(settings, num_processes=1, num_threads=None, has_accelerator=has_accelerator)
    environment = inherited(without=lambda name: is_of_rank(name) or name.startswith("PARALLELISM_CONFIG_")) | variables
    with tempfile.TemporaryDirectory(prefix="echelon-") as folder:
        file = Path(folder) / "plan.json"
        argv += ["--record", str(file), script.target, *script.args]
        code = subprocess.run(argv, env=environment, check=False).returncode
        return code, json.loads(file.read_text(encoding="utf-8")) if code == 0 else {}
