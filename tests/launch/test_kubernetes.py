"""JobSet and TrainJob: fields that the published definitions have, and the policy for each exit code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.scheduler import PLAN, WORDS, job_of, mistakes, published_fields, run_of
from typer.main import get_command

from meshwright.cli.main import app_for
from meshwright.config.load import load_run, plan_yaml
from meshwright.launch.control import COORDINATOR_VARIABLE, coordinator_address
from meshwright.launch.kubernetes import JOBSET_NAME_LABEL, Container, Queue, jobset_yaml, object_name, trainjob_yaml
from meshwright.launch.scheduler_job import KEPT_FILES, REQUEUE_CODES, STOP_CODES, SchedulerJob, scheduler_job
from meshwright.spec.errors import BadInput
from meshwright.spec.job_token import TOKEN_VARIABLE, job_token

CONTAINER = Container("registry.example/meshwright:1", "shared")


def objects(text: str) -> dict[str, Any]:
    """The objects of a rendered file by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def jobset_of(job: SchedulerJob) -> Any:
    return objects(jobset_yaml(job, CONTAINER))["JobSet"]


def job_spec(job: SchedulerJob) -> Any:
    return jobset_of(job)["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod_spec(job: SchedulerJob) -> Any:
    return job_spec(job)["template"]["spec"]


@pytest.mark.parametrize(
    "overrides", [(), ("cluster.host_memory_gib=500.5", "supervision.spares=1"), ("cluster.gpu=cpu",)]
)
def test_every_field_is_published_and_of_its_type(overrides: tuple[str, ...]) -> None:
    for text in (jobset_yaml(job_of(*overrides), CONTAINER), trainjob_yaml(job_of(*overrides), CONTAINER)):
        published_kinds = [kind for kind in objects(text) if kind in published_fields()]
        assert published_kinds
        for kind in published_kinds:
            assert list(mistakes(objects(text)[kind], published_fields()[kind], kind)) == []


def test_kueue_admits_a_suspended_object_and_places_its_pods() -> None:
    queue = Queue("team-a", "topology.example/rack")
    jobset = objects(jobset_yaml(job_of(), CONTAINER, queue))
    trainjob = objects(trainjob_yaml(job_of(), CONTAINER, queue))
    for admitted in (jobset["JobSet"], trainjob["TrainJob"]):
        assert admitted["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
        assert admitted["spec"]["suspend"] is True
    for replicated in (jobset["JobSet"]["spec"], trainjob["TrainingRuntime"]["spec"]["template"]["spec"]):
        pod = replicated["replicatedJobs"][0]["template"]["spec"]["template"]
        assert pod["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "topology.example/rack"}
    for found in (jobset, trainjob):
        for kind in [kind for kind in found if kind in published_fields()]:
            assert list(mistakes(found[kind], published_fields()[kind], kind)) == []
    plain = objects(jobset_yaml(job_of(), CONTAINER))["JobSet"]
    assert "labels" not in plain["metadata"] and "suspend" not in plain["spec"]
    assert "metadata" not in job_spec(job_of())["template"]


@pytest.mark.parametrize(
    ("name", "topology"), [("Team", None), ("a.b", None), ("q" * 64, None), ("q", "a b"), ("q", "x/")]
)
def test_a_queue_that_kubernetes_would_refuse_is_refused(name: str, topology: str | None) -> None:
    with pytest.raises(BadInput, match="--topology" if topology else "--queue"):
        Queue(name, topology)


def test_the_comparison_finds_mistakes() -> None:
    jobset = jobset_of(job_of())
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    jobset["spec"]["failurePolicy"]["restartStrategy"] = "recreate"
    jobset["spec"]["replicatedJobs"][0]["replicas"] = "1"
    del jobset["spec"]["replicatedJobs"][0]["name"]
    assert list(mistakes(jobset, published_fields()["JobSet"], "JobSet")) == [
        "JobSet.spec.failurePolicy.restartStrategy: recreate is not one of Recreate|BlockingRecreate|InPlaceRestart",
        "JobSet.spec.failurePolicy: there is no field maxRestart",
        "JobSet.spec.replicatedJobs[0]: name is missing",
        "JobSet.spec.replicatedJobs[0].replicas: '1' is not of type integer",
    ]


def outcome(jobset: Any, code: int) -> str:
    """Return the reaction of Kubernetes to a pod's exit `code`: the JobSet's action, or `retry` for one more pod.

    A podFailurePolicy's first matching rule decides. FailJob fails the job with reason PodFailurePolicy and a message
    that ends with the rule's index; the JobSet's first rule that matches both decides then.
    """
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    for index, rule in enumerate(spec["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", ()):
            message = f"Container node for pod default/x failed with exit code {code} matching {rule['action']} rule at index {index}"
            for policy in jobset["spec"]["failurePolicy"]["rules"]:
                patterns = policy["onJobFailureMessagePatterns"]
                if policy["onJobFailureReasons"] == ["PodFailurePolicy"] and any(
                    re.search(p, message) for p in patterns
                ):
                    return policy["action"]
    return "retry"


def test_exit_codes_are_mapped_to_stop_requeue_and_retry() -> None:
    jobset = jobset_of(job_of())
    assert {code: outcome(jobset, code) for code in STOP_CODES} == dict.fromkeys(STOP_CODES, "FailJobSet")
    assert [outcome(jobset, code) for code in REQUEUE_CODES] == ["RestartJobSetAndIgnoreMaxRestarts"]
    assert {outcome(jobset, code) for code in (1, 5, 137, 139)} == {"retry"}


def test_retries_are_limited_and_disruptions_do_not_count() -> None:
    job = job_of("supervision.restarts=2", "supervision.spares=1")
    spec = job_spec(job)
    assert jobset_of(job)["spec"]["failurePolicy"]["maxRestarts"] == 2
    assert spec["backoffLimit"] == 2 * 5 and spec["completions"] == spec["parallelism"] == 5
    assert spec["podFailurePolicy"]["rules"][-1] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy requires it"


@pytest.mark.parametrize("grace", [0, 25, 600])
def test_the_grace_period_fits_the_last_checkpoint(grace: int) -> None:
    assert pod_spec(job_of(f"checkpoint.grace_seconds={grace}"))["terminationGracePeriodSeconds"] >= grace + 45


def test_pods_share_a_token_and_a_coordinator_and_only_they_reach_each_other() -> None:
    rendered = objects(jobset_yaml(job_of(), CONTAINER))
    pod = pod_spec(job_of())
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert env["MESHWRIGHT_HOST"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert env["MESHWRIGHT_COORDINATOR"] == "nightly-8b-node-0-0.nightly-8b:29400"
    token = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "token")
    assert token == {"secretName": "nightly-8b-token", "defaultMode": 0o440}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert env["MESHWRIGHT_TOKEN_FILE"] == f"{mounts['token']}/token" and mounts["shm"] == "/dev/shm"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    policy = rendered["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == policy["ingress"][0]["from"][0]["podSelector"]
    assert policy["podSelector"] == {"matchLabels": {JOBSET_NAME_LABEL: "nightly-8b"}} and policy["policyTypes"] == [
        "Ingress"
    ]
    assert "Secret" not in rendered, "the file has no token"


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ((), {"nvidia.com/gpu": 8}),
        (("cluster.gpu=MI300X",), {"amd.com/gpu": 8}),
        (("cluster.gpu=cpu", "cluster.host_memory_gib=1.5"), {"cpu": 8, "memory": "1536Mi"}),
    ],
)
def test_a_pod_has_the_devices_of_a_host(overrides: tuple[str, ...], limits: dict[str, Any]) -> None:
    assert pod_spec(job_of(*overrides))["containers"][0]["resources"]["limits"] == limits


def test_the_config_map_has_the_run_with_its_plan(tmp_path: Path) -> None:
    plan = tmp_path / "my plan.yaml"
    plan.write_text(plan_yaml(PLAN) + "# edited\n")
    run = run_of(f"plan={plan}")
    config_data = objects(jobset_yaml(scheduler_job(run, PLAN, WORDS, Path("runs")), CONTAINER))["ConfigMap"]["data"]
    assert config_data["plan.yaml"] == plan.read_text()
    assert yaml.safe_load(config_data["run.yaml"])["plan"] == f"{KEPT_FILES}/plan.yaml"
    plan.unlink()
    with pytest.raises(BadInput, match=r"plan: .*my plan.yaml cannot be read"):
        scheduler_job(run, PLAN, WORDS, Path("runs")).files()


def test_the_run_of_the_config_map_is_the_rendered_run(tmp_path: Path) -> None:
    data = objects(trainjob_yaml(job_of("observe.tensorboard=true"), CONTAINER))["ConfigMap"]["data"]
    (tmp_path / "run.yaml").write_text(data["run.yaml"])
    assert load_run(tmp_path / "run.yaml") == run_of("observe.tensorboard=true")


def test_a_train_job_names_its_runtime_whose_job_is_the_trainer() -> None:
    rendered = objects(trainjob_yaml(job_of("supervision.spares=2"), CONTAINER))
    runtime, train_job = rendered["TrainingRuntime"], rendered["TrainJob"]
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert train_job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 6
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"].pop("metadata")["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    jobset = jobset_of(job_of("supervision.spares=2"))
    assert runtime["spec"]["template"]["spec"] == jobset["spec"], "the same JobSet otherwise"


def test_pods_get_an_account_only_to_label_nodes() -> None:
    plain = pod_spec(job_of())
    assert plain["automountServiceAccountToken"] is False and "serviceAccountName" not in plain
    job = job_of("supervision.report_label=example.com/health=bad")
    labelling = pod_spec(job)
    assert labelling["automountServiceAccountToken"] is True
    text = jobset_yaml(job, CONTAINER)
    account = labelling["serviceAccountName"]
    commands = [line.lstrip("# ").split() for line in text.splitlines() if line.startswith("#   kubectl create")]
    granted = {arguments[2]: arguments[3:] for arguments in commands}
    assert granted["serviceaccount"][0] == account
    assert granted["clusterrole"] == [account, "--verb=patch", "--resource=nodes"]
    assert f"--clusterrole={account}" in granted["clusterrolebinding"]
    assert list(mistakes(objects(text)["JobSet"], published_fields()["JobSet"], "JobSet")) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Llama.3_8B", "llama-3-8b"), ("70b", "run-70b"), ("_._", "run"), ("a" * 90, "a" * 48)],
)
def test_names_are_dns_labels_with_space_for_the_names_of_pods(name: str, expected: str) -> None:
    assert object_name(job_of(f"name={name}")) == expected
    assert len(f"{expected}-node-0-3-abcde") <= 63


def test_emulated_nodes_are_refused() -> None:
    run = run_of("cluster.nodes=1", "cluster.emulate_nodes=2")
    with pytest.raises(BadInput, match=r"use cluster.nodes=2 cluster.emulate_nodes=1"):
        scheduler_job(run, PLAN, WORDS, Path("runs"))


def test_the_agent_reads_the_rendered_coordinator_and_token(tmp_path: Path) -> None:
    (container,) = pod_spec(job_of())["containers"]
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert env["MESHWRIGHT_HOST"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert coordinator_address(env[COORDINATOR_VARIABLE]) == ("nightly-8b-node-0-0.nightly-8b", 29400)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(next(v["secret"]["defaultMode"] for v in pod_spec(job_of())["volumes"] if "secret" in v))
    assert job_token({TOKEN_VARIABLE: str(token)}) == "0123456789abcdef" * 4
    train = get_command(app_for(["train"])).commands["train"]  # type: ignore[attr-defined]
    options = {option for parameter in train.params for option in parameter.opts}
    assert {word for word in container["command"] if word.startswith("--")} <= options
