"""`meshwright launch`: writes the file with which a scheduler starts a run or serves a model. Does not need torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import Arguments, Runs, check_runs, check_writable, say, split_arguments
from meshwright.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from meshwright.launch.kubernetes import Container, Queue
    from meshwright.launch.scheduler_job import SchedulerJob
    from meshwright.spec.run import RunSpec

OPTIONS = {
    "slurm": (),
    "ray": (),
    "skypilot": ("--image", "--claim"),
    "jobset": ("--image", "--claim", "--queue", "--topology"),
    "trainjob": ("--image", "--claim", "--queue", "--topology"),
    "serving": (
        "--image",
        "--claim",
        "--queue",
        "--topology",
        "--leader-worker-set",
        "--model",
        "--name",
        "--cache-gib",
    ),
}
"""The options that each value of `--to` allows."""


def launch(
    arguments: Arguments = None,
    to: Annotated[
        str, typer.Option("--to", metavar="|".join(OPTIONS), help="The scheduler; required.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; standard output when left out.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Kubernetes, SkyPilot: image with meshwright.")
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(
            "--claim", metavar="NAME", help="Kubernetes, SkyPilot: volume that all hosts mount, for data and runs."
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", metavar="NAME", help="Kubernetes: queue of Kueue that admits the run or the servers."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="LABEL",
            help="With --queue: node label within one of whose values all hosts should lie.",
        ),
    ] = None,
    leader_worker_set: Annotated[
        bool,
        typer.Option("--leader-worker-set", help="serving: each server is a group of a LeaderWorkerSet."),
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="FOLDER", help="serving: folder of the model in the pods.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="serving: what names of objects begin with; meshwright if none."),
    ] = None,
    cache_gib: Annotated[
        float | None,
        typer.Option("--cache-gib", min=0.001, help="serving: memory of a cache for all servers; none has none."),
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Render the file with which Slurm, Ray, SkyPilot or Kubernetes starts a run on several hosts. Nothing is submitted.

    `--to serving` renders a deployment of `meshwright plan` for Kubernetes: servers by role, two routers, and a cache if asked for.

    One agent runs on each of `cluster.nodes` + `supervision.spares` hosts. The file maps exit codes to requeue, retry and stop, and leaves
    time for the last checkpoint before the run is killed.

    Examples:

        meshwright launch --to slurm run.yaml cluster=dgx-h100-16 --out run.sbatch

        meshwright launch --to ray run.yaml cluster=dgx-h100-16 --out run_ray.py

        meshwright launch --to skypilot run.yaml cluster=dgx-h100-16 --image registry/meshwright:1 --claim shared --out run.sky.yaml

        meshwright launch --to jobset run.yaml cluster=dgx-h100-16 --image registry/meshwright:1 --claim shared --out run.yaml

        meshwright launch --to serving deployment.yaml --model /workspace/llama --image registry/meshwright:1 --claim shared
    """
    from meshwright.launch.prepare import plan_for, refuse_untrainable, with_vocabulary
    from meshwright.launch.scheduler_job import scheduler_job

    if to not in OPTIONS:
        near = nearest(to, OPTIONS)
        raise BadInput(f"--to {to}: expected {', '.join(OPTIONS)}" + (f" (nearest: {near})" if near else ""))
    check_writable("--out", out)
    _check_options(
        to,
        {
            "--image": image,
            "--claim": claim,
            "--queue": queue,
            "--topology": topology,
            "--leader-worker-set": leader_worker_set or None,
            "--model": model,
            "--name": name,
            "--cache-gib": cache_gib,
        },
    )
    container = _container(to, image, claim)
    queued = _queue(queue, topology)
    if to == "serving":
        _write(
            out,
            *_serving(
                arguments,
                model,
                name=name or "meshwright",
                container=container,
                cache_gib=cache_gib,
                queue=queued,
                leader_worker_set=leader_worker_set,
            ),
        )
        return
    run = _load(arguments, runs)
    planned = with_vocabulary(run)
    plan, _ = plan_for(planned)
    refuse_untrainable(planned, plan)
    job = scheduler_job(run, plan, arguments or [], runs)
    _write(out, _rendered(to, job, container, queued), job.summary)


def _check_options(to: str, given: dict[str, object]) -> None:
    """Raise BadInput if an option is given that the target does not use.

    `given` has the options with their values, None if not given.
    """
    for option, value in given.items():
        if value is not None and option not in OPTIONS[to]:
            users = " or ".join(f"--to {target}" for target, options in OPTIONS.items() if option in options)
            text = option if value is True else f"{option} {value}"
            raise BadInput(f"{text}: --to {to} needs no {option}; expected {users}")


def _rendered(to: str, job: SchedulerJob, container: Container | None, queue: Queue | None) -> str:
    """Return the content of the file for a run, for the scheduler `to`."""
    if to == "slurm":
        from meshwright.launch.slurm import slurm_script

        return slurm_script(job)
    if to == "ray":
        from meshwright.launch.ray_script import ray_script

        return ray_script(job)
    assert container is not None, "the other targets start containers"
    if to == "skypilot":
        from meshwright.launch.skypilot import skypilot_yaml

        return skypilot_yaml(job, container)
    from meshwright.launch.kubernetes import jobset_yaml, trainjob_yaml

    return (jobset_yaml if to == "jobset" else trainjob_yaml)(job, container, queue)


def _write(out: Path | None, text: str, summary: str) -> None:
    """Write the file and print one line about it. Without `out`, print the text of the file instead."""
    from meshwright.durable.writes import write_durable

    if out is None:
        print(text, end="")
    else:
        write_durable(out, text)
        say(summary)


def _serving(arguments: list[str] | None, model: str | None, **options: Any) -> tuple[str, str]:
    """Return the file of a deployment, and its name as a summary. `options` are fields of `ServingJob`.

    Raises BadInput unless `arguments` is the file of one deployment and `model` is given.
    """
    from meshwright.config.deployment_file import read_deployment
    from meshwright.launch.kubernetes_serving import ServingJob, serving_yaml
    from meshwright.spec.deployment import deployment_name

    if arguments is None or len(arguments) != 1:
        raise BadInput(
            "--to serving needs the file of one deployment: meshwright plan serve.yaml --out deployment.yaml"
        )
    if model is None:
        raise BadInput("--to serving needs --model FOLDER: the model's folder in the pods")
    deployment = read_deployment(Path(arguments[0]))
    with deployment.at_keys():
        text = serving_yaml(ServingJob(deployment.value, model=model, **options))
    return text, deployment_name(deployment.value)


def _queue(name: str | None, topology: str | None) -> Queue | None:
    """Return the queue of Kueue; None if `--queue` is not given."""
    from meshwright.launch.kubernetes import Queue

    if topology is not None and name is None:
        raise BadInput(f"--topology {topology} needs --queue NAME: Kueue places the pods")
    return None if name is None else Queue(name, topology)


def _container(to: str, image: str | None, claim: str | None) -> Container | None:
    """Return image and volume of the containers. None if the target has no containers.

    Raises BadInput if an option is missing.
    """
    from meshwright.launch.kubernetes import Container

    if "--image" not in OPTIONS[to]:
        return None
    if image is None:
        raise BadInput(f"--to {to} needs --image IMAGE: a container image with meshwright")
    if claim is None and to != "skypilot":
        raise BadInput(f"--to {to} needs --claim NAME: a PersistentVolumeClaim that all hosts can mount and write")
    return Container(image, claim)


def _load(arguments: list[str] | None, runs: Path) -> RunSpec:
    """Read the run. Its cluster must be given in the file or on the command line, because the run will not start on this machine."""
    from meshwright.config.load import read_run
    from meshwright.config.presets import cluster_names
    from meshwright.families.folder import folder_spec

    def refuse_detection() -> dict[str, Any]:
        raise BadInput(
            "cluster: auto describes this machine, and the run starts on others; name them, e.g. cluster.gpu=H100 cluster.nodes=2 "
            f"cluster.gpus_per_node=8, or cluster={cluster_names()[0]}",
            key="cluster",
        )

    path, overrides = split_arguments(arguments)
    check_runs(runs)
    reading = read_run(path, overrides, runs=runs, detect=refuse_detection, model_reader=folder_spec)
    run = reading.run()
    for note in reading.notes():
        say(note)
    return run
