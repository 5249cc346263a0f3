"""``echelon estimate-memory``: the sizes of a model's weights in several dtypes, with accelerate's options and table."""

from __future__ import annotations

import click

from echelon.base.errors import UsageError
from echelon.base.messages.terminal import align_columns
from echelon.base.messages.translation import gettext as _
from echelon.cli.help.completion import complete_paths
from echelon.compat.machine import convert_bytes

_DTYPES = ("float32", "float16", "int8", "int4")
_BITS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}


@click.command("estimate-memory")
@click.argument("words", metavar="MODEL", nargs=-1, required=True, shell_complete=complete_paths)
@click.option(
    "--library-name",
    metavar="[transformers|timm]",
    type=click.Choice(["transformers", "timm"]),
    help="Library of the model (default: transformers).",
)
@click.option(
    "--dtypes",
    metavar="DTYPE...",
    type=click.Choice(_DTYPES),
    multiple=True,
    help="Dtypes to show: float32, float16, int8, int4 (default: all).",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the model's own code, if it is not part of the library.")
def command(words: tuple[str, ...], library_name: str | None, dtypes: tuple[str, ...], trust_remote_code: bool) -> None:
    """Print how much memory the weights of MODEL take in each dtype, and a rule of thumb for training with Adam.

    MODEL is a config.json, its folder, or a name on the hub. This is the table of accelerate estimate-memory; it knows neither
    activations nor sharding. echelon plan computes the peak of a training step.
    """
    # As with accelerate, several dtypes may follow --dtypes.
    chosen = [*dtypes, *(word for word in words if word in _DTYPES)] or list(_DTYPES)
    models = [word for word in words if word not in _DTYPES]
    if len(models) != 1:
        raise UsageError(
            _("echelon estimate-memory takes one model, got {words}", words=", ".join(models) or _("none")),
            do=_("run echelon estimate-memory MODEL --dtypes float16 int4"),
        )
    from echelon.plan.empty_model import largest_layer_and_total, weights_only  # noqa: PLC0415 - imports torch

    largest, total = largest_layer_and_total(
        weights_only(models[0], library=library_name or "transformers", trust_remote_code=trust_remote_code)
    )
    rows = [(_("dtype"), _("largest layer"), _("total size"), _("training using Adam"))]
    for name in dict.fromkeys(chosen):
        # accelerate's rule: weights, gradients and two states of Adam in float32, or two states with mixed precision.
        training = {"float32": 4 * total, "float16": 2 * total}.get(name)
        rows.append(
            (
                name,
                convert_bytes(largest * _BITS[name] / 32),
                convert_bytes(total * _BITS[name] / 32),
                "N/A" if training is None else convert_bytes(training),
            )
        )
    click.echo(_("memory for loading {model}:", model=models[0]))
    for line in align_columns(rows):
        click.echo(line)
    click.echo(
        _("echelon plan --model {model} computes the peak of a training step, with activations", model=models[0])
    )
