"""Selects the accelerators that a run uses on this machine (``--gpu_ids``, DeepSpeed's ``--include``)."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.config.origin import Origin
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The accelerators that the settings include or exclude."""

    numbers: tuple[int, ...]
    """Accelerator numbers; empty for all accelerators on this machine."""
    are_excluded: bool
    """Whether these accelerators are excluded rather than included."""
    text: str
    origin: Origin

    def of(self, num_accelerators: int, *, on_cpu: bool) -> tuple[int, ...]:
        """Return the numbers of the accelerators to use.

        Args:
            num_accelerators: number of accelerators on this machine.
            on_cpu: whether the run uses the CPU; the numbers then only determine the number of processes.

        Raises:
            ConfigError: an accelerator does not exist, or all are excluded.
        """
        every = tuple(range(num_accelerators))
        if num_accelerators == 0:
            if self.are_excluded:
                raise self._error(
                    _("{text}: this run does not use accelerators, so none can be excluded", text=self.text),
                    _("remove it"),
                )
            if not on_cpu:
                raise no_accelerator(_("{text} names accelerators", text=self.text), str(self.origin))
            return self.numbers
        if self.numbers and max(self.numbers) >= num_accelerators:
            raise self._error(
                _(
                    "{text}: this machine has only {num_accelerators} accelerators, numbered from 0",
                    text=self.text,
                    num_accelerators=num_accelerators,
                ),
                _("use numbers up to {number}", number=num_accelerators - 1),
            )
        if not self.are_excluded:
            return self.numbers or every
        left = tuple(i for i in every if self.numbers and i not in self.numbers)
        if not left:
            raise self._error(_("{text} excludes all accelerators", text=self.text), _("exclude fewer accelerators"))
        return left

    def _error(self, what: str, do: str) -> ConfigError:
        return ConfigError(what, where=str(self.origin), do=do)


def no_accelerator(request: str, where: str) -> ConfigError:
    """Return the error for a run that requests accelerators on a machine without accelerators."""
    return ConfigError(
        _("{request}, but this machine has no accelerator that torch can use", request=request),
        where=where,
        do=_(
            "add --cpu (or ECHELON_CPU=1, use_cpu: true in a config file) to train on the CPU; if the machine "
            "has an accelerator, check the driver and the torch build with echelon env"
        ),
    )


def is_this_machine(host: str) -> bool:
    """Return whether ``host`` is one of this machine's names."""
    return host in ("localhost", "127.0.0.1", "::1", "[::1]", socket.gethostname())


def named_slots(resolved: Resolved[RunConfig]) -> Slots | None:
    """Return the accelerators that the settings specify, or None if they specify none.

    Raises:
        ConfigError: a setting is not a list of accelerators on this machine, or two settings conflict.
    """
    names = ("gpu_ids", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
    given = [name for name in names if getattr(resolved.value, name) is not None]
    # A flag overrides a file, so that the launcher can pass each machine of a hostfile its part of the file's filter.
    strongest = max((resolved.origins[name].source for name in given), default=None)
    given = [name for name in given if resolved.origins[name].source is strongest]
    if len(given) > 1:
        both = " and ".join(
            _(
                "{name}={value!r} (from {origin})",
                name=name,
                value=getattr(resolved.value, name),
                origin=resolved.origins[name],
            )
            for name in given
        )
        raise ConfigError(_("{both} both select accelerators", both=both), do=_("remove one of them"))
    for name in given:
        text, origin = str(getattr(resolved.value, name)), resolved.origins[name]
        numbers = _numbers(text if name == "gpu_ids" else _of_this_machine(text, origin), origin)
        return Slots(numbers=numbers, are_excluded=name == names[2], text=text, origin=origin)
    return None


def _of_this_machine(text: str, origin: Origin) -> str:
    """Return the slot numbers in DeepSpeed's ``host:0,2`` as text; empty for all slots."""
    hosts = [part.partition(":") for part in text.split("@") if part]
    for host, _port, _slots in hosts:
        if not is_this_machine(host):
            raise ConfigError(
                _("{host} is not this machine", host=host),
                where=str(origin),
                do=_(
                    "use localhost:0,1 instead of {text}, or remove --machine_rank to start the run on {host} over ssh",
                    text=text,
                    host=host,
                ),
            )
    if len(hosts) != 1:
        raise ConfigError(_("{text!r} names no accelerators", text=text), where=str(origin), do=_("use localhost:0,1"))
    return hosts[0][2]


def _numbers(text: str, origin: Origin) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(
            _("{text!r} is not a list of accelerators", text=text),
            where=str(origin),
            do=_("use comma-separated accelerator numbers, such as 0,2"),
        )
    return tuple(int(part) for part in parts)
