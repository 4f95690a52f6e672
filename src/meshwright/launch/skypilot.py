"""The task of a run for SkyPilot's managed jobs, which move a run to new machines when it loses its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from meshwright.config.yaml_positions import dump_yaml
from meshwright.launch.kubernetes import PORT, STORAGE_FOLDER, Container, block, object_name
from meshwright.launch.scheduler_job import REQUEUE_CODES, STOP_CODES, SchedulerJob, comment
from meshwright.spec.errors import EXIT_DONE, BadInput
from meshwright.spec.job_token import TOKEN_VARIABLE
from meshwright.spec.rank_environment import COORDINATOR_VARIABLE

TOKEN_SECRET = "MESHWRIGHT_TOKEN"
"""Name of the task's secret: the token that its machines share."""
ACCELERATORS = {
    "A100": "A100-80GB",
    "A100-40GB": "A100",
    "V100": "V100-32GB",
    "V100-16GB": "V100",
    "GB200-NVL72": "GB200",
    "GB300-NVL72": "GB300",
}
"""SkyPilot's names of chips, where they differ from ours (its catalogue, 0.14)."""


def skypilot_yaml(job: SchedulerJob, container: Container) -> str:
    """Return the task as YAML, with the run's files inside its script.

    Raises BadInput if there is no volume, unless the run has one host and copies its checkpoints to an object store.
    """
    if container.claim is None and job.hosts > 1:
        raise BadInput(
            f"--to skypilot needs --claim NAME: {job.hosts} hosts share data and run folder on a volume (sky volumes apply)"
        )
    if container.claim is None and job.run.checkpoint.mirror is None:
        raise BadInput(
            "--to skypilot: a machine that SkyPilot replaces takes the checkpoints on its disk along; expected --claim NAME, a "
            "volume, or checkpoint.mirror",
            key="checkpoint.mirror",
        )
    task: dict[str, Any] = {
        "name": object_name(job),
        "num_nodes": job.hosts,
        "resources": _resources(job, container.image),
        "secrets": {TOKEN_SECRET: None},
    }
    if container.claim is not None:
        task["volumes"] = {STORAGE_FOLDER: container.claim}
    header = [
        comment(job.summary),
        "# Before the first start, a token that the machines share:",
        f"#   export {TOKEN_SECRET}=$(openssl rand -hex 32)",
        f"# Then: sky jobs launch --secret {TOKEN_SECRET} FILE",
        "",
    ]
    script = "\n".join([*_preparation(job, shared=container.claim is not None), *_agents(job), ""])
    return "\n".join(header) + dump_yaml(task) + block("run", script, depth=0)


def _resources(job: SchedulerJob, image: str) -> dict[str, Any]:
    """Return the devices of a machine, and the exit codes after which SkyPilot starts the job again."""
    cluster = job.run.cluster
    resources: dict[str, Any] = {}
    if job.gpu_vendor is None:
        resources["cpus"] = f"{cluster.gpus_per_node}+"
    else:
        resources["accelerators"] = {ACCELERATORS.get(cluster.gpu, cluster.gpu): cluster.gpus_per_node}
    if cluster.host_memory_gib is not None:
        resources["memory"] = f"{cluster.host_memory_gib:g}+"
    resources["image_id"] = f"docker:{image}"
    resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": sorted(REQUEUE_CODES)}
    return resources


def _preparation(job: SchedulerJob, *, shared: bool) -> Iterator[str]:
    """Yield the script's first part: write the run's files and the token, name the coordinator, and enter the work
    folder.

    The work folder is on the volume if `shared`, else on the machine's disk.
    """
    folder = _folder(job)
    work = STORAGE_FOLDER if shared else f"{folder}/work"
    yield "set -u"
    yield f'mkdir -p "{work}" "{folder}"'
    # In the run file the folder begins with ~, because $HOME would not be expanded there.
    for name, text in job.files(f"~{folder.removeprefix('$HOME')}").items():
        yield f"cat > \"{folder}/{name}\" <<'END'"  # no line of a YAML mapping is END
        yield text.removesuffix("\n")
        yield "END"
    yield f'(umask 077 && printf %s "${TOKEN_SECRET}" > "{folder}/token")'
    yield f"unset {TOKEN_SECRET}"
    yield f'export {TOKEN_VARIABLE}="{folder}/token"'
    yield f'export {COORDINATOR_VARIABLE}="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"'
    yield f'cd "{work}"'


def _agents(job: SchedulerJob) -> Iterator[str]:
    """Yield the script's second part: a loop that starts the agent again after a failure.

    It is in the script because SkyPilot would end the agents of all machines when one of them fails.
    """
    options = shlex.join(["--runs", str(job.runs), "--agent"])
    final = "|".join(map(str, (EXIT_DONE, *REQUEUE_CODES, *STOP_CODES)))
    yield "failures=0"
    yield "while :; do"
    yield f'  meshwright train "{_folder(job)}/run.yaml" {options}'
    yield "  code=$?"
    yield "  # docs/reference/exit-codes.md"
    yield f'  case "$code" in {final}) exit "$code" ;; esac'
    yield "  failures=$((failures + 1))"
    yield f'  [ "$failures" -le {job.run.supervision.restarts} ] || exit "$code"'
    yield "done"


def _folder(job: SchedulerJob) -> str:
    """Return the folder of the run's files on each machine, written for a shell."""
    return f"$HOME/.meshwright/{job.run.name}"
