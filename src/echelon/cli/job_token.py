"""``echelon token``: creates the secret that the machines of a run share."""

from __future__ import annotations

from pathlib import Path

import click

from echelon.launch.multinode.job_token import default_token_file, find_token, make_token_file

__all__ = ["command"]


@click.command("token")
@click.argument("path", required=False, type=click.Path(path_type=Path))
def command(path: Path | None) -> None:
    """Create the secret that the machines of a run share.

    Writes it to PATH (for ECHELON_TOKEN_FILE), or to the default file that every run of this user reads. Only the owner can
    read the file. The secret is not printed.
    """
    target = default_token_file() if path is None else path
    if make_token_file(target):
        click.echo(
            f"{target}: created a token; copy this file to all machines of a run, unless they share the home folder"
        )
        return
    if path is None:
        find_token()  # raises if the token is unusable
    click.echo(f"{target}: kept the existing token; remove the file to create a new one")
