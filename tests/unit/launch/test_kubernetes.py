"""echelon submit kubernetes: the manifests are what Kubernetes and Kubeflow take, and start what was asked for.

The schemas are those of Kubernetes 1.37 and Kubeflow Trainer 2.3 (tests/data/make_cluster_schemas.py).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from echelon.cli.launch import command as launch
from echelon.cli.main import _run

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "kubernetes_schemas.json").read_text())
VERSIONS = {"Job": "batch/v1", "Service": "v1", "Secret": "v1", "TrainJob": "trainer.kubeflow.org/v1alpha1"}
FULL = [
    *("--nodes", "2", "--gpus_per_node", "4", "--cpus", "500m", "--mem", "64Gi", "--shm_size", "8Gi"),
    *(
        "--volume",
        "runs:/runs",
        "--volume",
        "data:/data",
        "--env",
        "A=$(B) $$",
        "--namespace",
        "team",
        "--name",
        "my-run",
    ),
    *("--launch_args", "--parity exact", "--image", "site:5000/a/b@sha256:0f", "/app/train.py", "--lr", "$(id) $$x $"),
]
MINIMAL = ["--image", "a", "train_it.py"]

# kubectl notes its words and its input, one file a call; "secret" says whether there is one.
KUBECTL = r"""#!/bin/bash
n=$(ls "$NOTES" | wc -l)
echo "$@" > "$NOTES/$n.words"
[ "$1" = get ] && { cat "$NOTES/../secret" 2> /dev/null; exit 0; }
cat > "$NOTES/$n.input"
echo "$1 done"
"""


def problems(obj: Any) -> list[str]:
    """Return what the schema of an object's kind has against it."""
    assert obj["apiVersion"] == VERSIONS[obj["kind"]]
    schema = {"$ref": f"#/$defs/{SCHEMAS['about']['kinds'][obj['kind']]}", "$defs": SCHEMAS["$defs"]}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(obj)]


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return what the kubelet makes of a word of ``command``: $(NAME) is replaced, $$ is a $."""
    return re.sub(
        r"\$\$|\$\((\w+)\)", lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), text
    )


def started(words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Return what ``echelon launch`` understands of the command of a container."""
    assert words[:4] == ["python", "-m", "echelon", "launch"]
    settings = {"token_normalize_func": lambda name: name.replace("_", "-")}
    words = [expanded(word, variables) for word in words[4:]]
    return launch.make_context("launch", words, **settings).params


def _objects(capsys: pytest.CaptureFixture[str], *argv: str) -> list[Any]:
    assert _run(["submit", "kubernetes", *argv]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize("argv", [MINIMAL, FULL, ["--user", "0", *FULL]], ids=["minimal", "full", "root"])
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_the_objects_are_valid(capsys: pytest.CaptureFixture[str], kind: str, argv: list[str]) -> None:
    found = _objects(capsys, "--kind", kind, *argv)
    services = ["Service"] if kind == "job" and argv is not MINIMAL else []
    assert [obj["kind"] for obj in found] == [*services, {"job": "Job", "trainjob": "TrainJob"}[kind]]
    assert [problem for obj in found for problem in problems(obj)] == []


def _paths(obj: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(obj, dict):
        yield path
        for name, inner in obj.items():
            # What users name is theirs.
            if name not in ("labels", "selector", "limits", "requests"):
                yield from _paths(inner, *path, name)
    elif isinstance(obj, list):
        for i, inner in enumerate(obj):
            yield from _paths(inner, *path, i)


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_the_schemas_see_an_unknown_field_anywhere(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    for obj in _objects(capsys, "--kind", kind, *FULL):
        paths = list(_paths(obj))
        assert len(paths) > (3 if obj["kind"] == "Service" else 15)
        for path in paths:
            place = obj
            for step in path:
                place = place[step]
            place["mistyped"] = 1
            assert problems(obj), path
            del place["mistyped"]


@pytest.mark.parametrize(
    ("kind", "variables", "head"),
    [
        ("job", {"JOB_COMPLETION_INDEX": "1"}, "my-run-0.my-run"),
        (
            "trainjob",
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "29500", "id": "no"},
            "h",
        ),
    ],
)
def test_a_pod_starts_its_part_of_the_run(
    capsys: pytest.CaptureFixture[str], kind: str, variables: dict[str, str], head: str
) -> None:
    spec = _objects(capsys, "--kind", kind, *FULL)[-1]["spec"]
    container = spec["trainer"] if kind == "trainjob" else spec["template"]["spec"]["containers"][0]
    wait, found = container["command"][:3], expanded(container["command"][3], variables)
    assert (wait[:2], found) == (["python", "-c"], head)
    told = started(container["args"], {**variables, "id": "no", "B": "no"})
    place = {name: told[name] for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port")}
    assert place == {"num_machines": "2", "machine_rank": "1", "main_process_ip": head, "main_process_port": "29500"}
    assert (told["num_processes"], told["parity"]) == ("4", "exact")
    assert (told["script"], told["args"]) == ("/app/train.py", ("--lr", "$(id) $$x $"))
    values = {item["name"]: expanded(item["value"], {"B": "no"}) for item in container["env"] if "value" in item}
    assert values == {"A": "$(B) $$", "HOME": "/tmp", "USER": "trainer"}


def _catches(pid: int, number: int) -> bool:
    """Has the process come to the line that sets a handler?"""
    status = Path(f"/proc/{pid}/status")
    if not status.parent.exists():
        time.sleep(5.0)  # no /proc: macOS
        return True
    (mask,) = re.findall(r"SigCgt:\s+(\w+)", status.read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_pod_waits_until_the_first_one_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    container = _objects(capsys, *FULL)[-1]["spec"]["template"]["spec"]["containers"][0]
    begin = [sys.executable, *container["command"][1:3]]
    done = subprocess.run(
        [*begin, "localhost", "printf", "%s|", "a b", "$x"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "a b|$x|"
    waiting = subprocess.Popen([*begin, "no-such-host.invalid", "printf", "started"], stdout=subprocess.PIPE, text=True)
    while not _catches(waiting.pid, signal.SIGTERM):
        assert waiting.poll() is None
        time.sleep(0.01)
    waiting.terminate()  # asked to end: no failure, as the policy of the Job sees it
    assert waiting.communicate(timeout=60) == ("", None)
    assert waiting.returncode == 143


def test_a_single_machine_gets_no_rendezvous_settings(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = _objects(capsys, *MINIMAL)
    assert job["metadata"]["name"] == "train-it"
    pod = job["spec"]["template"]["spec"]
    told = started(pod["containers"][0]["command"], {})
    assert (told["num_processes"], told["num_machines"], told["main_process_ip"]) == ("1", None, None)
    assert (job["spec"]["completions"], "subdomain" in pod) == (1, False)


def test_pods_find_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = _objects(capsys, *FULL)
    pod = job["spec"]["template"]
    # Pod 0 of an Indexed Job is called NAME-0, in the subdomain that the Service without an address makes a domain.
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", pod["spec"]["subdomain"])
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)


def test_an_eviction_is_not_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    job = _objects(capsys, "--retries", "5", "--grace", "60", *FULL)[-1]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {code: rule["action"] for rule in rules[1:] for code in rule["onExitCodes"]["values"]}
    assert codes == {143: "Ignore", 2: "FailJob"}
    names = {rule["onExitCodes"]["containerName"] for rule in rules[1:]}
    assert names == {container["name"] for container in job["template"]["spec"]["containers"]}
    # Kubernetes wants both with a podFailurePolicy.
    assert (job["template"]["spec"]["restartPolicy"], job["podReplacementPolicy"]) == ("Never", "Failed")
    assert (job["backoffLimit"], job["template"]["spec"]["terminationGracePeriodSeconds"]) == (10, 60)


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_pod_has_shared_memory_its_volumes_and_no_more_rights_than_it_needs(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    def pod_of(*argv: str) -> Any:
        spec = _objects(capsys, "--kind", kind, *argv)[-1]["spec"]
        if kind == "job":
            return spec["template"]["spec"]
        (patch,) = spec["runtimePatches"]
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return replicated["template"]["spec"]["template"]["spec"]

    pod = pod_of(*FULL)
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    assert volumes[mounts["/runs"]] == {"persistentVolumeClaim": {"claimName": "runs"}}
    assert volumes[mounts["/data"]] == {"persistentVolumeClaim": {"claimName": "data"}}
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 1000)
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    root = pod_of("--user", "0", *FULL)
    assert "runAsNonRoot" not in root["securityContext"]
    assert "capabilities" not in root["containers"][0]["securityContext"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_the_secret_is_named_and_goes_to_kubectl_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL)
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))

    def apply() -> tuple[dict[str, str], str]:
        assert _run(["submit", "kubernetes", "--apply", "--kind", kind, *FULL]) == 0
        told = "".join(capfd.readouterr())
        files = sorted((tmp_path / "notes").iterdir())
        notes = {file.name: file.read_text() for file in files}
        for file in files:
            file.unlink()
        return notes, told

    notes, told = apply()
    words = [text.strip() for name, text in notes.items() if name.endswith("words")]
    assert words == [
        "get secret my-run-token --namespace team --ignore-not-found --output=name",
        "create --namespace team --filename=-",
        "apply --namespace team --filename=-",
    ]
    given, applied = (text for name, text in notes.items() if name.endswith("input"))
    secret = json.loads(given)
    assert problems(secret) == []
    token = secret["stringData"]["token"]
    assert len(token) == 64
    assert not any(token in text for text in (applied, told, *words))
    job = list(yaml.safe_load_all(applied))[-1]["spec"]
    container = job["trainer"] if kind == "trainjob" else job["template"]["spec"]["containers"][0]
    named = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "token"}}
    assert {"name": "ECHELON_TOKEN", "valueFrom": named} in container["env"]

    (tmp_path / "secret").write_text("secret/my-run-token\n")  # one that is there is kept
    notes, _ = apply()
    assert [text.split()[0] for name, text in notes.items() if name.endswith("words")] == ["get", "apply"]


def test_a_printed_manifest_says_where_the_secret_comes_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _run(["submit", "kubernetes", "--secret", "shared", "--output", str(tmp_path / "job.yaml"), *FULL]) == 0
    told = capsys.readouterr()
    assert (told.out, "kubectl create secret generic shared --from-file=token=FILE" in told.err) == ("", True)
    assert "name: shared" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["train.py"], ["--image is missing", "add --image IMAGE"]),
        (["--image", "a b", "train.py"], ["'a b' is not a valid value for Kubernetes", "flag --image"]),
        (["--name", "My_Run", *MINIMAL], ["'My_Run'", "flag --name", "lower-case"]),
        (["--image", "a", "7.py"], ["'7'", "flag --name"]),
        (["--mem", "64 GB", *MINIMAL], ["'64 GB'", "flag --mem", "64Gi"]),
        (["--volume", "runs", *MINIMAL], ["'runs' has no ':'", "flag --volume"]),
        (["--volume", "runs:out", *MINIMAL], ["runs:out is not a volume", "CLAIM:/path"]),
        (["--grace", "25", *MINIMAL], ["killed 25 s after", "may take 25 s", "more than 25 s"]),
        (["--apply", "--output", "job.yaml", *MINIMAL], ["--apply and --output are mutually exclusive"]),
        (["--kind", "pytorchjob", *MINIMAL], ["pytorchjob", "trainjob"]),
    ],
)
def test_invalid_values_raise(capsys: pytest.CaptureFixture[str], argv: list[str], texts: list[str]) -> None:
    assert _run(["submit", "kubernetes", *argv]) == 2
    told = capsys.readouterr().err
    assert [text for text in texts if text not in told] == [], told


def test_missing_kubectl_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _run(["submit", "kubernetes", "--apply", *MINIMAL]) == 1
    assert "kubectl is not installed on this machine" in capsys.readouterr().err
