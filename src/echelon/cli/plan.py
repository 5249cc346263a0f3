"""``echelon plan``: says before a run whether it fits into memory, how to run it, and what to change if it does not fit."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.cli.help.completion import complete_engines, complete_paths
from echelon.config.schema import ActivationMode
from echelon.launch.script import Script, check
from echelon.plan.devices import build_cluster
from echelon.plan.facts import Cluster, ParallelLayout, StepSettings
from echelon.plan.sizes import parse_size
from echelon.plan.verdict import PlanVerdict, Traces, search
from echelon.plan.verdict_text import explain, to_hyperparameters, to_json, to_lines, verdict_text
from echelon.status.strict_json import dumps

if TYPE_CHECKING:  # it imports torch
    from echelon.plan.sources import PlannedStep

_MODEL_COMMAND = "train.py"  # in command lines, for a model without a script
_OF_MODELS = ("seq", "lora", "load", "optimizer")
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")


def _mesh(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict[str, int]:
    found = {}
    for part in value.split(",") if value else ():
        axis, _equals, size = part.partition("=")
        if axis not in _AXES or not size.isdigit() or int(size) < 1:
            raise click.BadParameter(
                _("{part!r} is not AXIS=N, with an axis of {axes}", part=part, axes=", ".join(_AXES))
            )
        found[axis] = int(size)
    return found


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(_("{value!r} is not a size such as 80GB", value=value)) from error


@click.command("plan", context_settings={"allow_interspersed_args": False})
@click.argument("script", metavar="[SCRIPT]", required=False, shell_complete=complete_paths)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=complete_paths)
@click.option(
    "--gpus", metavar="N", type=click.IntRange(min=1), default=1, help="Devices of each machine (default: 1)."
)
@click.option("--nodes", metavar="N", type=click.IntRange(min=1), default=1, help="Number of machines (default: 1).")
@click.option("--device", metavar="NAME", help="Device, such as H100 or T4, which also gives its memory.")
@click.option(
    "--gpu-memory",
    metavar="SIZE",
    callback=_size,
    help="Memory of a device, such as 80GB (default: of this machine's first accelerator).",
)
@click.option(
    "--interconnect",
    metavar="LINK[,NETWORK]",
    help="Links between the devices of a machine, and between machines, such as nvlink,400Gb.",
)
@click.option("--host-memory", metavar="SIZE", callback=_size, help="Memory of a machine (default: not limited).")
@click.option(
    "--model",
    metavar="PATH",
    shell_complete=complete_paths,
    help="Instead of a script, a model of transformers: a config.json, its folder, or a name on the hub.",
)
@click.option(
    "--seq",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --model: tokens of a sample (default: 1024).",
)
@click.option(
    "--batch", metavar="N", type=click.IntRange(min=1), help="Micro-batch of a device (default: the script's, or 1)."
)
@click.option("--lora", metavar="r=N", help="With --model: train low-rank adapters of all linear layers, such as r=16.")
@click.option(
    "--load",
    metavar="[4bit|bf16|fp16|fp32]",
    type=click.Choice(["4bit", "bf16", "fp16", "fp32"]),
    help="With --model: how the weights are loaded (default: as the configuration says).",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    type=click.Choice(["adamw", "adamw8bit", "sgd", "adafactor"]),
    help="With --model: optimizer; adamw8bit is that of bitsandbytes (default: adamw).",
)
@click.option(
    "--engine",
    metavar="NAME",
    shell_complete=complete_engines,
    help="Engine to ask about (default: the script's, or as echelon launch chooses).",
)
@click.option("--mesh", metavar="AXIS=N,...", callback=_mesh, help="Mesh to ask about, such as dp_shard=4,tp=2.")
@click.option(
    "--zero-stage",
    metavar="N",
    type=click.IntRange(1, 3),
    help="Stage of fsdp2 (2 or 3) or deepspeed (default: the script's, or 3).",
)
@click.option("--cpu-offload", is_flag=True, help="Ask about states on the CPU, with fsdp2 or deepspeed.")
@click.option(
    "--mixed-precision",
    metavar="[no|fp16|bf16]",
    type=click.Choice(["no", "fp16", "bf16"]),
    help="Autocast dtype (default: the script's, or bf16, or fp16 on devices that do not compute bf16).",
)
@click.option(
    "--activation-checkpointing",
    metavar="MODE",
    type=click.Choice(get_args(ActivationMode)),
    help="Activations to recompute: none, selective, full or offload.",
)
@click.option(
    "--gradient-accumulation-steps", metavar="N", type=click.IntRange(min=1), help="Micro-batches of an optimizer step."
)
@click.option(
    "--explain", metavar="WHAT", help="Show the formula behind a number of the plan, or behind all of them (all)."
)
@click.option("--json", "json", is_flag=True, help="Print JSON.")
@click.option(
    "-o", "--output", metavar="FILE", shell_complete=complete_paths, help="Also write an HTML page with plots."
)
@click.option("--record", hidden=True)  # of echelon launch --plan: a file for what the run's record keeps
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Say whether SCRIPT, or a model alone, can be trained on given devices, and how, without any device.

    Runs SCRIPT up to the end of its first training step, or a step of the model, with tensors that have shapes but no data, and
    computes memory, traffic and time for each way to distribute the step. Nothing is trained, and no memory for weights is
    allocated. All arguments after SCRIPT are passed to the script.

    Exits with 0 if the asked layout fits, and with 1 if it does not.
    """
    asked = _Asked(**options)
    asked.check_source()
    own = {name for param in ctx.command.params for name in param.opts if name.startswith("--")}
    for argument in asked.args:
        name = argument.partition("=")[0]
        if name.replace("_", "-") in own:
            text = _("{option} after the script goes to the script; for echelon plan, write it before", option=name)
            click.echo(text, err=True)
    cluster = asked.cluster()
    from echelon.plan.layouts import plan_layout  # noqa: PLC0415 - --help does not need it

    step = asked.step_of_model(cluster) if asked.script is None else asked.step_of_script(cluster)
    command = _MODEL_COMMAND if asked.script is None else shlex.join([asked.script, *asked.args])
    traces = Traces(step.source)
    verdict = search(traces, asked.layout(step), cluster, plan_layout, variants=step.variants)
    if asked.output:
        _write_page(Path(asked.output), step.title, verdict, traces, command)
    if asked.record:
        Path(asked.record).write_text(dumps(to_hyperparameters(verdict.asked)), encoding="utf-8")
    if asked.json:
        click.echo(dumps(to_json(verdict)))
    elif asked.explain:
        for text in explain(asked.explain, (verdict.best or verdict.asked).plan):
            click.echo(text)
    else:
        for text in to_lines(step.title, verdict, script=command):
            is_answer = text == verdict_text(verdict.asked, cluster)
            click.echo(click.style(text, fg="green" if verdict.asked.fits else "red", bold=True) if is_answer else text)
    ctx.exit(0 if verdict.asked.fits else 1)


def _write_page(path: Path, title: str, verdict: PlanVerdict, traces: Traces, command: str) -> None:
    from echelon.report.page import render_plan_page  # noqa: PLC0415 - only for --output
    from echelon.report.plan_page import plan_page_data  # noqa: PLC0415

    page = render_plan_page(plan_page_data(title, verdict, traces, script=command))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            _("cannot write {path}: {strerror}", path=path, strerror=error.strerror),
            where="flag --output",
            do=_("pass a file that you can write: -o FILE"),
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options."""

    gpus: int
    nodes: int
    device: str | None
    gpu_memory: int | None
    interconnect: str | None
    host_memory: int | None
    script: str | None
    args: tuple[str, ...]
    model: str | None
    seq: int | None
    batch: int | None
    lora: str | None
    load: str | None
    optimizer: str | None
    engine: str | None
    mesh: Mapping[str, int]
    zero_stage: int | None
    cpu_offload: bool
    mixed_precision: str | None
    activation_checkpointing: str | None
    gradient_accumulation_steps: int | None
    explain: str | None
    json: bool
    output: str | None
    record: str | None

    def check_source(self) -> None:
        """Raise an error unless there is either a script that can start, or a model.

        Raises:
            ConfigError: the script does not exist, or is not Python source.
            UsageError: there is none or both, or an option of models is given with a script.
        """
        if (self.script is None) == (self.model is None):
            raise UsageError(
                _("there is neither a script nor a model")
                if self.script is None
                else _("there are a script and a model"),
                where="--model",
                do=_("pass one of them: echelon plan --gpus 8 train.py, or echelon plan --gpus 8 --model config.json"),
            )
        if self.script is None:
            return
        given = [name for name in _OF_MODELS if getattr(self, name) is not None]
        if given:
            raise UsageError(
                _("--{option} is for --model; the script chooses this itself", option=given[0]),
                where=f"--{given[0]}",
                do=_("remove it, and set it in the script or its arguments"),
            )
        check(Script(kind="script", target=self.script, args=self.args))

    def step_of_model(self, cluster: Cluster) -> PlannedStep:
        """Return the step of the model."""
        from echelon.plan.sources import ModelChoice, model_step, parse_lora, usual_precision  # noqa: PLC0415 - torch

        assert self.model is not None
        choice = ModelChoice(
            path=self.model,
            sequence=self.seq or 1024,
            lora=parse_lora(self.lora),
            load=self.load or "",
            optimizer=self.optimizer or "adamw",
        )
        precision = self.mixed_precision or usual_precision(cluster.device)
        return model_step(choice, StepSettings(micro_batch=self.batch or 1, mixed_precision=precision))

    def step_of_script(self, cluster: Cluster) -> PlannedStep:
        """Run the script up to the end of its first step, without memory, and return this step.

        Raises:
            UsageError: the script fails without weights, or has no step that can be repeated.
        """
        from echelon.accelerator.current import living_accelerators  # noqa: PLC0415 - torch
        from echelon.accelerator.step_plan import step_choices  # noqa: PLC0415
        from echelon.plan.capture import capture_script  # noqa: PLC0415
        from echelon.plan.sources import StepChoices, captured_step  # noqa: PLC0415

        world = cluster.gpus_per_node * cluster.nodes

        def read_choices() -> StepChoices:
            accelerator = next(living_accelerators(), None)
            if accelerator is None:  # a plain loop of torch
                return StepChoices()
            return step_choices(accelerator.session, world_size=world, local_world_size=cluster.gpus_per_node)

        assert self.script is not None
        # What the script prints is not the answer, which may be JSON.
        with redirect_stdout(sys.stderr):
            capture = capture_script(self.script, self.args, read_settings=read_choices)
        step = captured_step(
            capture, capture.chosen, world=world, micro_batch=self.batch, name=shlex.join([self.script, *self.args])
        )
        if self.mixed_precision is not None:
            step = replace(step, settings=replace(step.settings, mixed_precision=self.mixed_precision))
        return step

    def cluster(self) -> Cluster:
        """Return the machines; the memory of a known device is what CUDA reports for it.

        Raises:
            UsageError: the device or a link is unknown, or the memory is.
        """
        return build_cluster(
            gpus=self.gpus,
            nodes=self.nodes,
            device=self.device,
            gpu_memory=self.gpu_memory,
            interconnect=self.interconnect,
            host_memory=self.host_memory,
            where="--gpu_memory",
            example=_("pass --device H100 or another name, or --gpu_memory 80GB"),
        )

    def layout(self, step: PlannedStep) -> ParallelLayout:
        """Return the layout to ask about."""
        world = self.gpus * self.nodes
        if self.activation_checkpointing is not None:
            settings = replace(step.settings, activation_checkpointing=self.activation_checkpointing)
            step = replace(step, settings=settings)
        step = replace(step, accumulation=self.gradient_accumulation_steps or step.accumulation)
        return step.layout(
            world, engine=self.engine, sizes=self.mesh, stage=self.zero_stage, cpu_offload=self.cpu_offload
        )
