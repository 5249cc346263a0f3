"""``echelon merge-weights``: writes a checkpoint's weights to one file, with accelerate's options."""

from __future__ import annotations

import click

from echelon.base.messages.translation import gettext as _
from echelon.cli.checkpoint import require_folder
from echelon.cli.help.completion import complete_folders


@click.command("merge-weights")
@click.argument("checkpoint_directory", metavar="PATH", shell_complete=complete_folders)
@click.argument("output_path", metavar="OUT", shell_complete=complete_folders)
@click.option("--unsafe_serialization", is_flag=True, help="Write pytorch_model.bin instead of model.safetensors.")
@click.option(
    "--remove_checkpoint_dir", is_flag=True, help="Delete the entire checkpoint afterwards, including optimizer states."
)
def command(
    checkpoint_directory: str, output_path: str, unsafe_serialization: bool, remove_checkpoint_dir: bool
) -> None:
    """Write the weights of checkpoint PATH to one file in the folder OUT, with the options of accelerate merge-weights.

    echelon checkpoint merge does the same with more options.
    """
    require_folder(checkpoint_directory)
    from echelon.checkpoint.formats.merged_weights import merge_fsdp_weights  # noqa: PLC0415 - imports torch

    merge_fsdp_weights(checkpoint_directory, output_path, not unsafe_serialization, remove_checkpoint_dir)
    name = "pytorch_model.bin" if unsafe_serialization else "model.safetensors"
    deleted = _(", deleted {folder}", folder=checkpoint_directory) if remove_checkpoint_dir else ""
    click.echo(_("wrote {path}", path=f"{output_path}/{name}") + deleted)
