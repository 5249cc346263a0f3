"""The flags of ``echelon launch``: one for each setting, plus those of the launcher itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource

from echelon.base.errors import ConfigError, UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.cli.help.completion import complete_engines, complete_folders, complete_paths
from echelon.cli.help.pages import option_name, spelled, write_groups
from echelon.compat.unsupported import TPU_ALTERNATIVE
from echelon.config.key_table import BY_FIELD, KEYS
from echelon.config.resolve import Layer
from echelon.config.schema import RunConfig, field_docs, field_types
from echelon.config.sources import from_flags

NUMBERS = ("auto", "gpu", "cpu")
"""Values that ``--num_processes`` accepts besides a number, as in torchrun."""

ARGV = "echelon.launch.argv"
"""Key of click's ``Context.meta`` for the arguments as the user typed them."""
SHOWS_ALL = "echelon.launch.shows_all"
# Booleans without a value, as in accelerate; the others take true or false.
_SWITCHES = frozenset(
    {"cpu", "debug", "plan", "same_network", "enable_cpu_affinity", "use_parallelism_config"}
    | {"dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"}
)
_USE = MappingProxyType({"use_fsdp": "fsdp", "use_deepspeed": "deepspeed"})
_PATHS = MappingProxyType({"FILE": complete_paths, "DIR": complete_folders})


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


def _settings(fields: str) -> Iterator[click.Option]:
    """Yield the option of each setting in ``fields``; ``gpu_ids=IDS`` names its value, where the type does not tell."""
    for name, _equals, metavar in (entry.partition("=") for entry in fields.split()):
        flags = [*BY_FIELD[name].flags, name]
        if name in _SWITCHES:
            yield _Setting(flags, is_flag=True)
        else:
            yield _Setting(flags, metavar=metavar or _metavar(name), shell_complete=_completer(name, metavar))


def _metavar(field: str) -> str:
    kinds = field_types(RunConfig)[field]
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"[{'|'.join(choices)}]" if len(choices) < 5 else "NAME"
    if bool in kinds:
        return "[true|false]"
    return "N" if int in kinds or float in kinds else "TEXT"


def _completer(field: str, metavar: str) -> Any:
    """Return what completes the values of the setting: its choices, or paths."""
    if metavar == "FILE":
        return complete_paths
    if field == "engine":
        return complete_engines
    choices = [str(choice) for kind in field_types(RunConfig)[field] for choice in get_args(kind)]

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete if choices else None


def _switch(*names: str, help: str = "") -> click.Option:
    """Return a flag of the launcher without a value; without ``help`` it is not shown."""
    return _Plain(names, is_flag=True, hidden=not help, help=help)


def _valued(*names: str, metavar: str, help: str, type: Any = None, default: Any = None) -> click.Option:
    return _Plain(names, metavar=metavar, help=help, type=type, default=default, shell_complete=_PATHS.get(metavar))


def _show_all(ctx: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


COMMON = MappingProxyType(
    {
        "This machine": {
            "num_processes": "Total number of processes (default: one per accelerator).",
            "gpu_ids": "Accelerators to use, such as 0,2 (default: all).",
            "cpu": "Use the CPU even if accelerators are available.",
        },
        "Several machines": {
            "num_machines": "Number of machines, or MIN:MAX for an elastic run (default: 1).",
            "machine_rank": "Rank of this machine (default: any free rank).",
            "main_process_ip": "Address at which the other machines reach the machine with rank 0.",
        },
        "Training": {
            "mixed_precision": "Autocast dtype for the forward pass (default: no).",
            "parity": "Make the updates independent of the number of processes (default: off, as in Accelerate).",
            "engine": "How to parallelize: ddp, zero1, fsdp2 or deepspeed (default: follows from the other settings).",
        },
        "Run": {
            "config_file": "File with settings: echelon's, accelerate's or DeepSpeed's (default: ./echelon.toml, else the "
            "file written by echelon config).",
            "log_dir": "Write each rank's output to a new folder below DIR.",
            "max_restarts": "Restart all processes after a failure, at most N times (default: 0).",
        },
        "Help": {"help": "", "help_all": ""},
    }
)
"""Heading -> the parameters that ``--help`` shows, each with a line of text (empty: the option's own)."""

EXAMPLES = (
    ("echelon launch --num_processes 4 train.py --lr 0.1", "Four processes on this machine; --lr goes to the script:"),
    ("echelon launch --cpu --num_processes 2 train.py", "Try the same on a machine without a GPU:"),
    (
        "echelon launch --num_machines 2 --main_process_ip HOST train.py",
        "Two machines, the same command on each, with the token from echelon token in ECHELON_TOKEN:",
    ),
)
"""Command line and what it does."""

GROUPS: Mapping[str, Sequence[click.Option]] = MappingProxyType(
    {
        "Processes of this machine": (
            *_settings("num_processes gpu_ids=IDS cpu enable_cpu_affinity"),
            _valued(
                "--num-cpu-threads-per-process",
                metavar="N",
                help="OMP_NUM_THREADS for each process (default: OMP_NUM_THREADS if set, else the number of usable cores "
                "divided by the number of processes).",
                type=click.IntRange(min=1),
            ),
            _switch(
                "--oversubscribe", help="Allow more processes than this machine's cores, memory or limits support."
            ),
        ),
        "Several machines": (
            *_settings("num_machines machine_rank main_process_ip=ADDRESS main_process_port"),
            _valued(
                "--rdzv-endpoint",
                metavar="HOST[:PORT]",
                help="Address of the rendezvous host; equivalent to --main_process_ip and --main_process_port.",
            ),
            _valued(
                "--rdzv-id",
                metavar="NAME",
                help="Name of the run (TORCHELASTIC_RUN_ID); must be the same on all machines.",
            ),
            _valued(
                "--rdzv-conf",
                metavar="NAME=VALUE,...",
                help="Rendezvous settings: join_timeout (default: 600 s), last_call_timeout (default: 30 s; how long to "
                "wait for more machines after the minimum of --nnodes MIN:MAX has joined), keep_alive_interval "
                "(default: 2 s), keep_alive_max_attempt (default: 5), is_host.",
            ),
            _valued(
                "--local-addr",
                metavar="ADDRESS",
                help="This machine's address on the network that it shares with the other machines.",
            ),
            _valued(
                "--listen-on",
                metavar="ADDRESS",
                help="Address on which the rendezvous host listens, if it differs from the address that other machines use"
                " to reach it (NAT). 0.0.0.0 means all interfaces.",
            ),
            _switch(
                "--insecure-network",
                help="Run on several machines without a token. Anyone who can reach the port can join the run.",
            ),
        ),
        "Machines of a hostfile, started through ssh": (
            *_settings(
                "deepspeed_hostfile=FILE deepspeed_inclusion_filter=MACHINES deepspeed_exclusion_filter=MACHINES"
                " deepspeed_multinode_launcher=NAME"
            ),
        ),
        "Training": (
            *_settings(
                "engine=NAME mixed_precision master_weights activation_checkpointing "
                "activation_checkpointing_blocks=CLASSES gradient_accumulation_steps parity max_micro_batch_size "
                "canonical_shards speed verify_every verify_action spike_guard spike_factor plan gpu_memory=SIZE "
                "allow_changed_data"
            ),
        ),
        "Sharding with FSDP's settings": (
            _switch("--use-fsdp", help="Shard the model as configured by the --fsdp_... flags or the config file."),
            *_settings(
                "fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward=[true|false|N] "
                "fsdp_offload_params fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap=CLASSES "
                "fsdp_min_num_params fsdp_ignored_modules=REGEX fsdp_state_dict_type "
                "fsdp_cpu_ram_efficient_loading fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"
            ),
        ),
        "Axes of the device mesh": (
            *_settings(
                "use_parallelism_config parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
                "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size "
                "parallelism_config_pp_size parallelism_config_ep_size parallelism_config_cp_comm_strategy=NAME"
            ),
        ),
        "DeepSpeed": (
            _switch("--use-deepspeed", help="Shard the model as configured by the DeepSpeed flags or the config file."),
            *_settings(
                "deepspeed_config_file=FILE zero_stage offload_optimizer_device offload_param_device "
                "offload_optimizer_nvme_path=DIR offload_param_nvme_path=DIR gradient_clipping zero3_init_flag "
                "zero3_save_16bit_model deepspeed_moe_layer_cls_names=CLASSES"
            ),
        ),
        "torch.compile": (
            *_settings(
                "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation"
            ),
        ),
        "fp8": (*_settings("fp8_backend fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim"),),
        "Failures, stalls and preemption": (
            _valued(
                "--max-restarts",
                metavar="N",
                help="Maximum number of times to restart all processes after a failure (default: 0).",
                type=click.IntRange(min=0),
                default=0,
            ),
            _switch(
                "--no-warm",
                help="Restart processes from scratch instead of forking them from a process that has already imported "
                "torch.",
            ),
            *_settings("stall_timeout=SECONDS slow_timeout=SECONDS on_stall"),
            _valued(
                "--preemption-grace",
                metavar="SECONDS",
                help="Seconds that ranks have to agree on a step after SIGTERM or SIGUSR1. They save at that step and exit"
                " with code 143. 0 stops them immediately (default: 25, because Kubernetes and Slurm send SIGKILL "
                "after 30 s).",
                type=click.FloatRange(min=0.0),
                default=25.0,
            ),
            _valued(
                "--monitor-interval",
                metavar="SECONDS",
                help="Seconds between checks of the processes (default: 0.05).",
                type=click.FloatRange(min=0.001, max=60.0),
                default=0.05,
            ),
        ),
        "Output and diagnosis": (
            _valued("--log-dir", metavar="DIR", help="Write each rank's output to a new folder below DIR."),
            _valued(
                "--name",
                metavar="TEXT",
                help="Name of the run in its folder's name, in echelon runs and in the report (default: the script's).",
            ),
            _Plain(
                ["--tag"],
                metavar="TEXT",
                multiple=True,
                help="Word that echelon runs ls shows, and --tag there selects; repeatable.",
            ),
            _switch(
                "--no-record",
                help="Do not record the run (default: its settings, events, metrics and step times are written to a folder"
                " below --log_dir or ./echelon-runs).",
            ),
            _valued(
                "-t",
                "--tee",
                metavar="WHAT",
                help="Prefix output with the rank, and also write it to the log files: 0 for none, 1 for stdout, 2 for "
                "stderr, 3 for both; 0:3,1:2 sets it per rank (default: 3 if --log_dir is given).",
            ),
            _valued(
                "-r",
                "--redirects",
                metavar="WHAT",
                help="Like --tee, but write the output only to the log files in --log_dir.",
            ),
            _switch("--quiet", "-q", help="Print only errors, not the launcher's notes."),
            _switch(
                "--summary",
                help="When the run ends, print how much time it lost and which rank was slow (default: only after a "
                "restart, or if a rank slowed down the others in a run longer than a minute).",
            ),
            *_settings("debug"),
            _valued(
                "--debugger",
                metavar="[RANK]",
                help="Attach the terminal to RANK (default: 0), so that breakpoint() works there. An exception opens pdb "
                "at the line that raised it. Stall detection pauses while the debugger waits for input.",
                type=click.IntRange(min=0),
            ),
        ),
        "Configuration and script": (
            _valued(
                "--config-file",
                metavar="FILE",
                help="YAML, JSON or TOML file with echelon's or accelerate's key names, or a DeepSpeed JSON file. Flags "
                "and environment variables override it (default: ./echelon.toml if it exists, else the file written "
                "by echelon config or accelerate config).",
            ),
            _switch(
                "--strict",
                help="Fail if two sources give different values for a setting, or if a Trainer subclass overrides a method"
                " that echelon never calls.",
            ),
            _valued(
                "--as",
                "libraries",
                metavar="LIBRARIES",
                help="Libraries that echelon replaces: 'accelerate' or 'accelerate,transformers'. SCRIPT and the libraries"
                " that it imports then use echelon's Accelerator and Trainer without any changes (default: the value "
                "of ECHELON_AS).",
            ),
            _switch("-m", "--module", help="Run SCRIPT as a module, as python -m does."),
            _switch("--no-python", help="Run SCRIPT as a program, without Python."),
            _switch("--local-rank-arg", help="Append --local_rank=N to SCRIPT's arguments."),
        ),
        "Compatibility: accepted, but without effect in echelon or not supported yet": (
            _switch("--multi-gpu", help="Start one process per accelerator (default)."),
            _switch("--standalone", help="Accepted for compatibility; every single-machine run is standalone."),
            _switch(
                "--no-local-rank",
                help="Accepted for compatibility; --local_rank is appended only if --local_rank_arg is given.",
            ),
            *_settings(
                "rdzv_backend=NAME same_network fsdp_backward_prefetch fsdp_forward_prefetch "
                "fsdp_use_orig_params fsdp_sync_module_states "
                "parallelism_config_cp_backend=NAME parallelism_config_sp_backend=NAME "
                "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
                "parallelism_config_sp_attn_implementation=NAME"
            ),
        ),
        "Help": (
            _Plain(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show all options, grouped, and exit.",
            ),
        ),
        "": (_switch("--use-megatron-lm"), _switch("--tpu")),
    }
)
"""Heading -> options, as ``--help-all`` shows them; those without a heading are hidden."""

OPTIONS = [option for options in GROUPS.values() for option in options]
PROCESS_FLAGS = frozenset(
    str(option.name)
    for heading in (
        "Processes of this machine",
        "Several machines",
        "Machines of a hostfile, started through ssh",
        "Failures, stalls and preemption",
    )
    for option in GROUPS[heading]
) - {"cpu"} | {"multi_gpu", "standalone", "rdzv_backend", "same_network"}
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
        i = 0
        for entry in flag_entries(args, self.params):
            if entry[0] == "--debugger" and entry[1:] and not entry[1].isdigit():
                return [*args[:i], "--debugger=0", *args[i + 1 :]]
            i += len(entry)
        return args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the common options and examples; after ``--help-all``, all options."""
        params = {option_name(param): param for param in self.get_params(ctx) if isinstance(param, click.Option)}
        shows_all = bool(ctx.meta.get(SHOWS_ALL))
        groups: Mapping[str, Mapping[str, str]] = COMMON
        if shows_all:
            groups = {heading: {str(one.name): "" for one in options} for heading, options in GROUPS.items() if heading}
            groups["Help"] = {"help": "", **groups["Help"]}
        rows = {
            heading: [option_row(params[name], text, ctx, with_aliases=shows_all) for name, text in texts.items()]
            for heading, texts in groups.items()
        }
        write_groups(formatter, rows, EXAMPLES)


def option_row(option: click.Option, text: str, ctx: click.Context, *, with_aliases: bool = False) -> tuple[str, str]:
    """Return the option's names, spelled as in the documents, and its description (default: its own)."""
    record = option.get_help_record(ctx)
    assert record is not None, option
    names = [spelled(name) for name in option.opts]
    short, long = ([name for name in names if name.startswith("--") is is_long] for is_long in (False, True))
    metavar = "" if option.is_flag or option.metavar is None else f" {option.metavar}"
    return ", ".join([*short, *(long if with_aliases else long[:1])]) + metavar, text or record[1]


def flag_entries(args: Sequence[str], params: Sequence[click.Parameter]) -> Iterator[list[str]]:
    """Yield each flag before the first argument in ``args``, with its value if that is a word of its own."""
    options = {name: option for option in params if isinstance(option, click.Option) for name in option.opts}
    i = 0
    while i < len(args) and args[i].startswith("-"):
        name, has_value, _ = args[i].partition("=")
        is_long = name.startswith("--")
        option = options.get(name.replace("_", "-") if is_long else name[:2])
        is_pair = option is not None and not option.is_flag and not has_value and (is_long or len(name) == 2)
        yield list(args[i : i + 1 + is_pair])
        i += 1 + is_pair


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
        flag, _equals, value = token.partition("=")
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
                _(
                    "{first} and {second} set the same setting to different values",
                    first=" ".join(before),
                    second=f"{flag} {value}",
                ),
                where=_("flags {names}", names=f"{before[0]}, {flag}"),
                do=_("remove one of them"),
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
        ("use_megatron_lm", N_("pass --use_fsdp or --use_deepspeed to shard the model")),
    ):
        if flags[name]:
            what = _("echelon does not run on TPUs") if name == "tpu" else _("Megatron-LM is not supported")
            raise ConfigError(what, where=_("flag {name}", name=typed[name]), do=_(do))
    values = {key.field: (flags[key.field], typed[key.field]) for key in KEYS if key.field in typed}
    if flags["num_processes"] in NUMBERS:
        del values["num_processes"]  # resolved when the devices are known
    elif (number := flags["num_processes"]) is not None and not _is_positive(number):
        raise ConfigError(
            _("{number!r} is not a valid number of processes", number=number),
            where=_("flag {name}", name=typed["num_processes"]),
            do=_("pass a positive integer, auto, gpu or cpu"),
        )
    if "num_machines" in values and (min_max := flags["num_machines"].split(":"))[1:]:
        values["num_machines"] = (min_max[-1], typed["num_machines"])  # torchrun's 1:4
    chosen = [name for name in _USE if flags[name]]
    if len(chosen) > 1:
        raise ConfigError(
            _("--use_fsdp and --use_deepspeed are mutually exclusive"), where="flags", do=_("remove one of them")
        )
    if chosen:
        values["sharded_by"] = (_USE[chosen[0]], typed[chosen[0]])
    elif "deepspeed_config_file" in values:
        values["sharded_by"] = (_USE["use_deepspeed"], typed["deepspeed_config_file"])
    return from_flags(values)


def _is_positive(number: str) -> bool:
    return number.strip().isdigit() and int(number) > 0
