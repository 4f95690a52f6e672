"""Kubernetes objects of a serving deployment: servers of each role, a router and a block cache.

The servers of a role are a StatefulSet, or a LeaderWorkerSet with groups of one pod. Both keep the names of their pods,
which is necessary because decode servers know the prefill servers by name. The router knows each role by the name of
its headless service, and looks up the addresses of the pods repeatedly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from meshwright.config.deployment_file import deployment_yaml, server_settings
from meshwright.config.yaml_positions import dump_yaml
from meshwright.launch.kubernetes import STORAGE_FOLDER, Container, Object, Queue, command_arguments
from meshwright.launch.scheduler_job import KEPT_FILES, check_text, comment
from meshwright.spec.deployment import Deployment, Role, deployment_name
from meshwright.spec.errors import BadInput

HTTP_PORT = 8000
"""TCP port of servers and routers for requests."""
TRANSFER_PORT = 8100
"""TCP port of prefill servers for exchanges with other engines."""
CACHE_PORT = 8200
"""TCP port of the block cache."""
NAME_LABEL = "app.kubernetes.io/name"
"""Label of all pods, with the deployment's name."""
COMPONENT_LABEL = "app.kubernetes.io/component"
"""Label of all pods, with the component: a role, `router` or `cache`."""
DEPLOYMENT_FILE = "deployment.yaml"
"""File name of the deployment's plan in the ConfigMap."""
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
"""All roles of a server, in the order of the objects."""
LONGEST_NAME = 40
"""Most characters of the deployment's name. The names of its pods are longer, and have a limit of 63."""
MOST_CACHE_GIB = 10**6
"""Largest block cache, in GiB."""
ROUTERS = 2
"""Number of routers. With two, one may fail."""
START_SECONDS = 1800
"""Seconds that a server may take to load its model."""
END_SECONDS = 60
"""Seconds for which running requests may continue when a pod is stopped."""


@dataclass(frozen=True)
class ServingJob:
    """A serving deployment, and how Kubernetes runs it."""

    deployment: Deployment
    # `name` is the deployment's name, and the model's name in the API.
    name: str
    model: str
    """Folder of the model, on the mounted volume or in the image."""
    container: Container
    cache_gib: float | None = None
    """GiB of host memory for a block cache that all servers share; None without such a cache."""
    queue: Queue | None = None
    """Kueue's queue that admits the servers; None without Kueue."""
    leader_worker_set: bool = False
    """Whether servers are LeaderWorkerSets. Kueue then admits each server separately; it admits a StatefulSet as a whole."""

    def __post_init__(self) -> None:
        """Raise BadInput for a name that is too long or no DNS label, and for a cache of an impossible size."""
        if not re.fullmatch(rf"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", self.name):
            raise BadInput(
                f"--name {self.name!r}: expected at most {LONGEST_NAME} lower-case letters, digits and -, with a letter first"
            )
        check_text(self.model, "--model")
        if self.cache_gib is not None and not 0 < self.cache_gib <= MOST_CACHE_GIB:
            raise BadInput(f"--cache-gib {self.cache_gib:g}: expected more than 0 and at most {MOST_CACHE_GIB:,}")

    @property
    def roles(self) -> dict[Role, int]:
        """Number of servers of each role; roles without servers are left out."""
        counts = {
            role: sum(instance.count for instance in self.deployment.instances if instance.role == role)
            for role in ROLES
        }
        return {role: count for role, count in counts.items() if count}

    def service(self, component: str) -> str:
        """Return the name of a component's service and set of pods. A component is a role, `router` or `cache`."""
        return f"{self.name}-{component}"


def serving_yaml(job: ServingJob) -> str:
    """Return all objects as YAML documents. Raises BadInput for a deployment that this release cannot serve."""
    if job.cache_gib is not None and any(instance.expert > 1 for instance in job.deployment.instances):
        raise BadInput("--cache-gib: instances with groups of experts read no cache of blocks")
    objects = [_plan_file(job), _network_policy(job)]
    for role in job.roles:
        objects += [_service(job, role, headless=True), _servers(job, role)]
    if job.cache_gib is not None:
        arguments = ["cache", f"0.0.0.0:{CACHE_PORT}", "--gib", f"{job.cache_gib:g}"]
        memory = {"memory": f"{int(job.cache_gib * 1024) + 1024}Mi"}
        objects += [_service(job, "cache", port=CACHE_PORT), _deployment(job, "cache", arguments, CACHE_PORT, memory)]
    urls = [f"http://{job.service(role)}:{HTTP_PORT}" for role in job.roles]
    arguments = ["route", *urls, "--host", "0.0.0.0", "--port", str(HTTP_PORT)]
    objects += [_service(job, "router"), _deployment(job, "router", arguments, HTTP_PORT, {}, replicas=ROUTERS)]
    secret = f"{job.name}-keys"
    header = [
        comment(deployment_name(job.deployment)),
        "# Before the first start, the keys of clients and of the servers among themselves:",
        f'#   kubectl create secret generic {secret} --from-literal=api="$(openssl rand -hex 32)" \\',
        '#     --from-literal=transfer="$(openssl rand -hex 32)"',
        f"# Then: kubectl apply -f FILE; clients ask http://{job.service('router')}:{HTTP_PORT}/v1 for model {job.name}",
    ]
    return "\n".join([*header, "---\n".join(["", *map(dump_yaml, objects)])])


def _servers(job: ServingJob, role: Role) -> Object:
    """Return the set of servers of one role. If a server's engine fails, its pod ends and is started again."""
    settings = server_settings(job.deployment, role)
    devices = settings["tensor"] * settings.get("expert", 1)
    arguments = ["serve", job.model, "--plan", f"{KEPT_FILES}/{DEPLOYMENT_FILE}", "--role", role, "--name", job.name]
    arguments += ["--host", "0.0.0.0", "--port", str(HTTP_PORT), "--drain-seconds", str(END_SECONDS - 15)]
    if role == "prefill":
        arguments += ["--transfer-address", f"0.0.0.0:{TRANSFER_PORT}"]
    elif role == "decode":
        arguments += ["--prefill-engines", ",".join(_prefill_addresses(job))]
    if job.cache_gib is not None:
        arguments += ["--block-cache", f"{job.service('cache')}:{CACHE_PORT}"]
    container = _container(job, arguments, HTTP_PORT, {"nvidia.com/gpu": devices})
    container["startupProbe"] = {**_health(), "periodSeconds": 5, "failureThreshold": START_SECONDS // 5}
    container["volumeMounts"] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "plan", "mountPath": KEPT_FILES, "readOnly": True},
        {"name": "storage", "mountPath": STORAGE_FOLDER, "readOnly": True},
    ]
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "plan", "configMap": {"name": f"{job.name}-plan"}},
        {"name": "storage", "persistentVolumeClaim": {"claimName": job.container.claim}},
    ]
    labels = _labels(job, role)
    annotations = job.queue.pod_annotations if job.queue is not None else {}
    template: Object = {"metadata": {"labels": labels}, "spec": _pod(container, volumes)}
    if annotations:
        template["metadata"]["annotations"] = annotations
    admission = job.queue.labels if job.queue is not None else {}
    metadata = {"name": job.service(role), "labels": labels | admission}
    if job.leader_worker_set:
        return _leader_worker_set(metadata, job.roles[role], template)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "serviceName": job.service(role),
            "replicas": job.roles[role],
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }


def _leader_worker_set(metadata: Object, servers: int, template: Object) -> Object:
    """Return a set of groups with one pod each, because a server uses one host.

    The address of a pod is NAME-NUMBER.NAME, as in a StatefulSet.
    """
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": servers,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": {"size": 1, "restartPolicy": "None", "workerTemplate": template},
        },
    }


def _prefill_addresses(job: ServingJob) -> list[str]:
    service = job.service("prefill")
    return [f"{service}-{number}.{service}:{TRANSFER_PORT}" for number in range(job.roles.get("prefill", 0))]


def _deployment(
    job: ServingJob, component: str, arguments: list[str], port: int, limits: Object, replicas: int = 1
) -> Object:
    """Return the Deployment of the router or the cache, whose pods hold no state that must survive."""
    labels = _labels(job, component)
    container = _container(job, arguments, port, limits)
    if component == "cache":
        container["readinessProbe"] = {"tcpSocket": {"port": port}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": job.service(component), "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(container, [])},
        },
    }


def _pod(container: Object, volumes: list[Object]) -> Object:
    """Return the specification of a pod with one container."""
    return {
        "terminationGracePeriodSeconds": END_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        **({"volumes": volumes} if volumes else {}),
    }


def _container(job: ServingJob, arguments: list[str], port: int, limits: Object) -> Object:
    """Return a container that runs `meshwright` with `arguments`. The keys come from the deployment's secret."""
    keys = {"MESHWRIGHT_API_KEY": "api", "MESHWRIGHT_TRANSFER_KEY": "transfer"}
    secret = f"{job.name}-keys"
    return {
        "name": "meshwright",
        "image": job.container.image,
        "command": command_arguments("meshwright", *arguments),
        "env": [
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for variable, key in keys.items()
        ],
        "ports": [{"containerPort": port}],
        "readinessProbe": {**_health(), "periodSeconds": 2},
        "resources": {"limits": limits},
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _health() -> Object:
    return {"httpGet": {"path": "/health", "port": HTTP_PORT}}


def _service(job: ServingJob, component: str, port: int = HTTP_PORT, *, headless: bool = False) -> Object:
    """Return the service of a component. The name of a headless service resolves to the addresses of all its pods."""
    labels = _labels(job, component)
    spec: Object = {"selector": labels, "ports": [{"port": port}]}
    if headless:
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    metadata = {"name": job.service(component), "labels": labels}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _plan_file(job: ServingJob) -> Object:
    metadata = {"name": f"{job.name}-plan"}
    content = {DEPLOYMENT_FILE: deployment_yaml(job.deployment)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": content}


def _network_policy(job: ServingJob) -> Object:
    """Return a policy that lets only pods of the deployment reach servers and cache. Clients may reach the router."""
    pods = {"matchLabels": {NAME_LABEL: job.name}}
    others = [{"key": COMPONENT_LABEL, "operator": "NotIn", "values": ["router"]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.name},
        "spec": {
            "podSelector": {**pods, "matchExpressions": others},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
        },
    }


def _labels(job: ServingJob, component: str) -> dict[str, Any]:
    return {NAME_LABEL: job.name, COMPONENT_LABEL: component}
