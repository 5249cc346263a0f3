"""The flags of ``echelon launch``: those of the table of settings, and the launcher's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from echelon.base.errors import ConfigError, UsageError
from echelon.compat.unsupported import TPU_ALTERNATIVE
from echelon.config.key_table import BY_FIELD, KEYS, Key
from echelon.config.resolve import Layer
from echelon.config.schema import RunConfig, field_docs, field_types
from echelon.config.sources import from_flags

__all__ = ["NUMBERS", "STALLED", "LaunchCommand", "flag_layer", "options", "typed_flags"]

NUMBERS = ("auto", "gpu", "cpu")
"""What ``--num_processes`` can be besides a number, as in torchrun."""

STALLED = 124
"""The exit code of a run that was stopped because it stood still; as that of timeout(1)."""

ARGV = "echelon.launch.argv"
# These take no value, as in accelerate; the others of two values take true or false.
_SWITCHES = frozenset(
    {"cpu", "debug", "same_network", "enable_cpu_affinity", "use_parallelism_config"}
    | {"dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"}
)
_USE = MappingProxyType({"use_fsdp": "fsdp", "use_deepspeed": "deepspeed"})
_HEADINGS = MappingProxyType(
    {
        None: "Options",
        "dynamo_config": "torch.compile",
        "fsdp_config": "Sharding, in the words of FSDP (--use-fsdp)",
        "deepspeed_config": "Sharding, in the words of DeepSpeed (--use-deepspeed)",
        "parallelism_config": "Layout of the ranks",
        "fp8_config": "fp8",
    }
)


class LaunchCommand(click.Command):
    """Keeps the flags as they were typed: an origin says ``--nproc_per_node`` when the user wrote that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and tell a tutorial's ``--localhost:0,2`` how it is written."""
        args = self._with_rank(args)
        ctx.meta[ARGV] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            slots = re.fullmatch(r"--([\w.-]+(?::[\d,]+)(?:@[\w.-]+(?::[\d,]+)?)*)", error.option_name)
            if slots is None:
                raise
            raise UsageError(
                f"unknown flag {error.option_name}",
                where="echelon launch",
                do=f"did you mean --include {slots[1]}?",
            ) from error

    def _with_rank(self, args: list[str]) -> list[str]:
        """Return the arguments, ``--debugger`` without a number as ``--debugger=0``: click would take the script for it."""
        valued = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        i = 0
        while i < len(args) and args[i].startswith("-") and args[i] != "--":
            if args[i] == "--debugger" and args[i + 1 :] and not args[i + 1].isdigit():
                return [*args[:i], "--debugger=0", *args[i + 1 :]]
            i += 2 if args[i].replace("_", "-") in valued else 1
        return args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the options of each section of settings apart."""
        sections: dict[str | None, list[tuple[str, str]]] = {name: [] for name in _HEADINGS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                key = BY_FIELD.get(param.name or "")
                sections[None if key is None or key.shared else key.section].append(record)
        for name, records in sections.items():
            with formatter.section(_HEADINGS[name]):
                formatter.write_dl(records)


class _Setting(click.Option):
    """An option of the table: its help is the text that stands under the field."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Take the help from the schema, which only ``--help`` needs to read."""
        self.help = self.help or field_docs(RunConfig)[self.name or ""].replace("``", "")
        return super().get_help_record(ctx)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all flags to the function of the command."""
    added = [*map(_option, (key for key in KEYS if key.flags)), *_own_options()]
    for option in reversed(added):
        command = option(command)
    return command


def _option(key: Key) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if key.field in _SWITCHES:
        return click.option(*key.flags, key.field, is_flag=True, cls=_Setting)
    return click.option(*key.flags, key.field, metavar=_metavar(key), cls=_Setting)


def _metavar(key: Key) -> str:
    kinds = field_types(RunConfig)[key.field]
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"[{'|'.join(choices)}]" if len(choices) < 5 else "NAME"
    if bool in kinds:
        return "[true|false]"
    return "N" if int in kinds or float in kinds else "TEXT"


def _own_options() -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    return [
        click.option("--use-fsdp", is_flag=True, help="Shard the model as the --fsdp-... flags, or the file, say."),
        click.option("--use-deepspeed", is_flag=True, help="Shard the model as DeepSpeed's flags, or the file, say."),
        click.option("--use-megatron-lm", is_flag=True, hidden=True),
        click.option("--multi-gpu", is_flag=True, help="One process for each accelerator (the default)."),
        click.option("--tpu", is_flag=True, hidden=True),
        click.option(
            "--num-cpu-threads-per-process",
            type=click.IntRange(min=1),
            metavar="N",
            help="OMP_NUM_THREADS of each process. Without it, and when that is not set: the cores that can be used, "
            "divided by the processes when there are several.",
        ),
        click.option(
            "--config-file",
            metavar="PATH",
            help="Settings in YAML, JSON or TOML, in echelon's or accelerate's names, or a json of DeepSpeed. Flags and "
            "environment win over it. Default: ./echelon.toml, or what echelon config or accelerate config wrote.",
        ),
        click.option("--strict", is_flag=True, help="Two places that give one setting different values are an error."),
        click.option("-m", "--module", is_flag=True, help="The script is a module, as in python -m."),
        click.option("--no-python", is_flag=True, help="The script is a program that is run as it is."),
        click.option("--local-rank-arg", is_flag=True, help="Append --local_rank=N, for scripts that parse it."),
        click.option("--no-local-rank", is_flag=True, help="Accepted: nothing is appended unless it is asked for."),
        click.option("--log-dir", metavar="DIR", help="Keep the output of each rank in a new folder below DIR."),
        click.option(
            "-t",
            "--tee",
            metavar="WHAT",
            help="Show output with the rank before each line: 1 stdout, 2 stderr, 3 both, or 0:3,1:2 by rank. 3 with "
            "--log-dir.",
        ),
        click.option("-r", "--redirects", metavar="WHAT", help="As --tee, but to the files of --log-dir only."),
        click.option(
            "--max-restarts",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="Start all processes again when one fails, at most N times.",
        ),
        click.option(
            "--no-warm",
            is_flag=True,
            help="Start restarted processes as new programs, not from one that has imported torch: for scripts that "
            "cannot live with fork.",
        ),
        click.option(
            "--preemption-grace",
            type=click.FloatRange(min=0.0),
            default=25.0,
            metavar="SECONDS",
            help="After SIGTERM or SIGUSR1, to the launcher or a rank, the ranks have so long to come to one step, where all "
            "save and end with exit code 143. 0: SIGTERM stops them at once. Default 25: Kubernetes and Slurm kill after 30.",
        ),
        click.option(
            "--monitor-interval",
            type=click.FloatRange(min=0.001, max=60.0),
            default=0.05,
            metavar="SECONDS",
            help="How often to look at the processes. Default 0.05.",
        ),
        click.option(
            "--debugger",
            type=click.IntRange(min=0),
            metavar="[RANK]",
            help="Give the terminal to one rank (0 without a number): breakpoint() works there, and an exception opens "
            "pdb where it was raised. While it asks nothing is a stall.",
        ),
        click.option(
            "--summary",
            is_flag=True,
            help="Say at the end where the time went, and which rank was slow. Without it: after a restart, and when a "
            "rank held up the others in a run of more than a minute.",
        ),
        click.option(
            "--oversubscribe",
            is_flag=True,
            help="Start more processes than the cores, the memory or the limits of this machine can hold.",
        ),
        click.option("--quiet", "-q", is_flag=True, help="Leave the launcher's notes out; errors are still shown."),
        click.option("--standalone", is_flag=True, help="Accepted: every run on one machine is."),
        click.option("--rdzv-endpoint", metavar="HOST[:PORT]", help="As --main-process-ip and --main-process-port."),
        click.option(
            "--rdzv-id", metavar="NAME", help="The run's name, the same on all machines: TORCHELASTIC_RUN_ID."
        ),
        click.option(
            "--rdzv-conf",
            metavar="NAME=VALUE,...",
            help="Of a run on several machines: join_timeout (600 s), last_call_timeout (30 s, for more than the least of "
            "--nnodes MIN:MAX), keep_alive_interval (2 s), keep_alive_max_attempt (5), is_host.",
        ),
        click.option("--local-addr", metavar="ADDRESS", help="This machine's, on the network of the others."),
        click.option(
            "--listen-on",
            metavar="ADDRESS",
            help="Where the others come in, when that is not the address that they are given (NAT). 0.0.0.0: everywhere.",
        ),
        click.option(
            "--insecure-network",
            is_flag=True,
            help="Run on several machines without a token: whoever reaches the port can join, and read the store.",
        ),
    ]


def typed_flags(ctx: click.Context) -> dict[str, str]:
    """Return for each parameter given on the command line the flag as the user typed it.

    Raises:
        ConfigError: two names of one flag were given, with different values.
    """
    argv: list[str] = ctx.meta[ARGV]
    head = argv[: len(argv) - 1 - len(ctx.params["args"])]
    names = {option: p.name for p in ctx.command.params for option in p.opts if p.name is not None}
    typed: dict[str, tuple[str, str]] = {}
    for i, token in enumerate(head):
        flag, _, value = token.partition("=")
        name = names.get(flag.replace("_", "-") if flag.startswith("--") else flag[:2])
        if name is None or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = value or (head[i + 1] if i + 1 < len(head) else "")
        before = typed.get(name)
        if (
            before
            and before[0].replace("_", "-") != flag.replace("_", "-")
            and flag.startswith("--")
            and before[1] != value
            and not isinstance(ctx.params[name], bool)
        ):
            raise ConfigError(
                f"{before[0]} {before[1]} and {flag} {value} are two names of one setting",
                where=f"flags {before[0]}, {flag}",
                do="give one of the two",
            )
        typed[name] = (flag, value)
    return {name: flag for name, (flag, _) in typed.items()}


def flag_layer(flags: Mapping[str, Any], typed: Mapping[str, str]) -> Layer:
    """Return the settings among the flags.

    Raises:
        ConfigError: flags that ask for what is not offered, or exclude each other.
    """
    for name, do in (
        ("tpu", TPU_ALTERNATIVE),
        ("use_megatron_lm", "use --use_fsdp or --use_deepspeed to shard the model"),
    ):
        if flags[name]:
            what = "echelon does not run on TPUs" if name == "tpu" else "Megatron-LM is not offered"
            raise ConfigError(what, where=f"flag {typed[name]}", do=do)
    values = {key.field: (flags[key.field], typed[key.field]) for key in KEYS if key.field in typed}
    if flags["num_processes"] in NUMBERS:
        del values["num_processes"]  # it becomes a number when the devices are known
    elif (number := flags["num_processes"]) is not None and not _is_positive(number):
        raise ConfigError(
            f"{number!r} is not a number of processes",
            where=f"flag {typed['num_processes']}",
            do="give an integer from 1 on, or auto, gpu or cpu",
        )
    if "num_machines" in values and (least_most := flags["num_machines"].split(":"))[1:]:
        values["num_machines"] = (least_most[-1], typed["num_machines"])  # torchrun's 1:4
    asked = [name for name in _USE if flags[name]]
    if len(asked) > 1:
        raise ConfigError("--use_fsdp and --use_deepspeed exclude each other", where="flags", do="give one of the two")
    if asked:
        values["sharded_by"] = (_USE[asked[0]], typed[asked[0]])
    elif "deepspeed_config_file" in values:
        values["sharded_by"] = (_USE["use_deepspeed"], typed["deepspeed_config_file"])
    return from_flags(values)


def _is_positive(number: str) -> bool:
    return number.strip().isdigit() and int(number) > 0
