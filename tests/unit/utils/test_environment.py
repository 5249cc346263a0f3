"""Environment helpers, versions, probes and facts of the machine. ``os.getenv``: a failing test must not print secrets."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from echelon import utils
from echelon.base.warnings import EchelonWarning
from echelon.utils import (
    clear_environment,
    compare_versions,
    convert_bytes,
    is_port_in_use,
    is_torch_version,
    merge_dicts,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
    write_basic_config,
)
from echelon.utils.environment import convert_dict_to_env_variables, get_cpu_distributed_information, get_int_from_env
from echelon.utils.imports import is_numpy_available, torchao_required
from echelon.utils.other import get_free_port, get_pretty_name


def test_boolean_strings_are_parsed() -> None:
    assert [str_to_bool(word) for word in ("y", "Yes", "T", "true", "ON", "1")] == [1] * 6
    assert [str_to_bool(word) for word in ("n", "No", "F", "false", "OFF", "0")] == [0] * 6
    assert str_to_bool("on", to_bool=True) is True
    with pytest.raises(ValueError, match="'maybe' is not a valid boolean value"):
        str_to_bool("maybe")


def test_flags_and_choices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_A", "on")
    monkeypatch.setenv("ECHELON_B", "")
    assert parse_flag_from_env("ECHELON_A") is True
    assert parse_flag_from_env("ECHELON_B", default=True) is True
    assert (parse_choice_from_env("ECHELON_A"), parse_choice_from_env("ECHELON_B")) == ("on", "no")
    monkeypatch.setenv("ECHELON_A", "perhaps")
    with pytest.raises(ValueError, match="ECHELON_A='perhaps' is not a valid boolean value"):
        parse_flag_from_env("ECHELON_A")


def test_the_first_integer_of_several_variables_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_A", "-1")
    monkeypatch.setenv("ECHELON_B", "3")
    assert get_int_from_env(["ECHELON_NONE", "ECHELON_A", "ECHELON_B"], 7) == 3
    assert get_int_from_env(["ECHELON_NONE"], 7) == 7
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (get_cpu_distributed_information().rank, get_cpu_distributed_information().world_size) == (2, 4)


def test_patched_variables_are_in_upper_case_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_A", "old")
    with patch_environment(echelon_a=1, ECHELON_NEW=True):
        assert (os.getenv("ECHELON_A"), os.getenv("ECHELON_NEW")) == ("1", "True")
    assert (os.getenv("ECHELON_A"), os.getenv("ECHELON_NEW")) == ("old", None)


def test_a_cleared_environment_is_restored_without_changes_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_A", "old")
    with clear_environment():
        assert os.getenv("ECHELON_A") is os.getenv("PATH") is None
        os.environ["ECHELON_NEW"] = "1"
    assert (os.getenv("ECHELON_A"), os.getenv("ECHELON_NEW")) == ("old", None)
    assert os.getenv("PATH")


def test_purging_restores_after_a_function_and_after_each_test_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_A", "old")

    @purge_accelerate_environment
    def change() -> str:
        os.environ["ACCELERATE_A"] = "new"
        os.environ["ACCELERATE_B"] = "new"
        return "done"

    @purge_accelerate_environment
    class Cases:
        def test_it(self) -> None:
            change.__wrapped__()  # type: ignore[attr-defined]

    class More(Cases):
        def test_more(self) -> None:
            change.__wrapped__()  # type: ignore[attr-defined]

    for run in (change, Cases().test_it, More().test_it, More().test_more):
        run()
        assert (os.getenv("ACCELERATE_A"), os.getenv("ACCELERATE_B")) == ("old", None)
    assert change() == "done"


def test_lines_of_an_environment_file_leave_out_what_they_cannot_hold() -> None:
    with pytest.warns(EchelonWarning, match="skipping the variable 'B'") as caught:
        assert convert_dict_to_env_variables({"A": "1", "B": "se cret"}) == ["A=1\n"]
    assert "cret" not in str(caught[0].message)


@pytest.mark.parametrize(
    ("version", "operation", "other", "holds"),
    [("2.10.0", ">", "2.9.1", True), ("2.7.0", "==", "2.7", True), ("2.7.0rc1", "<", "2.7.0", True)]
    + [
        ("2.7.0a0+git1", ">=", "2.7.0", False),
        ("2.7.0.dev2025", "<", "2.7.0a1", True),
        ("1.0+cpu", "!=", "1.0", False),
    ],
)
def test_versions_compare_as_releases_do(version: str, operation: str, other: str, holds: bool) -> None:
    assert compare_versions(version, operation, other) is holds


def test_libraries_compare_by_their_installed_version() -> None:
    assert compare_versions("torch", ">=", "2.7")
    assert is_torch_version("<", "99.0")
    with pytest.raises(ValueError, match="unknown operation='~'"):
        compare_versions("torch", "~", "1.0")


def test_probes_report_available_features() -> None:
    assert utils.is_pytest_available()
    assert is_numpy_available()
    assert not is_numpy_available("999.0")
    assert not utils.is_megatron_lm_available()
    assert not utils.is_npu_available(check_device=True)
    assert utils.is_cuda_available() is torch.cuda.is_available()
    assert utils.is_bf16_available() in (True, False)


def test_a_probe_asks_for_the_distribution_and_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("torchao", "0.5.0"), ("aim", "4.1.0"), ("torchdata", "0.7.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('a probe must not import')\n")
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "wandb").mkdir()  # a folder of runs, as wandb leaves it: no installed library
    monkeypatch.syspath_prepend(str(tmp_path))
    assert utils.is_torchdata_available()
    assert not utils.is_torchdata_stateful_dataloader_available()
    assert not utils.is_torchao_available()
    assert not utils.is_aim_available()
    assert not utils.is_wandb_available()


def test_all_probes_of_accelerate_answer_without_an_error() -> None:
    probes = [name for name in utils.__all__ if name.startswith("is_") and name.endswith("_available")]
    assert len(probes) == 58
    assert {type(getattr(utils, name)()) for name in probes} == {bool}


def test_rich_is_available_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    assert utils.is_rich_available() is False


def test_the_error_for_missing_torchao_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.compat.probes.is_torchao_available", lambda: False)
    with pytest.raises(ImportError, match=r"requires the package 'torchao'.*\n.*pip install \"torchao>="):
        torchao_required(len)([])


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert is_port_in_use(server.getsockname()[1])
    free = get_free_port()
    assert not is_port_in_use(free)
    with socket.create_server(("127.0.0.1", free)):
        assert is_port_in_use(free)


def test_human_readable_sizes() -> None:
    assert [convert_bytes(size) for size in (10, 1536, 5 * 1024**3, 1024**5)] == [
        "10 bytes",
        "1.5 KB",
        "5.0 GB",
        "1.0 PB",
    ]


def test_dicts_merge_key_by_key() -> None:
    target = {"a": {"x": 1, "y": 2}, "b": 1}
    assert merge_dicts({"a": {"y": 3}, "c": 4}, target) is target
    assert target == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}


def test_human_readable_names() -> None:
    assert [get_pretty_name(thing) for thing in (Path, len, Path("x"))] == ["Path", "len", type(Path("x")).__name__]


def test_gpus_are_queried_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"count,name": "2, RTX 4090\n2, RTX 4090\n", "driver_version": "535.1.0\n", "compute_cap": "8.6\n"}

    def answer(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=answers[command[1].removeprefix("--query-gpu=")])

    monkeypatch.setattr(subprocess, "run", answer)
    assert utils.get_gpu_info() == (["RTX 4090", "RTX 4090"], 2)
    assert utils.check_cuda_p2p_ib_support() is False
    assert utils.check_cuda_fp8_capability() is False
    answers.update(driver_version="550.40.07\n", compute_cap="8.9\n")
    assert utils.check_cuda_p2p_ib_support() is True
    assert utils.check_cuda_fp8_capability() is True


def test_the_launcher_reads_a_new_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from echelon.config.files import from_file
    from echelon.config.resolve import resolve
    from echelon.config.schema import RunConfig

    path = tmp_path / "new" / "config.json"
    assert write_basic_config("BF16", path) == path
    assert f"echelon launch --config_file {path}" in capsys.readouterr().out
    config = resolve(RunConfig, [from_file(path)]).value
    assert (config.mixed_precision, config.num_processes) == ("bf16", max(1, torch.accelerator.device_count()))
    assert write_basic_config(save_location=path) is False
    assert "already exists and was not changed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="unknown mixed_precision='half'"):
        write_basic_config("half", tmp_path / "other.json")
