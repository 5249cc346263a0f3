"""``echelon token``: creates the secret shared by the machines in a run."""

from __future__ import annotations

from pathlib import Path

import click

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.launch.job_token import default_token_file, find_token, make_token_file


@click.command("token")
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
def command(path: Path | None) -> None:
    """Create the secret shared by the machines in a run.

    The secret is written to FILE (set ECHELON_TOKEN_FILE to use it), or to the default file, which all of this user's runs
    read. Only the owner can read the file, and the secret is not printed.
    """
    target = default_token_file() if path is None else path
    if make_token_file(target):
        text = _(
            "{target}: created a token; copy this file to all machines in the run, unless they share the home folder",
            target=target,
        )
        click.echo(text)
        return
    if target.is_dir():
        raise UsageError(
            _("{path} is a directory, not a file", path=target),
            where="echelon token",
            do=_("pass a file, for example {name}", name=target / "token"),
        )
    if path is None:
        find_token()  # raises if the token is unusable
    click.echo(_("{target}: kept the existing token; to create a new one, remove this file first", target=target))
