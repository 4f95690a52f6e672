"""Rendered files for schedulers carry every value as it was given, whatever characters it has."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.launch.scheduler import PLAN, run_of

from meshwright.config.schema import accepts, all_keys, annotation_at
from meshwright.config.yaml_positions import dump_yaml, parse_yaml
from meshwright.launch.kubernetes import Container, jobset_yaml, trainjob_yaml
from meshwright.launch.kubernetes_serving import ServingJob, serving_yaml
from meshwright.launch.scheduler_job import SchedulerJob, scheduler_job
from meshwright.launch.slurm import slurm_script
from meshwright.spec.deployment import Deployment, InstanceSpec
from meshwright.spec.errors import BadInput
from meshwright.spec.run import RunSpec

PIECES = (
    "a",
    "É漢🙂",
    " ",
    "\n",
    "\r\n",
    "\t",
    "'",
    '"',
    "\\",
    "`id`",
    "$(id)",
    "$(HOME)",
    "${HOME}",
    "$$",
    "$",
    "!!",
    "*",
    "?",
    "[",
    "{",
    "~/x",
    "; exit 9",
    "&& exit 9",
    "\nAGENT\nexit 9\n",
    "\nEOF\n",
    "--- ",
    "\n---\n",
    ": ",
    " #",
    "# ",
    "- ",
    "&a",
    "*a",
    "!!python/name:a ",
    "%",
    "|",
    ">",
    "on",
    "y",
    "0777",
    "12:30",
    "1_0",
    "null",
    "<<",
    "=",
    "2001-01-01",
    "\x01",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\u2028",
    "\ufeff",
    "-x",
)
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
)
TEXT_KEYS = [
    key for key in all_keys(RunSpec) if accepts(annotation_at(RunSpec, key), str) and key[0] not in ("model", "plan")
]
"""Keys of a run file, and of the cluster file in it, that take text."""
CONTAINER = Container("registry.example/meshwright:1", "shared")


def job_of(arguments: list[str], runs: str, run: RunSpec | None = None) -> SchedulerJob:
    return scheduler_job(run or run_of(), PLAN, arguments, Path(runs))


def started_by_slurm(script: str, folder: Path) -> list[list[str]]:
    """The arguments of each command that the script runs: of `meshwright`, and of anything else that is a stub."""
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    for name, text in {
        "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
        "scontrol": "echo node-a",
        "meshwright": f'printf "%s\\0" "$@" >> {calls}; printf "\\0" >> {calls}',
        "id": f'printf "id\\0\\0" >> {calls}',
    }.items():
        if not (folder / name).exists():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-a", "HOME": "/nowhere"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return [call.split("\0") for call in calls.read_bytes().decode().removesuffix("\0\0").split("\0\0")]


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word of a container's command as the kubelet passes it on."""
    return re.sub(
        r"\$(?:(\$)|\(([^)]*)\))", lambda m: m[1] or variables.get(m[2], m[0]), word
    )  # `$$`, `$(NAME)`; a lone `$` stays


def objects_of(text: str) -> list[dict[str, Any]]:
    """The documents as a reader of YAML 1.1 sees them, which Kubernetes' is."""
    return list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def command_of(text: str) -> list[str]:
    def pods(value: Any) -> Any:
        if isinstance(value, dict):
            yield from value.get("containers", [])
            value = list(value.values())
        for inner in value if isinstance(value, list) else ():
            yield from pods(inner)

    (container,) = pods(objects_of(text))
    return [expanded(word, {"HOME": "/nowhere"}) for word in container["command"]]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(HOSTILE.filter(bool), min_size=1, max_size=3), HOSTILE.filter(lambda text: text.strip("/. ")))
@example(["a\nAGENT\ntouch broken\n", "it's"], "runs\nAGENT\nexit 9")
def test_slurm_passes_each_argument_as_given(tmp_path: Path, arguments: list[str], runs: str) -> None:
    job = job_of(arguments, runs)
    expected = ["train", *arguments, "--runs", str(Path(runs)), "--agent"]
    assert started_by_slurm(slurm_script(job), tmp_path) == [expected]
    assert not (tmp_path / "broken").exists()


@settings(max_examples=40, deadline=None)
@given(HOSTILE.filter(lambda text: text.strip("/. ")))
@example("$(HOME)/$$/runs")
def test_kubernetes_passes_each_argument_as_given(runs: str) -> None:
    for render in (jobset_yaml, trainjob_yaml):
        command = command_of(render(job_of([], runs), CONTAINER))
        assert command[2:] == ["/etc/meshwright/run.yaml", "--runs", str(Path(runs)), "--agent"]


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(TEXT_KEYS), HOSTILE)
@example(("cluster", "gpu"), "H1\nexit 9")
@example(("cluster", "gpu"), "on")
def test_every_text_of_a_run_file_arrives_or_is_refused(tmp_path: Path, key: tuple[str, ...], text: str) -> None:
    """A value of a run file is refused when it is read, or the rendered run file has it and the script runs nothing of it."""
    section = {".".join(key): text}
    overrides = [
        f"{name}={dump_yaml(value).removesuffix(chr(10)).removesuffix('...')}" for name, value in section.items()
    ]
    if key[0] == "cluster":
        overrides.append("cluster.memory_gib=80")
    if key[:2] == ("observe", "wandb") and key != ("observe", "wandb", "project"):
        overrides.append("observe.wandb.project=p")
    try:
        run = run_of(*overrides)
        job = job_of(["run.yaml"], "runs", run)
        script, jobset = slurm_script(job), jobset_yaml(job, CONTAINER)
    except BadInput:
        return
    assert started_by_slurm(script, tmp_path) == [["train", "run.yaml", "--runs", "runs", "--agent"]]
    files = objects_of(jobset)[0]["data"]
    assert files == job.files()
    value: Any = run
    for step in key:
        value = getattr(value, step)
    stored: Any = parse_yaml(files["run.yaml"], "run.yaml").data
    for step in key:
        stored = stored[step]
    assert stored == value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from((*PIECES, "\n", "\n\n", "  ", "\n  a: b\n"))).map("".join))
def test_a_file_of_a_config_map_is_read_back_unchanged(content: str) -> None:
    job = job_of([], "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchedulerJob, "files", lambda self: {"run.yaml": content, "plan.yaml": "a: 1\n"})
        objects = objects_of(jobset_yaml(job, CONTAINER))
    assert objects[0]["data"] == {"run.yaml": content, "plan.yaml": "a: 1\n"}


@settings(max_examples=25, deadline=None)
@given(HOSTILE)
def test_a_served_model_s_folder_arrives_as_given(model: str) -> None:
    deployment = Deployment(instances=(InstanceSpec(),))
    objects = objects_of(serving_yaml(ServingJob(deployment, "chat", model, CONTAINER)))
    (server,) = [each for each in objects if each["kind"] == "StatefulSet"]
    command = server["spec"]["template"]["spec"]["containers"][0]["command"]
    assert expanded(command[2], {}) == model


@pytest.mark.parametrize("image", ["", "a b", "a\nb", "a\x00", "é", "a;b", "$(id)"])
def test_images_and_claims_are_names(image: str) -> None:
    with pytest.raises(BadInput, match="--image .*: expected an image such as registry"):
        Container(image, "shared")
    with pytest.raises(BadInput, match="--claim .*: expected lower-case letters"):
        Container("i", image)
    with pytest.raises(BadInput, match="--name"):
        ServingJob(Deployment(instances=(InstanceSpec(),)), image, "m", CONTAINER)


def test_arguments_that_are_not_utf_8_are_refused() -> None:
    with pytest.raises(BadInput, match=r"arguments: expected UTF-8, got 'a\\udcff'"):
        job_of(["a\udcff"], "runs")


@pytest.mark.parametrize("gib", [float("nan"), float("inf"), 1e9])
def test_a_cache_has_a_possible_size(gib: float) -> None:
    with pytest.raises(BadInput, match="--cache-gib .*: expected more than 0 and at most 1,000,000"):
        ServingJob(Deployment(instances=(InstanceSpec(),)), "chat", "m", CONTAINER, gib)


def test_the_summary_is_one_line_of_a_comment() -> None:
    run = run_of()
    job = job_of([], "runs", replace(run, cluster=replace(run.cluster, gpu="H1\nexit 9\u2028#")))
    for line in (slurm_script(job).split("\n")[1], jobset_yaml(job, CONTAINER).split("\n")[0]):
        assert line.startswith("# nightly_8B: 4 hosts with 8 × H1\\nexit 9\\u2028#; plan ")
