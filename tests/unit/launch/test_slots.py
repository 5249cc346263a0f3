"""Which accelerators a run uses, and how many processes that makes."""

from __future__ import annotations

import socket

import pytest

from echelon.base.errors import ConfigError
from echelon.cli import launch
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.launch.local.slots import named_slots


def _settings(**values: object) -> dict[str, Setting]:
    return {name: Setting(value, Origin(SettingSource.FLAG, f"--{name}")) for name, value in values.items()}


def _used(values: dict[str, str], num_accelerators: int) -> tuple[tuple[int, ...], str]:
    found = named_slots(resolve(RunConfig, [_settings(**values)]))
    assert found is not None
    on_cpu = num_accelerators == 0 and "gpu_ids" not in values
    return found.of(num_accelerators, on_cpu=on_cpu), str(found.origin)


@pytest.mark.parametrize(
    ("name", "text", "num_accelerators", "slots"),
    [
        ("gpu_ids", "0,2", 4, (0, 2)),
        ("gpu_ids", "3", 4, (3,)),
        ("deepspeed_inclusion_filter", "localhost:0,2", 4, (0, 2)),
        ("deepspeed_inclusion_filter", f"{socket.gethostname()}:1", 4, (1,)),
        ("deepspeed_inclusion_filter", "localhost", 3, (0, 1, 2)),
        ("deepspeed_exclusion_filter", "localhost:1", 3, (0, 2)),
        ("deepspeed_inclusion_filter", "localhost:0,2", 0, (0, 2)),  # with --cpu: two processes
    ],
)
def test_the_accelerators_named_are_used(name: str, text: str, num_accelerators: int, slots: tuple[int, ...]) -> None:
    assert _used({name: text}, num_accelerators) == (slots, f"flag --{name}")


@pytest.mark.parametrize(
    ("values", "num_accelerators", "what"),
    [
        ({"gpu_ids": "0,4"}, 4, "0,4: this machine has only 4 accelerators, numbered from 0"),
        ({"gpu_ids": "0,1"}, 0, "0,1 names accelerators, but this machine has no accelerator that torch can use"),
        ({"gpu_ids": "0;1"}, 4, "'0;1' is not a list of accelerators"),
        ({"gpu_ids": "1,1"}, 4, "'1,1' is not a list of accelerators"),
        ({"deepspeed_inclusion_filter": "a:0@b:0"}, 4, "a is not this machine"),
        ({"deepspeed_exclusion_filter": "localhost:0,1"}, 2, "localhost:0,1 excludes all accelerators"),
        ({"deepspeed_exclusion_filter": "localhost"}, 2, "localhost excludes all accelerators"),
        ({"deepspeed_exclusion_filter": "localhost:0"}, 0, "does not use accelerators, so none can be excluded"),
        ({"deepspeed_inclusion_filter": "localhost", "gpu_ids": "0"}, 2, "both select accelerators"),
    ],
)
def test_unknown_accelerators_are_an_error(values: dict[str, str], num_accelerators: int, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _used(values, num_accelerators)
    assert what in raised.value.what
    assert f"--{next(iter(values))}" in str(raised.value)
    assert raised.value.do


@pytest.mark.parametrize(
    ("in_file", "by_flag", "num_processes"),
    [
        ({"num_processes": 8}, {"deepspeed_inclusion_filter": "localhost:0,2"}, 2),
        ({"num_processes": 1, "gpu_ids": "0,2"}, {}, 1),
        ({"gpu_ids": "0,2"}, {}, 2),
        ({"gpu_ids": "0,2"}, {"num_processes": 1}, 1),
    ],
)
def test_a_list_of_accelerators_is_a_number_of_processes_unless_a_stronger_one_is_given(
    in_file: dict[str, object], by_flag: dict[str, object], num_processes: int
) -> None:
    file = {name: Setting(value, Origin(SettingSource.FILE, "run.yaml:1")) for name, value in in_file.items()}
    resolved = resolve(RunConfig, [file, _settings(**by_flag)])
    flags = {"num_processes": by_flag.get("num_processes"), "multi_gpu": False}
    assert launch._num_processes(resolved, flags, {}, 4, named_slots(resolved)) == num_processes


def test_a_flag_names_the_accelerators_instead_of_a_file() -> None:
    file = {"deepspeed_inclusion_filter": Setting("worker-0:0@worker-1:2", Origin(SettingSource.FILE, "run.yaml:1"))}
    found = named_slots(resolve(RunConfig, [file, _settings(gpu_ids="2")]))
    assert found is not None
    assert found.of(4, on_cpu=False) == (2,)


@pytest.mark.parametrize("flag", ["--num_gpus", "--num-gpus", "--num_accelerators"])
def test_a_number_of_gpus_on_a_machine_without_is_an_error_unless_the_run_is_of_the_cpu(flag: str) -> None:
    flags, typed = {"num_processes": "2", "multi_gpu": False}, {"num_processes": flag}
    with pytest.raises(ConfigError, match=f"{flag} requests accelerators, but this machine has no accelerator"):
        launch._num_processes(resolve(RunConfig, [_settings(num_processes=2)]), flags, typed, 0)
    assert launch._num_processes(resolve(RunConfig, [_settings(num_processes=2, cpu=True)]), flags, typed, 0) == 2
    plain = {"num_processes": "--num_processes"}
    assert launch._num_processes(resolve(RunConfig, [_settings(num_processes=2)]), flags, plain, 0) == 2


def test_more_processes_than_the_list_has_is_an_error() -> None:
    resolved = resolve(RunConfig, [_settings(gpu_ids="0,2", num_processes=3)])
    with pytest.raises(ConfigError, match="3 processes, but flag --gpu_ids names 2 accelerators"):
        launch._num_processes(resolved, {"num_processes": "3", "multi_gpu": False}, {}, 4, named_slots(resolved))
