"""Runs on the machines named by a hostfile or ``--include``: selects the machines and builds their command lines."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import click

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.cli.launch_options import ARGV, flag_entries
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig
from echelon.launch.interrupts import Interrupts
from echelon.launch.job_token import find_token
from echelon.launch.local.slots import is_this_machine
from echelon.launch.ssh.hostfile import Host, excluding, included, including, read_hostfile
from echelon.launch.ssh.ssh_launcher import run_on_hosts

# Flags that select machines. They are not passed on; each machine gets its rank instead.
_REPLACED = frozenset(
    {"deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "deepspeed_multinode_launcher"}
    | {"num_machines", "machine_rank"}
)
_HOSTFILE, _INCLUDE, _EXCLUDE = "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"
_LAUNCHER = "deepspeed_multinode_launcher"
_BY_SSH = frozenset({"pdsh", "ssh"})
_OF_CLUSTERS = frozenset({"openmpi", "mpich", "impi", "mvapich", "slurm"})


def run_on_other_machines(ctx: click.Context, resolved: Resolved[RunConfig], interrupts: Interrupts) -> int | None:
    """Start the run on the machines named in the settings and return its exit code, or return None if it runs only on this
    machine.

    Raises:
        ConfigError: the hostfile or the filters are invalid or contradict other settings.
        LaunchError: a machine cannot be reached.
    """
    hosts = hosts_of(resolved)
    if hosts is None:
        return None
    argv: list[str] = ctx.meta[ARGV]
    num_after = 1 + len(ctx.params["args"])
    flags, program = argv[:-num_after], argv[-num_after:]
    nodes = str(len(hosts))
    least = (ctx.params["num_machines"] or "").partition(":")  # torchrun's 1:4
    if least[1]:
        nodes = f"{least[0]}:{nodes}"
    common = [*_without(flags, ctx.command.params), "--num_machines", nodes]
    if len(hosts) > 1 and resolved.value.main_process_ip is None and ctx.params["rdzv_endpoint"] is None:
        common += ["--main_process_ip", hosts[0].name.rpartition("@")[2]]
    token = find_token() or secrets.token_hex(32).encode()
    interrupts.hold()
    return run_on_hosts(
        hosts, common, program, token=token, interrupts=interrupts, min_hosts=int(least[0]) if least[1] else None
    )


def hosts_of(resolved: Resolved[RunConfig]) -> tuple[Host, ...] | None:
    """Return the machines selected by the hostfile and the filters, or None if they select only this machine.

    Also return None if the user starts a launcher on each machine (``--machine_rank``, or DeepSpeed's "standard" launcher).

    Raises:
        ConfigError: the hostfile or the filters are invalid or contradict other settings.
    """
    value, origins = resolved.value, resolved.origins
    given = [name for name in (_HOSTFILE, _INCLUDE, _EXCLUDE) if getattr(value, name) is not None]
    launcher = value.deepspeed_multinode_launcher
    if not given or origins["machine_rank"].source >= SettingSource.ENV or launcher == "standard":
        return None
    if _HOSTFILE not in given and all(map(is_this_machine, _names(getattr(value, given[0])))):
        return None  # the filter selects accelerators of this machine, see named_slots()
    if launcher is not None and launcher not in _BY_SSH:
        raise ConfigError(
            _("launcher {launcher!r} is not supported", launcher=launcher),
            where=str(origins[_LAUNCHER]),
            do=_("remove it to use ssh, or start the script directly with mpirun or srun; echelon detects their ranks")
            if launcher in _OF_CLUSTERS
            else _("remove it, or set it to pdsh (uses ssh) or standard (you start the launcher on each machine)"),
        )
    if _INCLUDE in given and _EXCLUDE in given:
        raise ConfigError(
            _("the inclusion and exclusion filters are mutually exclusive"),
            where=f"{origins[_INCLUDE]}, {origins[_EXCLUDE]}",
            do=_("remove one of them"),
        )
    if value.gpu_ids is not None:
        raise ConfigError(
            _(
                "gpu_ids={gpu_ids!r} selects accelerators on one machine, but {given} names several machines",
                gpu_ids=value.gpu_ids,
                given=given[0],
            ),
            where=f"{origins['gpu_ids']}, {origins[given[0]]}",
            do=_("use --include worker-0:0,1@worker-1:0,1"),
        )
    return _of_num_machines(_filtered(resolved, given), resolved, has_filter=given != [_HOSTFILE])


def _filtered(resolved: Resolved[RunConfig], given: Sequence[str]) -> tuple[Host, ...]:
    value, where = resolved.value, {name: str(resolved.origins[name]) for name in given}
    hosts = (
        None if value.deepspeed_hostfile is None else read_hostfile(value.deepspeed_hostfile, where=where[_HOSTFILE])
    )
    if value.deepspeed_inclusion_filter is not None:
        if hosts is None:
            return included(value.deepspeed_inclusion_filter, where=where[_INCLUDE])
        return including(hosts, value.deepspeed_inclusion_filter, where=where[_INCLUDE])
    if value.deepspeed_exclusion_filter is None:
        assert hosts is not None, given
        return hosts
    if hosts is None:
        raise ConfigError(
            _(
                "the exclusion filter {deepspeed_exclusion_filter!r} requires a hostfile",
                deepspeed_exclusion_filter=value.deepspeed_exclusion_filter,
            ),
            where=where[_EXCLUDE],
            do=_("add --hostfile FILE, or use --include"),
        )
    return excluding(hosts, value.deepspeed_exclusion_filter, where=where[_EXCLUDE])


def _of_num_machines(hosts: tuple[Host, ...], resolved: Resolved[RunConfig], *, has_filter: bool) -> tuple[Host, ...]:
    """Return the first ``num_machines`` hosts, as DeepSpeed does."""
    origin, number = resolved.origins["num_machines"], resolved.value.num_machines
    if origin.source is SettingSource.DEFAULT or number == len(hosts):
        return hosts
    # accelerate's file contains the number of all machines, the flag the number of machines to use.
    if number > len(hosts) or has_filter:
        raise ConfigError(
            _(
                "num_machines={number}, but the hostfile and the filters name {num_hosts} machines",
                number=number,
                num_hosts=len(hosts),
            ),
            where=str(origin),
            do=_("set it to {num_hosts}, or remove it", num_hosts=len(hosts)),
        )
    return hosts[:number]


def _names(text: str) -> list[str]:
    return [part.partition(":")[0] for part in text.split("@")]


def _without(flags: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """Return ``flags`` without those in ``_REPLACED`` and their values."""
    replaced = {name for option in params if option.name in _REPLACED for name in option.opts}
    left: list[str] = []
    for entry in flag_entries(flags, params):
        name = entry[0].partition("=")[0]
        if (name.replace("_", "-") if name.startswith("--") else name[:2]) not in replaced and entry != ["--"]:
            left += entry
    return left
