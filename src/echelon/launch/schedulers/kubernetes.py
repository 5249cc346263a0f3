"""The Kubernetes objects for a training job: an Indexed Job with its Service, or a Kubeflow TrainJob.

Each pod runs one launcher, whose machine rank is the pod's index. Pod 0 is the rendezvous host and is found by its DNS
name. The launchers share a Secret; the manifest contains only its name (``token_secret``).

A preemption (exit code 143, for example on a drained node) is not a failure: the pod is recreated and resumes from the
last checkpoint. An invalid command line (exit code 2) fails the Job immediately, because retries would also fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echelon.base.errors import ConfigError
from echelon.base.messages.translation import gettext as _
from echelon.launch.job_token import TOKEN_VARIABLE
from echelon.launch.script import Script
from echelon.status.stop_barrier import EXIT_CODE

Object = dict[str, Any]
Kind = Literal["job", "trainjob"]

# A pod may start before the DNS name of pod 0 exists. Process 1 ignores SIGTERM unless it has a handler,
# which ends the process at once: sys.exit() would wait for the name server's answer.
_WAIT = """\
import os, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
while True:
    try:
        socket.getaddrinfo(sys.argv[1], None)
        break
    except OSError:
        time.sleep(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

_CONTAINER = "trainer"
_WRONG_COMMAND_LINE = 2
# Name of the container and its job in Kubeflow's runtimes.
_NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodJob:
    """Options of the job."""

    name: str
    image: str
    script: Script
    """Script path, module or program in the image."""
    nodes: int = 1
    """Number of pods."""
    processes: int = 1
    """Number of processes per pod."""
    gpus: int = 0
    """Number of GPUs per pod."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str | None = None
    memory: str | None = None
    shared_memory: str | None = None
    """Size limit of /dev/shm; None for the pod's memory."""
    volumes: tuple[tuple[str, str], ...] = ()
    """(PersistentVolumeClaim, mount path) for storage that outlives the pods and holds the checkpoints."""
    variables: Mapping[str, str]
    namespace: str | None = None
    secret: str
    """Name of the Secret whose ``token`` key the launchers share."""
    user: int = 1000
    """User id in the container; 0 keeps the image's user, which may be root."""
    preemption_grace_s: float
    """How long the ranks may take to agree on a step (``echelon launch --preemption_grace``)."""
    grace_s: int = 120
    """Number of seconds between SIGTERM and SIGKILL, during which the ranks agree on a step and save."""
    retries: int = 3
    """Number of run failures that the Job tolerates."""
    port: int = 29500
    python: str = "python"
    launch_args: tuple[str, ...] = ()
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""


def objects(job: PodJob, kind: Kind) -> list[Object]:
    """Return the objects to apply, without the Secret.

    Raises:
        ConfigError: Kubernetes would reject a value, or the grace period would end before the ranks could save.
    """
    _check(job)
    if kind == "trainjob":
        return [train_job(job)]
    return [*([_service(job)] if job.nodes > 1 else []), indexed_job(job)]


def token_secret(job: PodJob, token: str) -> Object:
    """Return the Secret that contains ``token``. Pass it only to kubectl's standard input."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, job.secret),
        "type": "Opaque",
        "stringData": {"token": token},
    }


def indexed_job(job: PodJob) -> Object:
    """Return the Job: one indexed pod per machine."""
    head = f"{job.name}-0.{job.name}"
    container = {
        "name": _CONTAINER,
        "image": job.image,
        **_command(job, str(job.nodes), "$(JOB_COMPLETION_INDEX)", head, str(job.port)),
        "env": _env(job),
        "resources": _resources(job),
        "volumeMounts": _mounts(job),
        "securityContext": _container_security(job),
    }
    pod = {
        "restartPolicy": "Never",  # keeps the log of a failed pod; podFailurePolicy handles its exit code
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,  # training does not use the cluster's API
        "enableServiceLinks": False,
        **({"subdomain": job.name} if job.nodes > 1 else {}),
        **_pod_security(job),
        "containers": [container],
        "volumes": _volumes(job),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, job.name),
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.retries * job.nodes,  # a failure of the run fails all its pods
            "podReplacementPolicy": "Failed",  # two pods with one index would be two machines with one rank
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    _on_exit("Ignore", EXIT_CODE),
                    _on_exit("FailJob", _WRONG_COMMAND_LINE),
                ]
            },
            "template": {"metadata": {"labels": _labels(job)}, "spec": pod},
        },
    }


def train_job(job: PodJob) -> Object:
    """Return the TrainJob for Kubeflow Trainer 2.2 or newer, whose runtime handles failed pods."""
    patch = {
        "terminationGracePeriodSeconds": job.grace_s,
        **_pod_security(job),
        "volumes": _volumes(job),
        "containers": [{"name": _NODE, "volumeMounts": _mounts(job), "securityContext": _container_security(job)}],
    }
    trainer = {
        "image": job.image,
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        **_command(job, "$(PET_NNODES)", "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)"),
        "env": _env(job),
        "resourcesPerNode": _resources(job),
    }
    replicated = {"name": _NODE, "template": {"spec": {"template": {"spec": patch}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.name),
        "spec": {
            "runtimeRef": {"name": job.runtime},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "echelon.submit",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def _service(job: PodJob) -> Object:
    """Return the headless Service that gives the pods DNS names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods resolve pod 0 while it starts
            "selector": _labels(job),
            "ports": [{"name": "rendezvous", "port": job.port}],
        },
    }


def _command(job: PodJob, count: str, rank: str, head: str, port: str) -> Object:
    """Return the container's command; Kubernetes expands ``$(NAME)`` in the last four arguments."""
    script = job.script
    kind = {"script": [], "module": ["-m"], "program": ["--no_python"]}[script.kind]
    words = ["--nproc_per_node", str(job.processes), *job.launch_args, *kind, script.target, *script.args]
    # Escape the user's words: Kubernetes must not expand $(NAME) or $$ in them.
    words = [word.replace("$", "$$") for word in words]
    launch = [job.python, "-m", "echelon", "launch"]
    if job.nodes == 1:
        return {"command": [*launch, *words]}
    flags = {"num_machines": count, "machine_rank": rank, "main_process_ip": head, "main_process_port": port}
    machines = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return {"command": [job.python, "-c", _WAIT, head], "args": [*launch, *machines, *words]}


def _env(job: PodJob) -> list[Object]:
    values = dict(job.variables)
    if job.user:
        # In most images, the user id has no name and no home folder, which torch needs.
        values = {"HOME": "/tmp", "USER": "trainer", **values}
    env: list[Object] = [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]
    if job.nodes > 1:
        env.append({"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "token"}}})
    return env


def _resources(job: PodJob) -> Object:
    limits: Object = {
        **({job.gpu_resource: job.gpus} if job.gpus else {}),
        **({"memory": job.memory} if job.memory else {}),
    }
    # No CPU limit, because it would throttle a busy rank and delay all other ranks.
    requests = {**({"cpu": job.cpus} if job.cpus else {}), **({"memory": job.memory} if job.memory else {})}
    return {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}


def _volumes(job: PodJob) -> list[Object]:
    # The default of 64 MB is too small for DataLoader workers and NCCL.
    memory = {"medium": "Memory", **({"sizeLimit": job.shared_memory} if job.shared_memory else {})}
    claims = [
        {"name": f"data-{i}", "persistentVolumeClaim": {"claimName": claim}} for i, (claim, _) in enumerate(job.volumes)
    ]
    return [{"name": "shm", "emptyDir": memory}, *claims]


def _mounts(job: PodJob) -> list[Object]:
    claims = [{"name": f"data-{i}", "mountPath": path} for i, (_, path) in enumerate(job.volumes)]
    return [{"name": "shm", "mountPath": "/dev/shm"}, *claims]


def _pod_security(job: PodJob) -> Object:
    profile = {"seccompProfile": {"type": "RuntimeDefault"}}
    if not job.user:
        return {"securityContext": profile}
    ids = {"runAsNonRoot": True, "runAsUser": job.user, "runAsGroup": job.user, "fsGroup": job.user}
    return {"securityContext": {**ids, "fsGroupChangePolicy": "OnRootMismatch", **profile}}


def _container_security(job: PodJob) -> Object:
    if not job.user:
        return {"allowPrivilegeEscalation": False}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _on_exit(action: str, code: int) -> Object:
    return {"action": action, "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [code]}}


def _labels(job: PodJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "echelon", "app.kubernetes.io/instance": job.name}


def _metadata(job: PodJob, name: str) -> Object:
    return {
        "name": name,
        **({"namespace": job.namespace} if job.namespace else {}),
        "labels": _labels(job),
    }


# A DNS label (RFC 1123) that leaves room for -N-xxxxx, which Kubernetes appends to names of pods.
_NAME = r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?"
_QUANTITY = r"\d+(\.\d+)?(m|[kKMGTPE]i?)?"


def _check(job: PodJob) -> None:
    _check_form("--name", job.name, _NAME, _("use at most 52 lower-case letters, digits and -, starting with a letter"))
    for flag, name in (("--secret", job.secret), ("--namespace", job.namespace), ("--runtime", job.runtime)):
        _check_form(flag, name, r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", _("use lower-case letters, digits, - and ."))
    _check_form("--image", job.image, r"[\w./:@-]+", _("use an image such as registry/project/image:tag"))
    for flag, amount in (("--cpus", job.cpus), ("--mem", job.memory), ("--shm_size", job.shared_memory)):
        _check_form(flag, amount, _QUANTITY, _("use a Kubernetes quantity such as 8, 500m or 64Gi"))
    for name in job.variables:
        _check_form("--env", name, r"[A-Z_a-z][\w.-]*", _("use NAME=VALUE"))
    for claim, path in job.volumes:
        if not path.startswith("/") or ":" in path or not claim:
            raise ConfigError(
                _("{claim}:{path} is not a volume", claim=claim, path=path),
                where=_("flag {name}", name="--volume"),
                do=_("use CLAIM:/path/in/the/pod"),
            )
    if job.grace_s <= job.preemption_grace_s:
        raise ConfigError(
            _(
                "a pod is killed {grace_s} s after SIGTERM, but the ranks may take {preemption_grace_s:g} s to agree "
                "on a step",
                grace_s=job.grace_s,
                preemption_grace_s=job.preemption_grace_s,
            ),
            where=_("flag {name}", name="--grace"),
            do=_(
                "use more than {preemption_grace_s:g} s plus the time that a save takes",
                preemption_grace_s=job.preemption_grace_s,
            ),
        )


def _check_form(flag: str, text: str | None, form: str, do: str) -> None:
    if text is not None and re.fullmatch(form, text, flags=re.ASCII) is None:
        raise ConfigError(
            _("{text!r} is not a valid value for Kubernetes", text=text), where=_("flag {name}", name=flag), do=do
        )
