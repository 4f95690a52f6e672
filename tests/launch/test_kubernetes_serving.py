"""Objects of a serving deployment: published fields, and addresses and options that servers and router understand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.scheduler import mistakes, published_fields
from typer.main import get_command

from meshwright.cli.main import app_for
from meshwright.config.deployment_file import deployment_yaml, load_deployment
from meshwright.launch.kubernetes import Container, Queue
from meshwright.launch.kubernetes_serving import ServingJob, serving_yaml
from meshwright.server.instances import target_of
from meshwright.spec.deployment import Deployment, InstanceSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import ServeSpec

PAIR = Deployment(
    instances=(InstanceSpec(role="prefill", count=3, tensor=2), InstanceSpec(role="decode", count=2, token_budget=256))
)
CONTAINER = Container("registry.example/meshwright:1", "shared")
PAIR_JOB = ServingJob(PAIR, "chat", "/workspace/llama", CONTAINER, cache_gib=64)
COLOCATED = ServingJob(Deployment(instances=(InstanceSpec(count=4),)), "chat", "/workspace/llama", CONTAINER)


def objects(job: ServingJob) -> dict[tuple[str, str], Any]:
    """The rendered objects by kind and name."""
    documents = list(yaml.safe_load_all(serving_yaml(job)))
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def pod(workload: Any) -> Any:
    return workload["spec"]["template"]["spec"]


def arguments(workload: Any) -> list[str]:
    (container,) = pod(workload)["containers"]
    return container["command"][1:]


def options(command: list[str]) -> dict[str, Any]:
    """The parameters of a command of ours. Raises click's error for a wrong one."""
    name, *arguments = command
    group: Any = get_command(app_for([name]))
    return group.commands[name].make_context(name, arguments).params


@pytest.mark.parametrize("job", [PAIR_JOB, COLOCATED], ids=["pair", "colocated"])
def test_every_field_is_published_and_of_its_type(job: ServingJob) -> None:
    checked = [kind for kind, name in objects(job) if kind in published_fields()]
    assert {"StatefulSet", "Deployment", "Service"} == set(checked)
    for (kind, name), document in objects(job).items():
        assert list(mistakes(document, published_fields().get(kind, "object"), name)) == []


def test_kueue_admits_servers_and_places_their_pods() -> None:
    queue = Queue("team-a", "topology.example/rack")
    for grouped, kind in ((False, "StatefulSet"), (True, "LeaderWorkerSet")):
        job = dataclasses.replace(PAIR_JOB, queue=queue, leader_worker_set=grouped)
        found = {name: document for (sort, name), document in objects(job).items() if sort == kind}
        assert set(found) == {"chat-prefill", "chat-decode"}
        for name, servers in found.items():
            assert list(mistakes(servers, published_fields()[kind], name)) == []
            assert servers["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
            spec = servers["spec"]
            metadata = (spec["leaderWorkerTemplate"]["workerTemplate"] if grouped else spec["template"])["metadata"]
            assert metadata["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "topology.example/rack"}
            assert "kueue.x-k8s.io/queue-name" not in metadata["labels"], "Kueue adds it to the pods itself"


def test_a_leader_worker_set_has_the_pods_of_a_stateful_set_in_groups_of_one() -> None:
    plain, grouped = objects(PAIR_JOB), objects(dataclasses.replace(PAIR_JOB, leader_worker_set=True))
    for role, count in (("prefill", 3), ("decode", 2)):
        spec = grouped["LeaderWorkerSet", f"chat-{role}"]["spec"]
        assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (count, 1)
        # The pods are NAME-NUMBER, and their service has the set's name: the decode servers find them as before.
        assert spec["networkConfig"] == {"subdomainPolicy": "Shared"}
        template = plain["StatefulSet", f"chat-{role}"]["spec"]["template"]
        assert spec["leaderWorkerTemplate"]["workerTemplate"] == template
        assert ("Service", f"chat-{role}") in grouped
    same = {key for key in plain if key[0] != "StatefulSet"}
    assert all(grouped[key] == plain[key] for key in same)


def test_servers_find_each_other_by_services() -> None:
    rendered = objects(PAIR_JOB)
    prefill, decode = (rendered["StatefulSet", f"chat-{role}"] for role in ("prefill", "decode"))
    for server, role in ((prefill, "prefill"), (decode, "decode")):
        given = options(arguments(server))
        assert str(given["model"]) == "/workspace/llama" and given["role"] == role and given["host"] == "0.0.0.0"
        settings = {field.name: given[field.name] for field in dataclasses.fields(ServeSpec)}
        spec = ServeSpec(**{key: value for key, value in settings.items() if value is not None})
        assert spec.block_cache == "chat-cache:8200"
        service = rendered["Service", server["spec"]["serviceName"]]
        assert (
            service["spec"]["clusterIP"] == "None"
            and service["spec"]["selector"] == server["spec"]["selector"]["matchLabels"]
        )
        assert server["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
    # A pod of a StatefulSet has the name SET-NUMBER, and its address the name SET-NUMBER.SERVICE.
    assert options(arguments(decode))["prefill_engines"] == ",".join(
        f"chat-prefill-{n}.chat-prefill:8100" for n in range(3)
    )
    assert options(arguments(prefill))["transfer_address"] == "0.0.0.0:8100"
    assert (prefill["spec"]["replicas"], decode["spec"]["replicas"]) == (3, 2)
    limits = [pod(server)["containers"][0]["resources"]["limits"] for server in (prefill, decode)]
    assert limits == [{"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 1}]


def test_the_router_knows_all_roles_and_the_cache_has_memory() -> None:
    rendered = objects(PAIR_JOB)
    router, cache = (rendered["Deployment", f"chat-{name}"] for name in ("router", "cache"))
    targets = [target_of(url) for url in options(arguments(router))["servers"]]
    assert targets == [("chat-prefill", 8000), ("chat-decode", 8000)]
    assert all(("Service", host) in rendered for host, _ in targets)
    given = options(arguments(cache))
    assert (given["address"], given["gib"]) == ("0.0.0.0:8200", 64)
    assert pod(cache)["containers"][0]["resources"]["limits"] == {"memory": "66560Mi"}
    assert {name for kind, name in objects(COLOCATED) if kind != "Service"} == {
        "chat",
        "chat-plan",
        "chat-both",
        "chat-router",
    }


def test_servers_get_the_plan_and_the_keys(tmp_path: Path) -> None:
    rendered = objects(PAIR_JOB)
    file = tmp_path / "deployment.yaml"
    file.write_text(rendered["ConfigMap", "chat-plan"]["data"]["deployment.yaml"])
    assert load_deployment(file) == PAIR and file.read_text() == deployment_yaml(PAIR)
    server = pod(rendered["StatefulSet", "chat-prefill"])
    (container,) = server["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert (
        Path(options(arguments(rendered["StatefulSet", "chat-prefill"]))["plan"])
        == Path(mounts["plan"]) / "deployment.yaml"
    )
    assert {volume["name"] for volume in server["volumes"]} == set(mounts)
    for (kind, _), workload in rendered.items():
        if kind in ("StatefulSet", "Deployment"):
            env = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in pod(workload)["containers"][0]["env"]}
            assert env["MESHWRIGHT_API_KEY"] == {"name": "chat-keys", "key": "api"}
            assert env["MESHWRIGHT_TRANSFER_KEY"] == {"name": "chat-keys", "key": "transfer"}


def test_wrong_names_are_refused() -> None:
    for name in ("Chat", "a_b", "x" * 41, "-a", ""):
        with pytest.raises(BadInput, match="lower-case letters"):
            ServingJob(PAIR, name, "m", CONTAINER)


def test_servers_that_share_experts_get_a_device_each_and_no_cache() -> None:
    shared = dataclasses.replace(COLOCATED, deployment=Deployment(instances=(InstanceSpec(count=2, expert=4),)))
    (container,) = pod(objects(shared)["StatefulSet", "chat-both"])["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    with pytest.raises(BadInput, match="--cache-gib"):
        serving_yaml(dataclasses.replace(shared, cache_gib=8))
