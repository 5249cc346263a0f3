"""Fills the arguments that the code left out of a plugin from the settings of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType

from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig, coerce, field_types
from echelon.config.sources import current


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginArguments:
    """The settings that stand for a plugin's missing arguments, and the origin of each argument."""

    owner: str
    """Name of the plugin's class."""
    resolved: Resolved[RunConfig]
    names: Mapping[str, str]
    """Name of the setting, by argument."""
    found: Mapping[str, Setting]
    """Settings by argument; contains only arguments that the code left out and for which a setting was given."""

    def fill(self, plugin: object, arguments: Iterable[str]) -> None:
        """Set those ``arguments`` of ``plugin`` that the code left out and for which a setting was given."""
        for argument in arguments:
            if argument in self.found:
                setattr(plugin, argument, self.found[argument].value)

    def origin(self, argument: str) -> Origin:
        """Return where the value of ``argument`` came from; without a setting, from the code."""
        setting = self.found.get(argument)
        return Origin(SettingSource.CODE, f"{self.owner}({argument}=)") if setting is None else setting.origin

    def typed(self, argument: str, value: object) -> object:
        """Return ``value``, given for ``argument``, in a type of its setting other than None.

        Raises:
            ConfigError: ``value`` does not have such a type, or is out of range.
        """
        name = self.names[argument]
        kinds = tuple(kind for kind in field_types(RunConfig)[name] if kind is not NoneType)
        return coerce(kinds, name, value, where=str(self.origin(argument)))


def plugin_arguments(plugin: object, settings: Mapping[str, str]) -> PluginArguments:
    """Return the settings that stand for those arguments of ``plugin`` that are None.

    Args:
        plugin: object with an attribute for each argument.
        settings: name of the setting, by argument.

    Raises:
        ConfigError: a setting of this process is invalid.
    """
    resolved = current()
    found = {
        argument: Setting(value, resolved.origins[name])
        for argument, name in settings.items()
        if getattr(plugin, argument) is None
        and (value := getattr(resolved.value, name)) is not None
        and resolved.origins[name].source is not SettingSource.DEFAULT
    }
    return PluginArguments(owner=type(plugin).__name__, resolved=resolved, names=settings, found=found)
