"""Settings on their way from files and flags to running processes, and the commands that explain them."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from echelon.base import environ
from echelon.cli.main import main
from echelon.config.files import from_file
from echelon.config.write import write
from tests.launch.conftest import Command
from tests.launch.test_launch import NOTE, notes

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def test_a_tutorial_yaml_starts_the_processes_asked_for_and_the_run_can_be_explained(command: Command) -> None:
    command.write("note.py", NOTE)
    shutil.copy(CONFIGS / "zero3_offload.yaml", command.directory)
    result = command.launch("--config_file", "zero3_offload.yaml", "--num_processes", "2", "--log_dir=logs", "note.py")
    assert result.code == 0, result.err
    found = notes(command)
    assert [note["env"]["RANK"] for note in found] == ["0", "1"]
    for note in found:
        assert note["env"]["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert note["env"]["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert note["env"]["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "cpu"
        handed = json.loads(note["env"]["ECHELON_CONFIG"])
        assert handed["zero_stage"][::2] == [3, "zero3_offload.yaml:10"]
        assert note["argv"] == ["note.py"]
    told = "num_processes=2 (from flag --num_processes) overrides 8 (from file zero3_offload.yaml:17)"
    assert told in result.err
    explained = command.echelon("config", "explain", "--run", "logs")
    rows = {line.split()[0]: line for line in explained.out.splitlines() if line}
    assert "flag --num_processes  (overrides 8 from file zero3_offload.yaml:17)" in rows["num_processes"]
    compared = command.echelon("config", "diff", "zero3_offload.yaml", "logs")
    assert compared.code == 1
    assert [line.split()[0] for line in compared.out.splitlines()] == ["num_processes"]


SETTINGS = """
import json, os
from echelon import FullyShardedDataParallelPlugin
from echelon.config.sources import current

plugin, resolved = FullyShardedDataParallelPlugin(), current()
names = ("fsdp_version", "fsdp_offload_params", "fsdp_activation_checkpointing", "fsdp_cpu_ram_efficient_loading")
found = {name: [getattr(resolved.value, name), str(resolved.origins[name])] for name in names}
found["plugin"] = [plugin.fsdp_version, type(plugin.cpu_offload).__name__, plugin.activation_checkpointing]
with open(f"settings_{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_settings_of_each_source_arrive_on_the_ranks_with_their_origins(command: Command) -> None:
    command.write("settings.py", SETTINGS)
    command.write("run.yaml", "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: false\n")
    flags = ["--config_file=run.yaml", "--cpu", "--num_processes=2", "--fsdp_offload_params=true"]
    result = command.launch(*flags, "settings.py", FSDP_ACTIVATION_CHECKPOINTING="true")
    assert result.code == 0, result.err
    for rank in range(2):
        assert json.loads((command.directory / f"settings_{rank}.json").read_text()) == {
            "fsdp_version": [2, "file run.yaml:3"],
            "fsdp_offload_params": [True, "flag --fsdp_offload_params"],
            "fsdp_activation_checkpointing": [True, "env FSDP_ACTIVATION_CHECKPOINTING"],
            "fsdp_cpu_ram_efficient_loading": [True, "derived from sharded_by: as accelerate's launcher"],
            "plugin": [2, "CPUOffloadPolicy", True],
        }


def test_deepspeeds_flags_and_the_file_that_accelerate_config_wrote(command: Command) -> None:
    command.write("package/__main__.py", NOTE)
    default = Path(command.write(".huggingface/accelerate/default_config.yaml", ""))
    shutil.copy(CONFIGS / "accelerate_config_default.yaml", command.directory / default)
    flags = ["--include", "localhost:0,2", "--local_rank_arg", "--master_port=0", "--module"]
    result = command.launch(*flags, "package", "--deepspeed")
    assert result.code == 0, result.err
    assert [note["argv"][1:] for note in notes(command)] == [
        ["--local_rank=0", "--deepspeed"],
        ["--local_rank=1", "--deepspeed"],
    ]
    assert (
        f"using settings from {command.directory / default}; pass --config_file to use a different file" in result.err
    )


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, without files of settings elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path


def _echelon(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def _answer(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    waiting = iter(answers)

    def read(question: str) -> str:
        answer = next(waiting, None)
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", read)


QUESTIONS = {
    "nothing but defaults": ([""] * 5, "echelon.toml", {"cpu": True, "num_processes": 1}),
    "for another machine": (["no", "", "", "", "", ""], "echelon.toml", {}),
    "fsdp": (
        ["no", "2", "bf61", "bf16", "fsdp", "no", "yes", "LlamaDecoderLayer", "4", "yes", ""],
        "echelon.toml",
        {
            "num_processes": 2,
            "mixed_precision": "bf16",
            "sharded_by": "fsdp",
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": False,
            "fsdp_offload_params": True,
            "gradient_accumulation_steps": 4,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "dynamo_backend": "inductor",
            "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        },
    ),
    "deepspeed, for accelerate": (
        ["no", "2", "", "deepspeed", "", "3", "nvme", "cpu", "yes", "", "", "1.0", "", ""],
        "accelerate.yaml",
        {
            "num_processes": 2,
            "sharded_by": "deepspeed",
            "zero_stage": 3,
            "offload_optimizer_device": "nvme",
            "offload_optimizer_nvme_path": "/nvme",
            "offload_param_device": "cpu",
            "gradient_clipping": 1.0,
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
        },
    ),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_the_answers_to_a_few_questions_become_a_file(
    case: str, inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, name, expected = QUESTIONS[case]
    monkeypatch.setattr("echelon.config.questions.num_devices", lambda: 0)
    _answer(monkeypatch, *answers)
    assert _echelon("config", *([] if name == "echelon.toml" else ["--config_file", name])) == 0
    out = capsys.readouterr().out
    assert f"wrote {name}" in out
    assert ("bf61" in out) is ("bf61" in answers)  # asked again, with the reason
    # accelerate's files say some things that are the defaults anyway.
    values = {field: setting.value for field, setting in from_file(name).items()}
    silent = {"mixed_precision": "no", "cpu": False, "num_machines": 1, "machine_rank": 0, "debug": False}
    assert values == ({} if name == "echelon.toml" else silent) | expected


@pytest.mark.parametrize(("number", "answers"), [(0, ["", "2"]), (0, [""]), (2, [])])
def test_the_questions_fit_the_machine(
    number: int, answers: list[str], inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    waiting = iter(answers)
    monkeypatch.setattr("echelon.config.questions.num_devices", lambda: number)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(waiting, ""))
    assert _echelon("config") == 0
    text = "\n".join(asked)
    assert ("although this machine has 2 accelerators" in text) is (number == 2)
    assert ("This machine has no accelerator. Train on its CPU?" in text) is (number == 0)
    assert ("one per accelerator" in text) is (number == 2)
    assert ("fp16" in text) is (number == 2)
    assert ("Shard the model" in text) is (answers != [""])  # one process on the CPU has nothing to shard


def test_no_answers_are_an_error_and_a_file_is_not_overwritten_unasked(
    inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _answer(monkeypatch)
    assert _echelon("config") == 2
    assert "run echelon config default to write a file without questions" in capsys.readouterr().err
    Path("echelon.toml").write_text("seed = 1\n")
    _answer(monkeypatch, "")
    assert _echelon("config") == 0
    assert Path("echelon.toml").read_text() == "seed = 1\n"
    assert _echelon("config", "convert", str(CONFIGS / "fsdp2.yaml"), "echelon.toml") == 2
    assert "echelon.toml already exists" in capsys.readouterr().err


def test_default_update_convert_and_diff(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _echelon("config", "update") == 2
    assert "no config file found" in capsys.readouterr().err
    assert _echelon("config", "default", "--mixed_precision", "bf16") == 0
    default = inside / "home" / "echelon" / "default_config.toml"
    assert from_file(default)["mixed_precision"].value == "bf16"
    assert _echelon("config", "explain") == 0
    assert f"settings from {default}" in capsys.readouterr().out

    shutil.copy(CONFIGS / "fsdp_2022.yaml", "old.yaml")
    shutil.copy("old.yaml", "new.yaml")
    assert _echelon("config", "update", "--config_file", "new.yaml") == 0
    text = Path("new.yaml").read_text()
    assert "fsdp_min_num_params: 2000" in text
    assert "fsdp_backward_prefetch: BACKWARD_PRE" in text
    assert "tpu" not in text
    assert _echelon("config", "convert", "old.yaml", "new.toml") == 0
    assert Path("new.toml").read_text().splitlines()[-8:] == [
        *("", "[fsdp]", 'sharding_strategy = "1"', "offload_params = false"),
        *('auto_wrap_policy = "SIZE_BASED_WRAP"', 'backward_prefetch = "BACKWARD_PRE"', "min_num_params = 2000"),
        'state_dict_type = "FULL_STATE_DICT"',
    ]
    capsys.readouterr()
    assert _echelon("config", "diff", "old.yaml", "new.toml") == 0
    assert _echelon("config", "diff", "old.yaml", "new.yaml") == 0
    assert capsys.readouterr().out == "no differences\n" * 2
    Path("other.toml").write_text("[fsdp]\nversion = 2\n[unknown]\nx = 1\n")
    assert _echelon("config", "diff", "old.yaml", "other.toml") == 2
    Path("other.toml").write_text("num_processes = 4\n")
    assert _echelon("config", "diff", "new.toml", "other.toml") == 1
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert " ".join(rows["num_processes"].split()[1:]) == "2 (file new.toml:1) 4 (file other.toml:1)"
    assert "'fsdp' (file new.toml:3)" in rows["sharded_by"]


def test_the_groups_config_file_is_that_of_the_subcommand_or_an_error(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _echelon("config", "--config_file", "x.toml", "default") == 0
    assert [path.name for path in inside.rglob("*.toml")] == ["x.toml"]
    assert "wrote x.toml" in capsys.readouterr().out
    assert _echelon("config", "--config_file", "x.toml", "default", "--config_file", "y.toml") == 0
    assert "wrote y.toml" in capsys.readouterr().out
    assert _echelon("config", "--config_file", "x.toml", "diff", "x.toml", "y.toml") == 2
    assert "echelon config diff does not take --config_file" in capsys.readouterr().err


def test_explain_shows_all_before_it_refuses(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('engine = "ddp"\nsharded_by = "fsdp"\n[fsdp]\nversion = 2\n')
    with environ.patch({"FSDP_VERSION": "1"}):
        assert _echelon("config", "explain", "--config_file", "run.toml") == 2
        out, err = capsys.readouterr()
        assert "(overrides 2 from file run.toml:4)" in next(line for line in out.splitlines() if "fsdp_version" in line)
        assert (
            "sharded_by='fsdp' (from file run.toml:2) and engine='ddp' (from file run.toml:1) contradict each other"
            in err
        )
        assert _echelon("config", "explain", "--config_file", "run.toml", "--strict") == 2
        assert "fsdp_version is set twice" in capsys.readouterr().err
    assert _echelon("config", "explain", "--run", "gone") == 2
    assert "gone is not a folder" in capsys.readouterr().err


def test_what_was_written_for_accelerate_names_what_accelerate_does_not_know(
    inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.toml").write_text('engine = "ddp"\ngradient_accumulation_steps = 2\n')
    assert _echelon("config", "convert", "run.toml", "run.yaml") == 0
    assert "accelerate would reject this file because of engine, gradient_accumulation_steps" in capsys.readouterr().out
    assert {name: setting.value for name, setting in from_file("run.yaml").items()}.items() >= {
        ("engine", "ddp"),
        ("gradient_accumulation_steps", 2),
    }
    shutil.copy(CONFIGS / "ds_zero2.json", "ds.json")
    assert _echelon("config", "update", "--config_file", "ds.json") == 2
    assert json.loads(Path("ds.json").read_text())["zero_optimization"]["stage"] == 2
    assert _echelon("config", "convert", "run.toml", "run.txt") == 2
    assert "run.txt: unknown file format" in capsys.readouterr().err


@pytest.mark.soak  # the launcher of DeepSpeed takes ten seconds to start
def test_a_script_started_by_deepspeeds_own_launcher_finds_its_place(command: Command) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    command.write(
        "train.py",
        "import sys\nfrom echelon import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "place = accelerator.process_index, accelerator.num_processes, accelerator.world.local_world_size\n"
        "sys.stdout.write(' '.join(map(str, ('PLACE', *place, *sys.argv[1:]))) + '\\n')  # one write, whole lines\n"
        "accelerator.end_training()\n",
    )
    flags = ["--num_gpus", "2", "--master_port", str(command.free_port()), "train.py", "--epochs", "3"]
    result = command.run([sys.executable, "-m", "deepspeed.launcher.runner", *flags], OMP_NUM_THREADS="1")
    assert sorted(line for line in result.out.splitlines() if line.startswith("PLACE")) == [
        "PLACE 0 2 2 --local_rank=0 --epochs 3",
        "PLACE 1 2 2 --local_rank=1 --epochs 3",
    ], result.err


def test_all_defaults_write_a_file_that_says_so(inside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("echelon.toml", {})
    assert Path("echelon.toml").read_text().startswith("# All settings have their defaults.")
    write("run.yaml", {})
    assert Path("run.yaml").read_text().startswith("# All settings have their defaults.")
    assert _echelon("config", "explain", "--changed") == 0
    assert capsys.readouterr().out == "settings from echelon.toml\nall settings have their defaults\n"


def test_explain_changed_shows_what_is_not_the_default(
    inside: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("echelon.toml").write_text('mixed_precision = "bf16"\nseed = 3\n')
    monkeypatch.setenv("ECHELON_SEED", "4")
    assert _echelon("config", "explain", "--changed") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["mixed_precision", "'bf16'"], ["seed", "4"]]
