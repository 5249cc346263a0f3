"""The flags of ``echelon launch``: one for each setting, plus those of the launcher itself."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from echelon.base.errors import ConfigError, UsageError
from echelon.cli.help.completion import complete_engines, complete_folders, complete_paths
from echelon.cli.help.launch_groups import ALL, COMMON, EXAMPLES, LAUNCHER_FIELDS, METAVARS, group_of, position_of
from echelon.cli.help.pages import spelled
from echelon.compat.unsupported import TPU_ALTERNATIVE
from echelon.config.key_table import KEYS, Key
from echelon.config.resolve import Layer
from echelon.config.schema import RunConfig, field_docs, field_types
from echelon.config.sources import from_flags

__all__ = ["ARGV", "NUMBERS", "PROCESS_FLAGS", "LaunchCommand", "flag_layer", "options", "typed_flags"]

NUMBERS = ("auto", "gpu", "cpu")
"""Values that ``--num_processes`` accepts besides a number, as in torchrun."""

ARGV = "echelon.launch.argv"
"""Key of click's ``Context.meta`` for the arguments as the user typed them."""
SHOWS_ALL = "echelon.launch.shows_all"
# Booleans without a value, as in accelerate; the others take true or false.
_SWITCHES = frozenset(
    {"cpu", "debug", "same_network", "enable_cpu_affinity", "use_parallelism_config"}
    | {"dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"}
)
_USE = MappingProxyType({"use_fsdp": "fsdp", "use_deepspeed": "deepspeed"})
PROCESS_FLAGS = LAUNCHER_FIELDS - {"cpu"}
"""Parameters that are specific to the launcher."""


class LaunchCommand(click.Command):
    """Click command that records flags as typed, so that an origin reads ``--nproc_per_node`` if that is what the user typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. For ``--localhost:0,2``, which some tutorials use, the error suggests the correct flag."""
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
        """Replace a bare ``--debugger`` with ``--debugger=0``; otherwise click would take the script as its value."""
        valued = {name for p in self.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts}
        i = 0
        while i < len(args) and args[i].startswith("-") and args[i] != "--":
            if args[i] == "--debugger" and args[i + 1 :] and not args[i + 1].isdigit():
                return [*args[:i], "--debugger=0", *args[i + 1 :]]
            i += 2 if args[i].replace("_", "-") in valued else 1
        return args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options and examples; after ``--help-all``, all options."""
        options = {_name(param): param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        shows_all = bool(ctx.meta.get(SHOWS_ALL))
        groups: dict[str, dict[str, str]] = {heading: {} for heading in ALL} if shows_all else {**COMMON}
        for name in sorted(options, key=position_of) if shows_all else ():
            groups.setdefault(group_of(name), {})[name] = ""
        rows = {heading: _rows(texts, options, ctx, with_aliases=shows_all) for heading, texts in groups.items()}
        # The same width on the left in all groups.
        left = min(30, max(len(names) for group in rows.values() for names, _ in group))
        for heading, group in filter(operator.itemgetter(1), rows.items()):
            with formatter.section(heading):
                formatter.write_dl([(names.ljust(left), text) for names, text in group])
        with formatter.section("Examples"):
            for line, text in EXAMPLES:
                formatter.write_text(text)
                formatter.write(f"    {line}\n")


def _rows(
    texts: Mapping[str, str], options: Mapping[str, click.Option], ctx: click.Context, *, with_aliases: bool
) -> list[tuple[str, str]]:
    rows = []
    for name, text in texts.items():
        record = options[name].get_help_record(ctx)
        if record is not None:  # it is not hidden
            rows.append((_names(options[name], with_aliases=with_aliases), text or record[1]))
    return rows


def _name(option: click.Parameter) -> str:
    return "help" if "--help" in option.opts else str(option.name)  # click 8.5 calls it otherwise


def _names(option: click.Option, *, with_aliases: bool) -> str:
    """Return the option's names, spelled as in the documents."""
    names = [spelled(name) for name in option.opts]
    short, long = ([name for name in names if name.startswith("--") is is_long] for is_long in (False, True))
    metavar = "" if option.is_flag or option.metavar is None else f" {option.metavar}"
    return ", ".join([*short, *(long if with_aliases else long[:1])]) + metavar


class _Plain(click.Option):
    """Option whose help does not repeat the range of its values: ``[x>=1]``."""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return nothing; the description says what there is to say."""
        return {}


class _Setting(_Plain):
    """Option for a setting; its help text is the field's docstring."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Read the help text from the schema; only ``--help`` needs it."""
        self.help = self.help or field_docs(RunConfig)[self.name or ""].replace("``", "")
        return super().get_help_record(ctx)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all flags to ``command``."""
    added = [*map(_option, (key for key in KEYS if key.flags)), *_own_options()]
    for option in reversed(added):
        command = option(command)
    return command


def _option(key: Key) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if key.field in _SWITCHES:
        return click.option(*key.flags, key.field, is_flag=True, cls=_Setting)
    return click.option(*key.flags, key.field, metavar=_metavar(key), cls=_Setting, shell_complete=_completer(key))


def _completer(key: Key) -> Callable[[click.Context, click.Parameter, str], list[Any]] | None:
    """Return what completes the values of the setting: its choices, or paths."""
    if METAVARS.get(key.field) == "PATH":
        return complete_paths
    if key.field == "engine":
        return complete_engines
    choices = [str(choice) for kind in field_types(RunConfig)[key.field] for choice in get_args(kind)]

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete if choices else None


def _metavar(key: Key) -> str:
    if key.field in METAVARS:
        return METAVARS[key.field]
    kinds = field_types(RunConfig)[key.field]
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"[{'|'.join(choices)}]" if len(choices) < 5 else "NAME"
    if bool in kinds:
        return "[true|false]"
    return "N" if int in kinds or float in kinds else "TEXT"


def _own_options() -> list[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    flags = [
        click.option(*names, is_flag=True, hidden=not help_text, help=help_text, cls=_Plain)
        for names, help_text in _OWN_FLAGS
    ]
    valued = [
        click.option(
            *names,
            metavar=metavar,
            type=kind,
            default=default,
            help=help_text,
            cls=_Plain,
            shell_complete=_PATHS.get(metavar),
        )
        for names, metavar, kind, default, help_text in _OWN_VALUES
    ]
    help_all = click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help="Show all options, grouped, and exit.",
        cls=_Plain,
    )
    return [*flags, *valued, help_all]


def _show_all(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_PATHS = MappingProxyType({"PATH": complete_paths, "DIR": complete_folders})

_OWN_FLAGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--use-fsdp",), "Shard the model as configured by the --fsdp_... flags or the config file."),
    (("--use-deepspeed",), "Shard the model as configured by the DeepSpeed flags or the config file."),
    (("--use-megatron-lm",), ""),
    (("--multi-gpu",), "Start one process per accelerator (default)."),
    (("--tpu",), ""),
    (
        ("--strict",),
        "Fail if two sources give different values for a setting, or if a Trainer subclass overrides a "
        "method that echelon never calls.",
    ),
    (("-m", "--module"), "Run SCRIPT as a module, as python -m does."),
    (("--no-python",), "Run SCRIPT as a program, without Python."),
    (("--local-rank-arg",), "Append --local_rank=N to SCRIPT's arguments."),
    (("--no-local-rank",), "Accepted for compatibility; --local_rank is appended only if --local_rank_arg is given."),
    (
        ("--no-warm",),
        "Restart processes from scratch instead of forking them from a process that has already imported torch.",
    ),
    (
        ("--summary",),
        "When the run ends, print how much time it lost and which rank was slow (default: only after a "
        "restart, or if a rank slowed down the others in a run longer than a minute).",
    ),
    (
        ("--no-record",),
        "Do not record the run (default: its settings, events, metrics and step times are written to a folder below "
        "--log_dir or ./echelon-runs).",
    ),
    (("--oversubscribe",), "Allow more processes than this machine's cores, memory or limits support."),
    (("--quiet", "-q"), "Print only errors, not the launcher's notes."),
    (("--standalone",), "Accepted for compatibility; every single-machine run is standalone."),
    (
        ("--insecure-network",),
        "Run on several machines without a token. Anyone who can reach the port can join the run.",
    ),
)
# Names, metavar, type, default, help.
_OWN_VALUES: tuple[tuple[tuple[str, ...], str, Any, Any, str], ...] = (
    (
        ("--num-cpu-threads-per-process",),
        "N",
        click.IntRange(min=1),
        None,
        "OMP_NUM_THREADS for each process (default: OMP_NUM_THREADS if set, else the number of usable cores "
        "divided by the number of processes).",
    ),
    (
        ("--config-file",),
        "PATH",
        None,
        None,
        "YAML, JSON or TOML file with echelon's or accelerate's key names, or a DeepSpeed JSON file. Flags "
        "and environment variables override it (default: ./echelon.toml if it exists, else the file written "
        "by echelon config or accelerate config).",
    ),
    (
        ("--as", "libraries"),
        "LIBRARIES",
        None,
        None,
        "Libraries that echelon replaces: 'accelerate' or 'accelerate,transformers'. SCRIPT and the libraries "
        "that it imports then use echelon's Accelerator and Trainer without any changes (default: the value "
        "of ECHELON_AS).",
    ),
    (("--log-dir",), "DIR", None, None, "Write each rank's output to a new folder below DIR."),
    (
        ("-t", "--tee"),
        "WHAT",
        None,
        None,
        "Prefix output with the rank, and also write it to the log files: 0 for none, 1 for stdout, 2 for "
        "stderr, 3 for both; 0:3,1:2 sets it per rank (default: 3 if --log_dir is given).",
    ),
    (("-r", "--redirects"), "WHAT", None, None, "Like --tee, but write the output only to the log files in --log_dir."),
    (
        ("--max-restarts",),
        "N",
        click.IntRange(min=0),
        0,
        "Maximum number of times to restart all processes after a failure (default: 0).",
    ),
    (
        ("--preemption-grace",),
        "SECONDS",
        click.FloatRange(min=0.0),
        25.0,
        "Seconds that ranks have to agree on a step after SIGTERM or SIGUSR1. They save at that step and "
        "exit with code 143. 0 stops them immediately (default: 25, because Kubernetes and Slurm send "
        "SIGKILL after 30 s).",
    ),
    (
        ("--monitor-interval",),
        "SECONDS",
        click.FloatRange(min=0.001, max=60.0),
        0.05,
        "Seconds between checks of the processes (default: 0.05).",
    ),
    (
        ("--debugger",),
        "[RANK]",
        click.IntRange(min=0),
        None,
        "Attach the terminal to RANK (default: 0), so that breakpoint() works there. An exception opens pdb "
        "at the line that raised it. Stall detection pauses while the debugger waits for input.",
    ),
    (
        ("--rdzv-endpoint",),
        "HOST[:PORT]",
        None,
        None,
        "Address of the rendezvous host; equivalent to --main_process_ip and --main_process_port.",
    ),
    (("--rdzv-id",), "NAME", None, None, "Name of the run (TORCHELASTIC_RUN_ID); must be the same on all machines."),
    (
        ("--rdzv-conf",),
        "NAME=VALUE,...",
        None,
        None,
        "Rendezvous settings: join_timeout (default: 600 s), last_call_timeout (default: 30 s; how long to "
        "wait for more machines after the minimum of --nnodes MIN:MAX has joined), keep_alive_interval "
        "(default: 2 s), keep_alive_max_attempt (default: 5), is_host.",
    ),
    (
        ("--local-addr",),
        "ADDRESS",
        None,
        None,
        "This machine's address on the network that it shares with the other machines.",
    ),
    (
        ("--listen-on",),
        "ADDRESS",
        None,
        None,
        "Address on which the rendezvous host listens, if it differs from the address that other machines "
        "use to reach it (NAT). 0.0.0.0 means all interfaces.",
    ),
)


def typed_flags(ctx: click.Context) -> dict[str, str]:
    """Return a mapping from each parameter given on the command line to the flag as the user typed it.

    Raises:
        ConfigError: two names of the same flag were given different values.
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
                f"{before[0]} {before[1]} and {flag} {value} set the same setting to different values",
                where=f"flags {before[0]}, {flag}",
                do="remove one of them",
            )
        typed[name] = (flag, value)
    return {name: flag for name, (flag, _) in typed.items()}


def flag_layer(flags: Mapping[str, Any], typed: Mapping[str, str]) -> Layer:
    """Return a layer with the settings given by flags.

    Raises:
        ConfigError: a flag is not supported, or two flags are mutually exclusive.
    """
    for name, do in (
        ("tpu", TPU_ALTERNATIVE),
        ("use_megatron_lm", "pass --use_fsdp or --use_deepspeed to shard the model"),
    ):
        if flags[name]:
            what = "echelon does not run on TPUs" if name == "tpu" else "Megatron-LM is not supported"
            raise ConfigError(what, where=f"flag {typed[name]}", do=do)
    values = {key.field: (flags[key.field], typed[key.field]) for key in KEYS if key.field in typed}
    if flags["num_processes"] in NUMBERS:
        del values["num_processes"]  # resolved when the devices are known
    elif (number := flags["num_processes"]) is not None and not _is_positive(number):
        raise ConfigError(
            f"{number!r} is not a valid number of processes",
            where=f"flag {typed['num_processes']}",
            do="pass a positive integer, auto, gpu or cpu",
        )
    if "num_machines" in values and (min_max := flags["num_machines"].split(":"))[1:]:
        values["num_machines"] = (min_max[-1], typed["num_machines"])  # torchrun's 1:4
    chosen = [name for name in _USE if flags[name]]
    if len(chosen) > 1:
        raise ConfigError(
            "--use_fsdp and --use_deepspeed are mutually exclusive", where="flags", do="remove one of them"
        )
    if chosen:
        values["sharded_by"] = (_USE[chosen[0]], typed[chosen[0]])
    elif "deepspeed_config_file" in values:
        values["sharded_by"] = (_USE["use_deepspeed"], typed["deepspeed_config_file"])
    return from_flags(values)


def _is_positive(number: str) -> bool:
    return number.strip().isdigit() and int(number) > 0
