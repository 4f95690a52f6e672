"""`meshwright launch`: the file with which Slurm or Kubernetes starts a run or serves a model; needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import Runs, Words, check_runs, check_writable, say, split_words
from meshwright.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from meshwright.spec.run import RunSpec

TARGETS = ("slurm", "jobset", "trainjob", "serving")


def launch(
    words: Words = None,
    to: Annotated[
        str, typer.Option("--to", metavar="|".join(TARGETS), help="The scheduler; required.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; standard output when left out.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Kubernetes: image with meshwright.")
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(
            "--claim", metavar="NAME", help="Kubernetes: volume claim that all hosts mount, for data and runs."
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", metavar="NAME", help="jobset, trainjob: queue of Kueue that admits the run."),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            metavar="LABEL",
            help="With --queue: node label within one of whose values all hosts should lie.",
        ),
    ] = None,
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
    """Render the file with which Slurm or Kubernetes starts a run on several hosts. Nothing is submitted.

    `--to serving` renders a deployment of `meshwright plan` for Kubernetes: servers by role, two routers, and a cache if asked for.

    One agent runs on each of `cluster.nodes` + `supervision.spares` hosts. The file maps exit codes to requeue, retry and stop, and leaves
    time for the last checkpoint before the run is killed.

    Examples:

        meshwright launch --to slurm run.yaml cluster=dgx-h100-16 --out run.sbatch

        meshwright launch --to jobset run.yaml cluster=dgx-h100-16 --image registry/meshwright:1 --claim shared --out run.yaml

        meshwright launch --to serving deployment.yaml --model /workspace/llama --image registry/meshwright:1 --claim shared
    """
    from meshwright.launch.prepare import plan_for, refuse_untrainable, with_vocabulary
    from meshwright.launch.scheduler_job import scheduler_job

    if to not in TARGETS:
        near = nearest(to, TARGETS)
        raise BadInput(f"--to {to}: expected {', '.join(TARGETS)}" + (f" (nearest: {near})" if near else ""))
    check_writable("--out", out)
    container = _container(to, image, claim)
    queued = _queue(to, queue, topology)
    if to == "serving":
        _write(out, *_serving(words, name or "meshwright", model, container, cache_gib))
        return
    for option, value in (("--model", model), ("--name", name), ("--cache-gib", cache_gib)):
        if value is not None:
            raise BadInput(f"{option} {value}: --to {to} needs no {option}; expected --to serving")
    run = _load(words, runs)
    planned = with_vocabulary(run)
    plan, _ = plan_for(planned)
    refuse_untrainable(planned, plan)
    job = scheduler_job(run, plan, words or [], runs)
    if container is None:
        from meshwright.launch.slurm import slurm_script

        text = slurm_script(job)
    else:
        from meshwright.launch.kubernetes import jobset_yaml, trainjob_yaml

        text = (jobset_yaml if to == "jobset" else trainjob_yaml)(job, container, queued)
    _write(out, text, job.summary)


def _write(out: Path | None, text: str, summary: str) -> None:
    """Write the rendered text to a file and print a line about it, or print the text."""
    from meshwright.durable.writes import write_durable

    if out is None:
        print(text, end="")
    else:
        write_durable(out, text)
        say(summary)


def _serving(
    words: list[str] | None, name: str, model: str | None, container: Any, cache_gib: float | None
) -> tuple[str, str]:
    """The rendered deployment and its summary. Raises BadInput without a deployment file or a model."""
    from meshwright.config.deployment_file import read_deployment
    from meshwright.launch.kubernetes_serving import ServingJob, serving_yaml
    from meshwright.spec.deployment import deployment_name

    if words is None or len(words) != 1:
        raise BadInput(
            "--to serving needs the file of one deployment: meshwright plan serve.yaml --out deployment.yaml"
        )
    if model is None:
        raise BadInput("--to serving needs --model FOLDER: the model's folder in the pods")
    deployment = read_deployment(Path(words[0]))
    with deployment.at_keys():
        text = serving_yaml(ServingJob(deployment.value, name, model, container, cache_gib))
    return text, deployment_name(deployment.value)


def _queue(to: str, name: str | None, topology: str | None) -> Any:
    """The queue of Kueue, or None without one. Raises BadInput where none is used."""
    from meshwright.launch.kubernetes import Queue

    for option, value in (("--queue", name), ("--topology", topology)):
        if value is not None and to not in ("jobset", "trainjob"):
            raise BadInput(f"{option} {value}: --to {to} needs no {option}; expected --to jobset or --to trainjob")
    if topology is not None and name is None:
        raise BadInput(f"--topology {topology} needs --queue NAME: Kueue places the pods")
    return None if name is None else Queue(name, topology)


def _container(to: str, image: str | None, claim: str | None) -> Any:
    """Image and storage for Kubernetes, or None for Slurm. Raises BadInput if one is missing or not needed."""
    if to == "slurm":
        for option, value in (("--image", image), ("--claim", claim)):
            if value is not None:
                raise BadInput(f"{option} {value}: --to slurm needs no {option}; expected --to jobset or --to trainjob")
        return None
    from meshwright.launch.kubernetes import Container

    if image is None:
        raise BadInput(f"--to {to} needs --image IMAGE: a container image with meshwright")
    if claim is None:
        raise BadInput(f"--to {to} needs --claim NAME: a PersistentVolumeClaim that all hosts can mount and write")
    return Container(image, claim)


def _load(words: list[str] | None, runs: Path) -> RunSpec:
    """The run, with its cluster in the file or on the command line, as this machine is not where it will run."""
    from meshwright.config.load import read_run
    from meshwright.config.presets import cluster_names
    from meshwright.families.folder import folder_spec

    def refuse_detection() -> dict[str, Any]:
        raise BadInput(
            "cluster: auto describes this machine, and the run starts on others; name them, e.g. cluster.gpu=H100 cluster.nodes=2 "
            f"cluster.gpus_per_node=8, or cluster={cluster_names()[0]}",
            key="cluster",
        )

    path, overrides = split_words(words)
    check_runs(runs)
    reading = read_run(path, overrides, runs=runs, detect=refuse_detection, model_reader=folder_spec)
    run = reading.run()
    for note in reading.notes:
        say(note)
    return run
