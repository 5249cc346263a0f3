"""Hostfiles and the filters ``--include`` and ``--exclude``, with DeepSpeed's meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.base.errors import ConfigError
from echelon.cli.launch import command
from echelon.cli.multi_host_launch import _without, hosts_of
from echelon.config.origin import Origin, Setting, SettingSource
from echelon.config.resolve import resolve
from echelon.config.schema import RunConfig
from echelon.launch.ssh.hostfile import Host, excluding, included, including, read_hostfile

TWO = (Host(name="worker-0", slots=(0, 1, 2, 3)), Host(name="worker-1", slots=(0, 1)))


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_hostfile_names_machines_and_slots_in_its_order(tmp_path: Path) -> None:
    text = "# ours\nworker-0   slots=4\n\n  worker-1 slots=2 max_slots=8  # slow\n"
    assert read_hostfile(_file(tmp_path, text)) == TWO


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("worker-0 slots=4\nworker-1\n", "'worker-1' is not a valid hostfile line", 2),
        ("worker-0 slots=four\n", "'worker-0 slots=four' is not a valid hostfile line", 1),
        ("worker-0 slots=0\n", "is not a valid hostfile line", 1),
        ("-oProxyCommand=rm slots=1\n", "is not a valid hostfile line", 1),
        ("\nworker-0 slots=1\nworker-0 slots=2\n", "worker-0 is listed twice", 3),
    ],
)
def test_a_bad_line_of_a_hostfile_is_named(tmp_path: Path, text: str, what: str, line: int) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_hostfile(path)
    assert what in raised.value.what
    assert raised.value.where == f"{path}:{line}"
    assert raised.value.do


def test_an_empty_or_missing_hostfile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lists no machines\n  where: flag -H"):
        read_hostfile(_file(tmp_path, "# nobody\n"), where="flag -H")
    with pytest.raises(ConfigError, match=r"cannot read the hostfile .*: No such file"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # those of DeepSpeed's documentation first
        ("worker-0@worker-1:0,2", ConfigError),
        ("worker-0@worker-1:0", {"worker-0": (0, 1, 2, 3), "worker-1": (0,)}),
        ("worker-1@worker-0:3,1,1", {"worker-0": (1, 3), "worker-1": (0, 1)}),  # in the hostfile's order
        ("worker-1", {"worker-1": (0, 1)}),
    ],
)
def test_including(text: str, expected: object) -> None:
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="worker-1 has no slot 2"):
            including(TWO, text, where="flag -i")
    else:
        assert {host.name: host.slots for host in including(TWO, text, where="flag -i")} == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-1:0", {"worker-0": (0, 1, 2, 3), "worker-1": (1,)}),
        ("worker-0", {"worker-1": (0, 1)}),
        ("worker-1:0,1@worker-0:2", {"worker-0": (0, 1, 3)}),
    ],
)
def test_excluding(text: str, expected: object) -> None:
    assert {host.name: host.slots for host in excluding(TWO, text, where="flag -e")} == expected


@pytest.mark.parametrize(
    ("text", "what", "do"),
    [
        ("worker-2", "worker-2 is not in the hostfile", "did you mean worker-"),
        ("a", "a is not in the hostfile", "use one of worker-0, worker-1"),
        ("worker-1:5", "worker-1 has no slot 5", "use slots 0 to 1"),
        ("worker-1:", "'worker-1:' is not a list of machines", "worker-0@worker-1:0,2"),
        ("worker-0;worker-1:x", "is not a list of machines", "worker-0@worker-1:0,2"),
        ("worker-0@worker-0:1", "names worker-0 twice", "slots: worker-0:0,1"),
        ("worker-0@worker-1", "excludes all slots", "fewer"),
    ],
)
def test_a_filter_for_unknown_machines_or_slots_is_an_error(text: str, what: str, do: str) -> None:
    with pytest.raises(ConfigError) as raised:
        excluding(TWO, text, where="flag --exclude")
    assert what in raised.value.what
    assert raised.value.where == "flag --exclude"
    assert do in str(raised.value.do)


def test_without_a_hostfile_the_filter_must_name_the_slots() -> None:
    assert included("b:0,1@a:2", where="flag -i") == (Host(name="b", slots=(0, 1)), Host(name="a", slots=(2,)))
    with pytest.raises(ConfigError, match="the number of slots of a is unknown"):
        included("a@b:0", where="flag -i")


def _hosts(tmp_path: Path, source: SettingSource = SettingSource.FLAG, **values: object) -> tuple[Host, ...] | None:
    if "deepspeed_hostfile" in values:
        values["deepspeed_hostfile"] = _file(tmp_path, "worker-0 slots=4\nworker-1 slots=2\n")
    settings = {name: Setting(value, Origin(source, name)) for name, value in values.items()}
    return hosts_of(resolve(RunConfig, [settings]))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"deepspeed_inclusion_filter": "localhost:0,1"},  # accelerators of this machine
        {"deepspeed_hostfile": "", "machine_rank": 1, "num_machines": 2},  # it is one of them
        {"deepspeed_hostfile": "", "deepspeed_multinode_launcher": "standard"},
    ],
)
def test_a_launcher_starts_only_named_machines_that_are_not_started_yet(
    tmp_path: Path, values: dict[str, object]
) -> None:
    assert _hosts(tmp_path, **values) is None


def test_the_machines_are_those_of_the_hostfile_the_filters_and_the_number(tmp_path: Path) -> None:
    assert _hosts(tmp_path, deepspeed_hostfile="", deepspeed_multinode_launcher="pdsh") == TWO
    assert _hosts(tmp_path, deepspeed_hostfile="", num_machines=1) == TWO[:1]
    # accelerate's file says machine_rank: 0 on the machine that starts the others.
    assert _hosts(tmp_path, SettingSource.FILE, deepspeed_hostfile="", machine_rank=0, num_machines=2) == TWO
    chosen = _hosts(tmp_path, deepspeed_hostfile="", deepspeed_exclusion_filter="worker-0:0")
    assert chosen == (Host(name="worker-0", slots=(1, 2, 3)), TWO[1])
    assert _hosts(tmp_path, deepspeed_inclusion_filter="a:0@b:0,1") == (
        Host(name="a", slots=(0,)),
        Host(name="b", slots=(0, 1)),
    )


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"deepspeed_hostfile": "", "num_machines": 3}, "num_machines=3, but the hostfile and the filters name 2"),
        ({"deepspeed_hostfile": "", "gpu_ids": "0,1"}, "gpu_ids='0,1' selects accelerators on one machine"),
        ({"deepspeed_hostfile": "", "deepspeed_multinode_launcher": "slurm"}, "launcher 'slurm' is not supported"),
        ({"deepspeed_exclusion_filter": "a:0"}, "requires a hostfile"),
        (
            {"deepspeed_hostfile": "", "deepspeed_inclusion_filter": "a", "deepspeed_exclusion_filter": "b"},
            "are mutually exclusive",
        ),
    ],
)
def test_settings_that_contradict_the_machines_are_an_error(
    tmp_path: Path, values: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        _hosts(tmp_path, **values)
    assert what in raised.value.what
    assert raised.value.where
    assert raised.value.do


def test_only_the_machine_options_are_removed_from_the_command_line() -> None:
    machines = ["--hostfile", "hosts", "-i", "a:0", "-Hhosts", "--exclude=b", "--num_machines", "2", "--node_rank=0"]
    # A value that looks like a flag stays, and so does its flag.
    others = ["--cpu", "--log_dir", "--include", "--tee=3", "-m"]
    assert _without([*machines, *others], command.params) == others
    assert _without([*others, *machines, "--"], command.params) == others
