"""``echelon config``: creates config files, and shows settings with their origins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _, gettext_noop as N_
from echelon.cli.help.completion import complete_paths
from echelon.config.derive import check, derive, with_engine
from echelon.config.explain import differences, show, show_changed, show_json
from echelon.config.files import PROJECT_FILE, find_config_file, from_file
from echelon.config.questions import ask_settings, ask_yes_no
from echelon.config.resolve import Resolved, resolve
from echelon.config.run_record import of_run
from echelon.config.schema import RunConfig
from echelon.config.sources import from_environment
from echelon.config.speed_choices import speed_table
from echelon.config.write import chosen, unknown_to_accelerate, write, write_basic_config
from echelon.report.run_folder import find_run


def _file_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--config-file", metavar="FILE", shell_complete=complete_paths, help=text)


@click.group("config", invoke_without_command=True)
@_file_option(f"File to write: .toml, or .yaml or .json with accelerate's key names (default: {PROJECT_FILE}).")
@click.pass_context
def command(ctx: click.Context, config_file: str | None) -> None:
    """Create a config file by answering a few questions, or show, convert and compare settings."""
    if ctx.invoked_subcommand is not None:
        _pass_on(ctx, ctx.invoked_subcommand, config_file)
        return
    path = Path(config_file or PROJECT_FILE)
    try:
        if path.exists() and not ask_yes_no(_("{path} already exists. Overwrite it?", path=path), default=False):
            return
        _write(path, ask_settings())
    except EOFError as error:
        raise UsageError(
            _("standard input ended before all questions were answered"),
            where=_("standard input"),
            do=_("run echelon config default to write a file without questions"),
        ) from error


def _pass_on(ctx: click.Context, subcommand: str, config_file: str | None) -> None:
    """Let ``--config_file`` before a subcommand count as if it followed it."""
    if config_file is None:
        return
    if all(param.name != "config_file" for param in command.commands[subcommand].params):
        raise UsageError(
            _("echelon config {subcommand} does not take --config_file", subcommand=subcommand),
            where="flag --config_file",
            do=_("remove it"),
        )
    ctx.default_map = {subcommand: {"config_file": config_file}}


@command.command("default")
@_file_option(N_("File to write (default: the path where the launcher looks for it)."))
@click.option("--mixed-precision", metavar="[no|fp16|bf16|fp8]", default="no", help="Autocast dtype (default: no).")
def default(config_file: str | None, mixed_precision: str) -> None:
    """Write a config file with one process per accelerator, without asking questions."""
    write_basic_config(mixed_precision, config_file)


@command.command("update")
@_file_option(N_("File to update (default: the file that the launcher would use)."))
def update(config_file: str | None) -> None:
    """Rewrite a config file with this version's key names, keeping its settings."""
    path = Path(config_file) if config_file else find_config_file()
    if path is None:
        raise UsageError(_("no config file found"), where="echelon config update", do=_("pass --config_file FILE"))
    values = chosen(_of_file(path))
    if values.get("deepspeed_config_file") == str(path):
        raise UsageError(
            _("{path} is a DeepSpeed file", path=path),
            do=_("pass --config_file with a file written by echelon or accelerate"),
        )
    _write(path, values)


@command.command("explain")
@_file_option(N_("Config file (default: the file that the launcher would use)."))
@click.option("--run", metavar="DIR", help="Show the settings of the run in folder DIR, or of the newest run in it.")
@click.option("--changed", is_flag=True, help="Print only settings that are not the default.")
@click.option("--strict", is_flag=True, help="Fail if two sources give different values for a setting.")
def explain(config_file: str | None, run: str | None, changed: bool, strict: bool) -> None:
    """Print each setting's value, its origin, and the values that it overrides."""
    if run is not None:
        if config_file is not None:
            raise UsageError(_("--run and --config_file are mutually exclusive"), do=_("remove one of them"))
        resolved = of_run(find_run(run))
    else:
        path = config_file or find_config_file()
        layers = [from_environment(), *([from_file(path)] if path else [])]
        resolved = derive(resolve(RunConfig, layers, strict=strict))
        if path and not config_file:
            click.echo(_("settings from {path}", path=path))
    shown = with_engine(resolved)
    click.echo((show_changed(shown) or _("all settings have their defaults")) if changed else show(shown))
    if (speed := resolved.value.speed) != "off" and not changed:
        click.echo(f"\nspeed={speed!r}:\n{speed_table(speed)}")
    if (json := resolved.value.deepspeed_config_file) is not None and Path(json).is_file():
        click.echo(f"\n{json}:\n{show_json(json, resolved)}")
    check(resolved, world_size=resolved.value.num_processes)


@command.command("convert")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--overwrite", is_flag=True, help="Replace TO if it exists.")
def convert(source: str, target: str, overwrite: bool) -> None:
    """Convert the config file FROM to the format given by TO's suffix: .toml, or accelerate's .yaml or .json."""
    if Path(target).exists() and not overwrite:
        raise UsageError(
            _("{target} already exists", target=target), where="echelon config convert", do=_("add --overwrite")
        )
    _write(Path(target), chosen(_of_file(source)))


@command.command("diff")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.pass_context
def diff(ctx: click.Context, first: str, second: str) -> None:
    """Print the settings that differ between two config files or run folders; exit with code 1 if there are any."""
    found = differences(*(of_run(find_run(one)) if Path(one).is_dir() else _of_file(one) for one in (first, second)))
    click.echo(found or _("no differences"))
    ctx.exit(1 if found else 0)


def _of_file(path: str | Path) -> Resolved[RunConfig]:
    return derive(resolve(RunConfig, [from_file(path)]))


def _write(path: Path, values: dict[str, object]) -> None:
    write(path, values)
    text = N_("wrote {path}") if values else N_("wrote {path}: all settings have their defaults")
    click.echo(_(text, path=path))
    if path.suffix != ".toml" and (names := unknown_to_accelerate(values)):
        note = N_("note: accelerate would reject this file because of {names}; echelon accepts it")
        click.echo(_(note, names=", ".join(names)))
