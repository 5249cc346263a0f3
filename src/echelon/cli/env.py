"""``echelon env``: prints the system information that a bug report needs, without secrets."""

from __future__ import annotations

import json
from typing import Any

import click

from echelon.base.errors import ConfigError
from echelon.base.messages.terminal import align_columns
from echelon.base.messages.translation import translate
from echelon.cli.environment_facts import (
    devices,
    interfaces,
    settings,
    stands_in_for,
    starters,
    system,
    variables,
    versions,
    without_home,
)
from echelon.config.derive import derive
from echelon.config.files import from_file
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.search_paths import find_config_file
from echelon.config.sources import from_environment

__all__ = ["command"]


@click.command("env")
@click.option("--config-file", metavar="PATH", help="Config file (default: the file that the launcher would use).")
@click.option("--addresses", is_flag=True, help="Also show the network addresses, and the hosts and paths in settings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(config_file: str | None, addresses: bool, as_json: bool) -> None:
    """Show the versions, hardware, network and settings for a bug report.

    The output contains no secrets: most environment variables appear without their values, free-text settings and user and
    host names are omitted, and paths do not show the home folder.
    """
    report: dict[str, Any] = {
        "versions": versions(),
        "system": system(),
        "devices": devices(),
        "network": interfaces(with_addresses=addresses),
        "started by": ", ".join(starters()) or "no known launcher",
        "stands in for": stands_in_for(),
        "settings": _settings(config_file, with_addresses=addresses),
        "variables": variables(),
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, facts in report.items():
        words = facts if isinstance(facts, str) else "" if facts else "none"
        click.echo(f"{translate(title)}: {translate(words)}".rstrip())
        if isinstance(facts, dict) and facts:
            for line in align_columns([(translate(name), translate(value)) for name, value in facts.items()]):
                click.echo(f"  {line}")


def _settings(config_file: str | None, *, with_addresses: bool) -> dict[str, str] | str:
    path = config_file or find_config_file()
    try:
        layers = [from_environment(), *([from_file(path)] if path else [])]
        resolved = derive(resolve(RunConfig, layers))
    except ConfigError as error:
        # The message may quote the value.
        return without_home(f"invalid ({error.where}); run echelon config explain for details")
    found = settings(resolved, with_addresses=with_addresses)
    return {"file": without_home(str(path)), **found} if path else found
