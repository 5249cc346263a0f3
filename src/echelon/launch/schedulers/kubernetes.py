"""The objects by which Kubernetes runs a training: an Indexed Job with its Service, or a TrainJob of Kubeflow.

A pod is a machine: it runs one launcher, whose machine rank is the pod's index and whose head is pod 0, found by its name. The
secret that the launchers share is named here, and never written: it lives in a Secret (``token_secret``).

An asked-for end (exit code 143: the node is drained, the pod preempted) is no failure: the pod is made again, and goes on from the
last checkpoint. A wrong command line (2) would fail the same way again: it ends the Job at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from echelon.base.errors import ConfigError
from echelon.launch.multinode.job_token import TOKEN_VARIABLE
from echelon.launch.script import Script
from echelon.status.stop_barrier import EXIT_CODE

__all__ = ["PodJob", "indexed_job", "objects", "token_secret", "train_job"]

Object = dict[str, Any]
Kind = Literal["job", "trainjob"]

# A pod may run before pod 0 has a name. As process 1 it is asked to end in vain, unless it has a handler.
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
# The name of the container and of its job in the runtimes that Kubeflow brings.
_NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodJob:
    """What the user chose."""

    name: str
    image: str
    script: Script
    """A path, module or program inside the image."""
    nodes: int = 1
    """How many pods."""
    processes: int = 1
    """In each pod."""
    gpus: int = 0
    """Of each pod."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: str | None = None
    memory: str | None = None
    shared_memory: str | None = None
    """The most that /dev/shm may take; None: what the pod's memory allows."""
    volumes: tuple[tuple[str, str], ...] = ()
    """(PersistentVolumeClaim, path): what outlives the pods, so checkpoints."""
    variables: Mapping[str, str]
    namespace: str | None = None
    secret: str
    """The Secret whose key ``token`` the launchers share."""
    user: int = 1000
    """The user id in the container; 0: root is allowed, and the image says who it is."""
    preemption_grace_s: float
    """What the ranks have to come to one step (``echelon launch --preemption_grace``)."""
    grace_s: int = 120
    """Between SIGTERM and SIGKILL: to come to one step, and to save."""
    retries: int = 3
    """Failures of the whole run before the Job has failed."""
    port: int = 29500
    python: str = "python"
    launch_args: tuple[str, ...] = ()
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""


def objects(job: PodJob, kind: Kind) -> list[Object]:
    """Return what is to be applied, without the Secret.

    Raises:
        ConfigError: a value that Kubernetes would not take, or a grace that is over before the ranks have saved.
    """
    _check(job)
    if kind == "trainjob":
        return [train_job(job)]
    return [*([_service(job)] if job.nodes > 1 else []), indexed_job(job)]


def token_secret(job: PodJob, token: str) -> Object:
    """Return the Secret that holds ``token``: for the standard input of kubectl, and for nothing else."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, job.secret),
        "type": "Opaque",
        "stringData": {"token": token},
    }


def indexed_job(job: PodJob) -> Object:
    """Return the Job: one pod a machine, with an index."""
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
        "restartPolicy": "Never",  # a failed pod's log stays, and its exit code is judged below
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,  # a training has nothing to tell the cluster
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
            "backoffLimit": job.retries * job.nodes,  # a run that fails ends all of its pods
            "podReplacementPolicy": "Failed",  # two pods of one index would be two machines of one rank
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
    """Return the TrainJob of Kubeflow Trainer 2.2 or newer; its runtime says what happens to failed pods."""
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
    """Return the Service without an address of its own, by which the pods find each other's names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # they look for pod 0 while it starts
            "selector": _labels(job),
            "ports": [{"name": "rendezvous", "port": job.port}],
        },
    }


def _command(job: PodJob, count: str, rank: str, head: str, port: str) -> Object:
    """Return what the container runs; Kubernetes puts the value of a variable for ``$(NAME)`` in the last four."""
    script = job.script
    kind = {"script": [], "module": ["-m"], "program": ["--no_python"]}[script.kind]
    words = ["--nproc_per_node", str(job.processes), *job.launch_args, *kind, script.target, *script.args]
    # What the user wrote is to arrive as it is written: $(NAME) in it, and $$, too.
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
        # A user id without a name or a home, in most images: torch asks for both.
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
    # A limit on the CPU would make a busy rank wait, and all others with it.
    requests = {**({"cpu": job.cpus} if job.cpus else {}), **({"memory": job.memory} if job.memory else {})}
    return {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}


def _volumes(job: PodJob) -> list[Object]:
    # The 64 MB that containers have by default are too few for the workers of a DataLoader, and for NCCL.
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


# A label of DNS (RFC 1123), shorter than its 63 characters: pods get -N-xxxxx behind it.
_NAME = r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?"
_QUANTITY = r"\d+(\.\d+)?(m|[kKMGTPE]i?)?"


def _check(job: PodJob) -> None:
    _check_form("--name", job.name, _NAME, "give lower-case letters, digits and -, at most 52, the first a letter")
    for flag, name in (("--secret", job.secret), ("--namespace", job.namespace), ("--runtime", job.runtime)):
        _check_form(flag, name, r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", "give lower-case letters, digits, - and .")
    _check_form("--image", job.image, r"[\w./:@-]+", "name an image, such as registry/project/image:tag")
    for flag, amount in (("--cpus", job.cpus), ("--mem", job.memory), ("--shm_size", job.shared_memory)):
        _check_form(flag, amount, _QUANTITY, "give a quantity of Kubernetes, such as 8, 500m or 64Gi")
    for name in job.variables:
        _check_form("--env", name, r"[A-Z_a-z][\w.-]*", "give NAME=VALUE")
    for claim, path in job.volumes:
        if not path.startswith("/") or ":" in path or not claim:
            raise ConfigError(f"{claim}:{path} is no volume", where="flag --volume", do="give CLAIM:/path/in/the/pod")
    if job.grace_s <= job.preemption_grace_s:
        raise ConfigError(
            f"a pod is killed {job.grace_s} s after it was asked to end, and the ranks may take {job.preemption_grace_s:g} s "
            "to come to one step",
            where="flag --grace",
            do=f"give more than {job.preemption_grace_s:g} s, and the time that a checkpoint takes",
        )


def _check_form(flag: str, text: str | None, form: str, do: str) -> None:
    if text is not None and re.fullmatch(form, text, flags=re.ASCII) is None:
        raise ConfigError(f"{text!r} is not what Kubernetes takes", where=f"flag {flag}", do=do)
