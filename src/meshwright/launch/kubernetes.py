"""Kubernetes objects of a run: a JobSet (v1alpha2), or a TrainJob of Kubeflow Trainer v2 with its TrainingRuntime."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from meshwright.config.yaml_positions import dump_yaml
from meshwright.launch.scheduler_job import (
    KEPT_FILES,
    REQUEUE_CODES,
    STOP_CODES,
    SchedulerJob,
    comment,
)
from meshwright.spec.errors import BadInput
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.node_label import LABEL_KEY
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE, HOST_VARIABLE

PORT = 29400
"""TCP port of the coordinator."""
TOKEN_FOLDER = "/etc/meshwright-token"
"""Where the job token is mounted in pods."""
STORAGE_FOLDER = "/workspace"
"""Where the shared storage is mounted in pods."""
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
LONGEST_NAME = 63
"""Most characters of an object's name, which is a DNS label."""
LARGEST_CONFIG_MAP = 1 << 20
"""Most bytes of a ConfigMap, a limit of Kubernetes."""
LABEL_ACCOUNT = "meshwright-labels"
"""Name of the service account with which pods label the nodes of excluded hosts, and of its cluster role."""
REPLICATED_JOB = "node"
"""Name of the replicated job, and of its container. Kubeflow's trainer expects this name."""

LONGEST_DNS_NAME = 253
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_IMAGE = re.compile(r"[][A-Za-z0-9._/:@+-]+")

Object = dict[str, Any]
"""A Kubernetes object, or a part of one."""


@dataclass(frozen=True)
class Container:
    """Image and storage of the pods, or of SkyPilot's machines."""

    image: str
    claim: str | None
    """Name of the PersistentVolumeClaim, or of SkyPilot's volume, that all hosts mount. It holds data and run folders.

    Pods need one.
    """

    def __post_init__(self) -> None:
        """Raise BadInput for values that Kubernetes would refuse."""
        if not _IMAGE.fullmatch(self.image):
            raise BadInput(f"--image {self.image!r}: expected an image such as registry.example/meshwright:1")
        if self.claim is None:
            return
        if len(self.claim) > LONGEST_DNS_NAME or not _DNS_NAME.fullmatch(self.claim):
            raise BadInput(
                f"--claim {self.claim!r}: expected lower-case letters, digits, '-' and '.', as in shared-data"
            )


@dataclass(frozen=True)
class Queue:
    """The run's queue in Kueue, and the topology level within which Kueue should place its hosts."""

    name: str
    topology: str | None = None
    """Node label of the topology level, for example `cloud.google.com/gce-topology-block`."""

    def __post_init__(self) -> None:
        """Raise BadInput for values that Kubernetes would refuse."""
        if len(self.name) > LONGEST_NAME or not _DNS_NAME.fullmatch(self.name) or "." in self.name:
            raise BadInput(f"--queue {self.name!r}: expected lower-case letters, digits and '-', as in team-queue")
        if self.topology is not None and not LABEL_KEY.fullmatch(self.topology):
            raise BadInput(f"--topology {self.topology!r}: expected a label of nodes such as topology.example/rack")

    @property
    def labels(self) -> dict[str, str]:
        """Labels for the object that Kueue admits."""
        return {"kueue.x-k8s.io/queue-name": self.name}

    @property
    def pod_annotations(self) -> dict[str, str]:
        """Annotations for the template of the pods."""
        return {} if self.topology is None else {"kueue.x-k8s.io/podset-preferred-topology": self.topology}


def jobset_yaml(job: SchedulerJob, container: Container, queue: Queue | None = None) -> str:
    """Return the JobSet, its run file and its network policy as YAML documents.

    Raises BadInput if the run file is too large.
    """
    name = object_name(job)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(name, queue),
        "spec": _suspended(queue) | _jobset_spec(job, container, name, queue),
    }
    return _documents(job, name, [_network_policy(name), jobset])


def trainjob_yaml(job: SchedulerJob, container: Container, queue: Queue | None = None) -> str:
    """Return the TrainJob, its TrainingRuntime, run file and network policy as YAML documents.

    Raises BadInput like `jobset_yaml`.
    """
    name = object_name(job)
    spec = _jobset_spec(job, container, name, queue, labels={"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"})
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {"mlPolicy": {"numNodes": job.hosts}, "template": {"spec": spec}},
    }
    trainjob = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _queued(name, queue),
        "spec": _suspended(queue)
        | {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
            "trainer": {"numNodes": job.hosts},
        },
    }
    return _documents(job, name, [_network_policy(name), runtime, trainjob])


def object_name(job: SchedulerJob) -> str:
    """Return the run's name as a DNS label.

    It is short enough that the names of the pods fit into `LONGEST_NAME` characters.

    Kubernetes appends a suffix to it for each pod, for example "-node-0-15-abcde".
    """
    longest = LONGEST_NAME - len(f"-{REPLICATED_JOB}-0-{job.hosts - 1}-abcde")
    label = re.sub(r"[^a-z0-9]+", "-", job.run.name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}" if label else "run"
    return label[:longest].rstrip("-")


def _queued(name: str, queue: Queue | None) -> Object:
    """Return the metadata of the object that starts the run."""
    return {"name": name} | ({"labels": queue.labels} if queue is not None else {})


def _suspended(queue: Queue | None) -> Object:
    """Return the field that suspends a queued object. Kueue removes it when it admits the object."""
    return {"suspend": True} if queue is not None else {}


def _jobset_spec(
    job: SchedulerJob, container: Container, name: str, queue: Queue | None, labels: dict[str, str] | None = None
) -> Object:
    """Return the specification of the JobSet. Exit codes decide whether it is restarted or fails for good."""
    metadata = {"metadata": {"labels": labels}} if labels else {}
    template = metadata | {"spec": _job_spec(job, container, name, queue)}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.run.supervision.restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                _rule("stop", "FailJobSet", index=0),
                _rule("requeue", "RestartJobSetAndIgnoreMaxRestarts", index=1),
            ],
        },
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
    }


def _rule(name: str, action: str, index: int) -> Object:
    """Return a failure rule of the JobSet for jobs that failed by rule `index` of their podFailurePolicy.

    Such a job's failure message ends with "rule at index N".
    """
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"rule at index {index}$"],
    }


def _job_spec(job: SchedulerJob, container: Container, name: str, queue: Queue | None) -> Object:
    """Return the specification of a job with one pod for each host.

    If a pod fails with an exit code that no rule names, Kubernetes creates it again, and its agent rejoins the run.
    """
    annotations = queue.pod_annotations if queue is not None else {}
    return {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        "backoffLimit": job.hosts * job.run.supervision.restarts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _exit_rule("FailJob", STOP_CODES),
                _exit_rule("FailJob", REQUEUE_CODES),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": ({"metadata": {"annotations": annotations}} if annotations else {})
        | {"spec": _pod_spec(job, container, name)},
    }


def _exit_rule(action: str, codes: tuple[int, ...]) -> Object:
    return {
        "action": action,
        "onExitCodes": {"containerName": REPLICATED_JOB, "operator": "In", "values": sorted(codes)},
    }


def _pod_spec(job: SchedulerJob, container: Container, name: str) -> Object:
    """Return the specification of a pod. No two pods of the run share a host."""
    one_pod_per_host = {
        "labelSelector": {"matchLabels": {JOBSET_NAME_LABEL: name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.stop_seconds,
        **_account(job),
        "enableServiceLinks": False,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [one_pod_per_host]}},
        "containers": [_container(job, container, name)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "run-file", "configMap": {"name": f"{name}-run"}},
            {"name": "token", "secret": {"secretName": f"{name}-token", "defaultMode": 0o440}},
            {"name": "storage", "persistentVolumeClaim": {"claimName": container.claim}},
        ],
    }


def _account(job: SchedulerJob) -> Object:
    """Return the fields for the pods' service account: the account that may label nodes, or none."""
    if job.run.supervision.report_label is None:
        return {"automountServiceAccountToken": False}
    return {"serviceAccountName": LABEL_ACCOUNT, "automountServiceAccountToken": True}


def _container(job: SchedulerJob, container: Container, name: str) -> Object:
    """Return the container of a pod, which runs one agent."""
    cluster = job.run.cluster
    limits: Object = (
        {f"{job.gpu_vendor}/gpu": cluster.gpus_per_node} if job.gpu_vendor else {"cpu": cluster.gpus_per_node}
    )
    if cluster.host_memory_gib is not None:
        limits["memory"] = f"{int(cluster.host_memory_gib * 1024)}Mi"
    return {
        "name": REPLICATED_JOB,
        "image": container.image,
        "command": command_arguments("meshwright", *job.agent_arguments([f"{KEPT_FILES}/run.yaml"])),
        "workingDir": STORAGE_FOLDER,
        "env": [
            {"name": COORDINATOR_VARIABLE, "value": f"{name}-{REPLICATED_JOB}-0-0.{name}:{PORT}"},
            {"name": TOKEN_VARIABLE, "value": f"{TOKEN_FOLDER}/token"},
            {"name": HOST_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "run-file", "mountPath": KEPT_FILES, "readOnly": True},
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "storage", "mountPath": STORAGE_FOLDER},
        ],
    }


def command_arguments(*arguments: str) -> list[str]:
    """Return the arguments of a container's command. `$` is doubled, because Kubernetes replaces `$(NAME)` in them."""
    return [word.replace("$", "$$") for word in arguments]


def _config_map(job: SchedulerJob, name: str) -> str:
    """Return the ConfigMap with the run's files as literal blocks, which people can read and edit."""
    files = job.files()
    size = sum(len(text.encode()) for text in files.values())
    if size > LARGEST_CONFIG_MAP:
        raise BadInput(
            f"run file, plan and profile have {size:,} bytes; expected at most {LARGEST_CONFIG_MAP:,}, the limit of a "
            "ConfigMap; leave out cluster.profile"
        )
    head = dump_yaml({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-run"}})
    return "".join([head, "data:\n", *(block(file, text, depth=1) for file, text in files.items())])


def block(key: str, text: str, depth: int) -> str:
    """Return `key: text` as YAML, indented by two spaces for each level of `depth`.

    The text is a literal block (`|`) where possible. It is quoted if YAML would read another text from such a block.
    """
    body = text.removesuffix("\n")
    margin = " " * 2 * depth
    if (
        body
        and all(line.isprintable() and (line.strip() or not line) for line in body.split("\n"))
        and body[-1] != "\n"
    ):
        return f"{margin}{key}: |2{'-' if body == text else ''}\n{indent(body, margin + '  ')}\n"
    return indent(dump_yaml({key: text}), margin)


def _network_policy(name: str) -> Object:
    """Return a policy that lets only pods of the same run reach each other.

    It is needed because stores and NCCL listen on all addresses of a pod and ask for no token.
    """
    pods = {"matchLabels": {JOBSET_NAME_LABEL: name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]},
    }


def _documents(job: SchedulerJob, name: str, objects: list[Object]) -> str:
    """Return the ConfigMap and the objects as YAML documents, after comments with the commands that start the run."""
    header = [
        comment(job.summary),
        "# Before the first start, a token that the pods share:",
        f'#   kubectl create secret generic {name}-token --from-literal=token="$(openssl rand -hex 32)"',
        *_account_commands(job),
        "# Then: kubectl apply -f FILE",
    ]
    return "\n".join([*header, "---\n".join(["", _config_map(job, name), *map(dump_yaml, objects)])])


def _account_commands(job: SchedulerJob) -> list[str]:
    """Return comments with the commands by which an administrator allows the pods to label nodes."""
    if job.run.supervision.report_label is None:
        return []
    return [
        "# For supervision.report_label an administrator lets pods of a namespace label nodes:",
        f"#   kubectl create serviceaccount {LABEL_ACCOUNT} --namespace NAMESPACE",
        f"#   kubectl create clusterrole {LABEL_ACCOUNT} --verb=patch --resource=nodes",
        f"#   kubectl create clusterrolebinding {LABEL_ACCOUNT}-NAMESPACE --clusterrole={LABEL_ACCOUNT} "
        f"--serviceaccount=NAMESPACE:{LABEL_ACCOUNT}",
    ]
