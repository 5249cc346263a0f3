"""``echelon config``: what the configuration is, and why."""

from __future__ import annotations

import click

from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.config.show import show
from echelon.config.sources import from_environment, from_file

__all__ = ["command"]


@click.group("config")
def command() -> None:
    """Show the configuration and where each value came from."""


@command.command("explain")
@click.option("--config-file", help="A YAML or JSON file with settings.")
@click.option("--strict", is_flag=True, help="Two places that give one setting different values are an error.")
def explain(config_file: str | None, strict: bool) -> None:
    """Print every setting, its value, its origin, and what it overrode."""
    layers = [from_environment(), *([from_file(config_file)] if config_file else [])]
    click.echo(show(resolve(RunConfig, layers, strict=strict)))
