"""``echelon token``: make the secret by which the machines of a run know each other."""

from __future__ import annotations

from pathlib import Path

import click

from echelon.launch.multinode.job_token import default_token_file, find_token, make_token_file

__all__ = ["command"]


@click.command("token")
@click.argument("path", required=False, type=click.Path(path_type=Path))
def command(path: Path | None) -> None:
    """Make the secret by which the machines of a run know each other.

    It is written to PATH, for ECHELON_TOKEN_FILE, or to the file that every run of this user reads; only its owner can read
    that. The secret itself is not shown.
    """
    target = default_token_file() if path is None else path
    if make_token_file(target):
        click.echo(f"{target}: a new token; all machines of a run need the same (in a shared home they have it)")
        return
    if path is None:
        find_token()  # it says what is wrong with it
    click.echo(f"{target}: there is one already, and it is kept; remove the file to have a new one")
