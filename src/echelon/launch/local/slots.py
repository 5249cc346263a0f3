"""Which accelerators of this machine a run may use: ``--gpu_ids 0,2``, and DeepSpeed's ``--include host:0,2``."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from echelon.base.errors import ConfigError
from echelon.config.origin import Origin
from echelon.config.resolve import Resolved
from echelon.config.schema import RunConfig

__all__ = ["Slots", "is_this_machine", "named_slots", "no_accelerator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What the settings say about the accelerators."""

    numbers: tuple[int, ...]
    """Empty: all of this machine."""
    are_left_out: bool
    """Are these the ones that are not used?"""
    text: str
    origin: Origin

    def of(self, num_accelerators: int, *, on_cpu: bool) -> tuple[int, ...]:
        """Return those that are used of a machine's.

        Args:
            num_accelerators: that the run may use.
            on_cpu: the run was asked to use the CPU: the numbers only say how many processes it has.

        Raises:
            ConfigError: some are not there, or none is left.
        """
        every = tuple(range(num_accelerators))
        if num_accelerators == 0:
            if self.are_left_out:
                raise self._error(f"{self.text}: this run uses no accelerators that could be left out", "leave it out")
            if not on_cpu:
                raise no_accelerator(f"{self.text} names accelerators", str(self.origin))
            return self.numbers
        if self.numbers and max(self.numbers) >= num_accelerators:
            raise self._error(
                f"{self.text}: this machine has {num_accelerators} accelerators, numbered from 0",
                f"give numbers up to {num_accelerators - 1}",
            )
        if not self.are_left_out:
            return self.numbers or every
        left = tuple(i for i in every if self.numbers and i not in self.numbers)
        if not left:
            raise self._error(f"{self.text} leaves no accelerator", "name fewer of them")
        return left

    def _error(self, what: str, do: str) -> ConfigError:
        return ConfigError(what, where=str(self.origin), do=do)


def no_accelerator(asked: str, where: str) -> ConfigError:
    """Return the error of a run that asks for accelerators on a machine that has none."""
    return ConfigError(
        f"{asked}, and this machine has no accelerator that torch can use",
        where=where,
        do="add --cpu (or ECHELON_CPU=1, use_cpu: true in a file) to train on the CPU; if it has one, see echelon env: the "
        "driver, or a torch that was built for CPUs",
    )


def is_this_machine(host: str) -> bool:
    """Tell whether ``host`` is a name of this machine."""
    return host in ("localhost", "127.0.0.1", "::1", "[::1]", socket.gethostname())


def named_slots(resolved: Resolved[RunConfig]) -> Slots | None:
    """Return what the settings say about accelerators; None: nothing, all are used.

    Raises:
        ConfigError: it is no list of accelerators of this machine, or they say it twice.
    """
    names = ("gpu_ids", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter")
    said = [name for name in names if getattr(resolved.value, name) is not None]
    # A flag wins over a file: so a machine of a hostfile is told its own part of the file's filter.
    strongest = max((resolved.origins[name].source for name in said), default=None)
    said = [name for name in said if resolved.origins[name].source is strongest]
    if len(said) > 1:
        both = " and ".join(
            f"{name}={getattr(resolved.value, name)!r} (from {resolved.origins[name]})" for name in said
        )
        raise ConfigError(f"{both} both say which accelerators are used", do="give one of them")
    for name in said:
        text, origin = str(getattr(resolved.value, name)), resolved.origins[name]
        numbers = _numbers(text if name == "gpu_ids" else _of_this_machine(text, origin), origin)
        return Slots(numbers=numbers, are_left_out=name == names[2], text=text, origin=origin)
    return None


def _of_this_machine(text: str, origin: Origin) -> str:
    """Return the numbers in DeepSpeed's ``host:0,2``; empty: all."""
    hosts = [part.partition(":") for part in text.split("@") if part]
    for host, _, _ in hosts:
        if not is_this_machine(host):
            raise ConfigError(
                f"{host} is not this machine, whose accelerators are asked for here",
                where=str(origin),
                do=f"give localhost:0,1 (now: {text}), or leave --machine_rank out to start the run on {host} by ssh",
            )
    if len(hosts) != 1:
        raise ConfigError(f"{text!r} names no accelerators", where=str(origin), do="give localhost:0,1")
    return hosts[0][2]


def _numbers(text: str, origin: Origin) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(
            f"{text!r} is no list of accelerators", where=str(origin), do="give numbers and commas, such as 0,2"
        )
    return tuple(int(part) for part in parts)
