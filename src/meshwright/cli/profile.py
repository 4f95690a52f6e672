"""`meshwright profile`: measures this machine, or corrects its figures by a finished run."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import check_writable, split_arguments
from meshwright.cli.profile_engine import profile_engine
from meshwright.cli.profile_table import table
from meshwright.durable.writes import write_durable
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERNAL, BadInput
from meshwright.spec.host_limits import usable_cores

if TYPE_CHECKING:
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.profile import MachineProfile


ServeOption = Annotated[
    bool,
    typer.Option(
        "--serve",
        help="Measure the inference engine's steps on one device: with the model of a file, or of e.g. model=llama3-8b.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="With --serve: print the measured steps and constants as JSON.")
]


def profile(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml] [cluster.KEY=VALUE]...",
            help="A run file whose cluster is measured, and values that replace its own. Default: this machine (`cluster=auto`).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where to write the figures, as JSON; with --from-run, the file that is corrected.",
            show_default=False,
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from-run",
            metavar="FOLDER",
            help="Measure nothing: compare a finished run with its prediction, and store the difference as a correction.",
            show_default=False,
        ),
    ] = None,
    shapes_of: Annotated[
        Path | None,
        typer.Option(
            "--shapes-of",
            metavar="FOLDER",
            help="Measure the matrix and attention shapes of this run on its devices, instead of shapes typical of all models.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            min=0.1,
            help="Approximate seconds of measurement, without the start of the ranks; default: 100 on GPUs, 20 on a CPU; --serve 75, 10.",
            show_default=False,
        ),
    ] = None,
    serve: ServeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Measure this machine, so that predictions use its measured rates instead of datasheets.

    It measures matmuls and attention by shape, device memory, the optimizer, collectives by size and group, links to
    the host, and how communication slows compute down. It uses every device and trains nothing. It takes about two
    minutes on GPUs and half a minute on a CPU. A run or question then names the file.

    Examples:

        meshwright profile --out h200.json

        meshwright plan run.yaml cluster.profile=h200.json

    The machine may play several nodes, or fewer devices, as training does; under torchrun or Slurm all ranks measure together:

        meshwright profile cluster=auto cluster.emulate_nodes=2 --out two-nodes.json

    A finished run corrects the file: the factor on device time that makes its predicted step the measured one.

        meshwright profile --from-run runs/mine --out h200.json

    A run's own shapes, to hold its step against what the device needs:

        meshwright profile --shapes-of runs/mine --seconds 25 --out mine.json

    The inference engine's steps, for plans of deployments; the file keeps what else it has:

        meshwright profile --serve model=llama3-8b --out h200.json
    """
    if json_output and not serve:
        raise BadInput("--json is for --serve; the file of --out is JSON")
    if from_run is not None:
        _correct(from_run, out)
        return
    if out is None:
        raise BadInput("--out FILE is missing: the file for the measurements, e.g. --out machine.json")
    check_writable("--out", out)
    if serve:
        if shapes_of is not None:
            raise BadInput("--serve and --shapes-of measure different things; give one")
        profile_engine(*split_arguments(arguments), out, seconds, json_output)
        return
    if shapes_of is not None and arguments:
        raise BadInput(f"{arguments[0]}: with --shapes-of the run determines what is measured; leave it out")
    cluster = _cluster(arguments) if shapes_of is None else _cluster_of(shapes_of)
    measured = _measured(cluster, seconds, shapes_of)
    from meshwright.config.profile_file import to_json

    write_durable(out, to_json(measured))
    for line in table(measured):
        print(line)
    print(f"wrote {out}; name it in a run or a question: cluster.profile={out}", file=sys.stderr)


def _cluster_of(folder: Path) -> ClusterSpec:
    """Return the cluster of the run in `folder`."""
    from meshwright.config.load import load_plan, load_resolved

    load_plan(folder / "plan.yaml")  # Reports a bad plan before ranks start.
    return load_resolved(folder / "config.yaml").cluster


def _cluster(arguments: list[str] | None) -> ClusterSpec:
    """Return the cluster that the command line describes.

    Its devices must be on this host. Raises BadInput for keys of other sections.
    """
    from meshwright.config.load import load_cluster
    from meshwright.launch.machine import found_cluster

    path, overrides = split_arguments(arguments)
    other = next((word for word in overrides if not word.startswith(("cluster.", "cluster="))), None)
    if other is not None:
        raise BadInput(f"{other}: profile takes keys of the cluster only, e.g. cluster.gpus_per_node=2")
    if path is None and not any(word.startswith("cluster=") for word in overrides):
        overrides = ["cluster=auto", *overrides]
    return load_cluster(path, overrides, detect=found_cluster)


def _measured(cluster: ClusterSpec, seconds: float | None, shapes_of: Path | None) -> MachineProfile:
    """Measure the devices of this host. If a launcher started this process, every rank but the first exits here."""
    from meshwright.spec.rank_environment import RankEnvironment, started_by_launcher

    if not started_by_launcher():
        return _measured_here(cluster, seconds, shapes_of)
    from meshwright.training.profiling import ProfileJob, run_profile_job

    environment = RankEnvironment.from_environment()
    measured = run_profile_job(ProfileJob(cluster=cluster, seconds=seconds, run=_absolute(shapes_of)), environment)
    if environment.rank:
        raise typer.Exit
    return measured


def _measured_here(cluster: ClusterSpec, seconds: float | None, shapes_of: Path | None) -> MachineProfile:
    """Start one rank for every device of this host and return their measurements.

    If the ranks fail, exit with their code. Their logs are kept if they contain a traceback.
    """
    from meshwright.config.profile_file import load_profile
    from meshwright.launch.local import run_ranks
    from meshwright.launch.machine import rank_threads
    from meshwright.spec.fields import to_plain

    if cluster.nodes > 1:
        raise BadInput(
            f"cluster.nodes is {cluster.nodes}: start a rank for every device with a launcher on every node, e.g. torchrun --nnodes "
            f"{cluster.nodes} --nproc-per-node {cluster.gpus_per_node} … -m meshwright profile --out FILE"
        )
    folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
    question = folder / "job.json"
    destination = folder / "answer.json"
    job = {"cluster": to_plain(cluster), "seconds": seconds, "run": _absolute(shapes_of)}
    write_durable(question, json.dumps(job))
    devices = f"{cluster.ranks} {cluster.gpu}" + (
        f" as {cluster.emulate_nodes} nodes" if cluster.emulate_nodes > 1 else ""
    )
    print(f"measuring {devices}", file=sys.stderr)
    code = run_ranks(
        "meshwright.training.profiling",
        [str(question), str(destination)],
        cluster=cluster,
        logs=folder / "logs",
        threads=rank_threads(cluster),
    )
    measured = load_profile(destination) if code == EXIT_DONE else None
    if code not in (EXIT_INTERNAL, EXIT_COMMUNICATION):
        shutil.rmtree(folder)
    if measured is None:
        sys.exit(code)
    return measured


def _absolute(folder: Path | None) -> str | None:
    return str(folder.absolute()) if folder else None


def _correct(folder: Path, out: Path | None) -> None:
    """Correct the profile of the machine by the predicted and the measured step time of the run in `folder`."""
    from meshwright.config.load import load_plan, load_resolved
    from meshwright.config.profile_file import load_profile, to_json
    from meshwright.observe.prediction_check import WARM_UP
    from meshwright.profile.feedback import with_correction

    run = load_resolved(folder / "config.yaml")
    plan = load_plan(folder / "plan.yaml", run.cluster)
    run_profile = Path(run.cluster.profile) if run.cluster.profile else None
    out = out or run_profile
    if out is None:
        raise BadInput("--out FILE is missing: the profile to correct, or to begin (the run had none)")
    check_writable("--out", out)
    existing = next((file for file in (out, run_profile) if file is not None and file.is_file()), None)
    before = load_profile(existing) if existing else _unmeasured(folder, run.cluster)
    after = with_correction(before, run, plan, _measured_step(folder, WARM_UP + run.train.ramp_steps))
    write_durable(out, to_json(after))
    correction = after.corrections[-1]
    verb = "guessed" if existing is None and run.cluster.is_cpu else "predicted"
    print(
        f"{run.name}: {verb} {correction.predicted_seconds:.4g} s a step{'' if existing else ' (nothing measured)'}, measured "
        f"{correction.measured_seconds:.4g} s; device time × {correction.factor:.3f}"
    )
    print(f"wrote {out}", file=sys.stderr)


def _measured_step(folder: Path, first: int) -> float:
    """Return the median seconds of the run's steps after step `first`.

    The steps up to `first` warm up or have a smaller batch.

    If the run has a prediction check, its measured value is used. Raises BadInput if there are too few steps.
    """
    from meshwright.observe.prediction_check import FEWEST_STEPS, typical_step
    from meshwright.observe.runfolder import read_run

    run = read_run(folder)
    steps = [step for step in run.steps if step["step"] > first]
    typical_step = typical_step(steps)
    if run.prediction_check is not None:
        return run.prediction_check.step_seconds.measured
    if typical_step is None or len(steps) < FEWEST_STEPS:
        raise BadInput(
            f"{folder}: expected at least {first + FEWEST_STEPS} steps in metrics.jsonl, of which the first {first} do not count, got "
            f"{len(run.steps)}"
        )
    return typical_step.seconds


def _unmeasured(folder: Path, cluster: ClusterSpec) -> MachineProfile:
    """Return a profile of the run's machine without measurements."""
    from meshwright.observe.runfolder import read_run
    from meshwright.spec.profile import MachineProfile

    environment = read_run(folder).environment
    return MachineProfile(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        gpu=cluster.gpu,
        device=str(environment.get("device", cluster.gpu)),
        devices=cluster.ranks_per_node,
        nodes=cluster.nodes * cluster.emulate_nodes,
        cores=int(environment.get("cpu_cores") or usable_cores()),
        memory_bytes=int(
            environment.get("device_memory_bytes") or environment.get("memory_bytes") or cluster.memory_bytes() or 1
        ),
    )
