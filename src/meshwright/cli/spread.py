"""Implements `--plan` of `generate` and `eval`: the model is distributed over the ranks of a plan file, on this host or by a launcher."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import say
from meshwright.spec.errors import EXIT_COMMUNICATION, EXIT_DONE, EXIT_INTERNAL, BadInput, attach_key, call_all
from meshwright.spec.host_limits import usable_cores

if TYPE_CHECKING:
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.deployment import Deployment, InstanceSpec
    from meshwright.spec.model import ModelSpec
    from meshwright.spec.plan import Plan
    from meshwright.training.spread import Continuation, Measurement, SpreadAnswer

PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Spread the model over ranks by this plan, for one that does not fit a device: a run's plan.yaml, or what "
        "`meshwright plan … --out` wrote. Starts the plan's ranks on this host, or joins them under a launcher.",
    ),
]


def ask_ranks(
    folder: Path,
    plan_file: Path,
    *,
    continuation: Continuation | None = None,
    measurement: Measurement | None = None,
) -> SpreadAnswer:
    """Let the ranks of a plan answer a question about the model in `folder`: a run, a checkpoint, or a Hugging Face folder.

    The question is `continuation`, prompts to continue, or `measurement`, data to evaluate. Under a launcher every rank
    but the first exits here. Raises BadInput if the plan does not fit the model or this host.
    """
    from meshwright.config.load import load_plan
    from meshwright.spec.layout import with_node_crossings
    from meshwright.spec.rank_environment import RankEnvironment, started_by_launcher
    from meshwright.training.spread import SpreadJob, join_and_answer

    model, weights = model_in(folder)
    plan = load_plan(plan_file)
    remedy = (
        "expected a plan for at most that many (`meshwright plan … --out FILE`), or start this command under a launcher"
    )
    cluster = cluster_here(plan.ranks, str(plan_file), remedy, launched=started_by_launcher())
    plan = with_node_crossings(plan, cluster.ranks_per_node)
    _check_fit(plan, model, plan_file, measurement.seq_len if measurement else None)
    job = SpreadJob(
        model=model, weights=weights, plan=plan, cluster=cluster, continuation=continuation, measurement=measurement
    )
    if not started_by_launcher():
        return _run_here(job)
    environment = RankEnvironment.from_environment()
    answer = join_and_answer(job, environment)
    if environment.rank:
        raise typer.Exit
    return answer


def model_in(folder: Path) -> tuple[ModelSpec, str]:
    """Return the dimensions of the model in a folder, and the source of its weights:

    `hf:DIR` or `checkpoint:DIR`. Weights are not read.

    For a run, it is the newest checkpoint.
    """
    from meshwright.checkpoint.format.inventory import newest_checkpoint
    from meshwright.checkpoint.models.hf import import_hf
    from meshwright.config.load import load_resolved
    from meshwright.spec.fields import from_plain, to_plain
    from meshwright.spec.model import ModelSpec, without_adapter

    if (folder / "config.json").exists():
        return import_hf(folder)[0], f"hf:{folder}"
    checkpoint = newest_checkpoint(folder, contents=False)
    section = to_plain(load_resolved(checkpoint / "config.yaml").model)
    names = ModelSpec.__dataclass_fields__
    model = from_plain(ModelSpec, {key: section[key] for key in names})
    return without_adapter(model), f"checkpoint:{checkpoint}"


def found_weights(folder: Path) -> tuple[Path, dict[str, object]]:
    """Return the folder with the weights of a model, and `facts` about the checkpoint for the command's JSON output.

    For a run, it is the newest undamaged checkpoint. If newer ones are damaged, a warning is printed.
    """
    from meshwright.checkpoint.format.inventory import choose_weights

    chosen = choose_weights(folder)
    if chosen is None:
        return folder, {}
    if chosen.warning is not None:
        say(f"meshwright: {chosen.warning}")
    return chosen.path, chosen.facts()


def _check_fit(plan: Plan, model: ModelSpec, file: Path, seq_len: int | None) -> None:
    """Raise BadInput, which names the plan file, if the plan cannot be used for this model."""
    from meshwright.planner.candidate import untrainable
    from meshwright.spec.layout import check_context, check_tensor, stage_table
    from meshwright.spec.plan import layer_range

    if refused := untrainable(plan):
        raise BadInput(f"{file}: {refused}")
    if expected := check_tensor(model, plan.axis_size("tensor"), seq_len):
        raise BadInput(f"{file} is not for this model: expected {expected}, got {plan.axis_size('tensor')}")
    if wrong := check_context(model, plan, seq_len):
        axis, expected = wrong
        raise BadInput(f"{file} is not for this model: {axis}: expected {expected}, got {plan.axis_size(axis)}")
    try:
        stage_table(plan.schedule, plan.axis_size("pipeline"), model.layers)
        covered = {layer for strategy in plan.layers for layer in layer_range(strategy.range, model.layers)}
    except ValueError as error:
        raise BadInput(f"{file} is not for this model of {model.layers} layers: {error}") from error
    if len(covered) < model.layers:
        first_missing = min(set(range(model.layers)) - covered)
        raise BadInput(
            f"{file} is not for this model of {model.layers} layers: no strategy covers layer {first_missing}"
        )


def check_split(model: ModelSpec, ranks: int, option: str = "--tensor") -> None:
    """Raise BadInput, with a message that begins with `option`, if `ranks` tensor-parallel ranks cannot divide the model."""
    from meshwright.spec.inference_layout import split_error

    if expected := split_error(model, ranks):
        raise BadInput(f"{option}: expected {expected}, got {ranks}")


def check_experts(model: ModelSpec, ranks: int, option: str) -> None:
    """Raise BadInput, with a message that begins with `option`, if `ranks` ranks cannot share the experts of the model."""
    from meshwright.spec.inference_layout import experts_error

    if expected := experts_error(model, ranks):
        raise BadInput(f"{option}: expected {expected}, got {ranks}")


def check_deployment(deployment: Deployment, model: ModelSpec) -> None:
    """Raise BadInput, with keys of the deployment's file, if instances cannot be served by this release or do not fit the model."""
    from meshwright.spec.deployment import release_error

    def check_expert(index: int, instance: InstanceSpec) -> None:
        with attach_key(f"instances.{index}.expert"):
            if (problem := release_error(instance, deployment.quantisation)) is not None:
                raise BadInput(problem)
            if instance.expert > 1:
                check_experts(model, instance.expert, "expert")

    def check_tensor(index: int, instance: InstanceSpec) -> None:
        with attach_key(f"instances.{index}.tensor"):
            check_split(model, instance.tensor, "tensor")

    if (mistake := deployment.release_mistake) is not None:
        raise BadInput(mistake[1], key=mistake[0])
    instances = enumerate(deployment.instances)
    call_all(*(partial(check, *entry) for entry in instances for check in (check_expert, check_tensor)))


def cluster_here(ranks: int, source: str, remedy: str, *, launched: bool = False) -> ClusterSpec:
    """Return this host as a cluster of `ranks` devices.

    If a launcher started this process, return the launcher's cluster.

    `source` is what requests the ranks, and `remedy` what the user can do. Raises BadInput if this host has fewer GPUs.
    """
    from meshwright.launch.machine import found_cluster
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.fields import from_plain

    cluster = from_plain(ClusterSpec, found_cluster())
    if launched:
        return cluster
    if not cluster.is_cpu and ranks > cluster.gpus_per_node:
        raise BadInput(f"{source} is for {ranks} ranks and this host has {cluster.gpus_per_node} GPUs; {remedy}")
    return replace(cluster, gpus_per_node=ranks)


def _run_here(job: object) -> SpreadAnswer:
    """Start the ranks of a plan on this host and return their answer. `job` is a SpreadJob."""
    from meshwright.spec.fields import from_plain, to_plain
    from meshwright.training.spread import SpreadAnswer, SpreadJob

    assert isinstance(job, SpreadJob)
    answer = answer_of_ranks("meshwright.training.spread", to_plain(job), job.cluster, job.weights)
    return from_plain(SpreadAnswer, answer)


def answer_of_ranks(module: str, question: object, cluster: ClusterSpec, weights: str) -> Any:
    """Start one rank for each device of `cluster`, which is this host, and return the answer of rank 0.

    - `module`: has a function `main` that runs a rank (`training.answer_rank`).
    - `question`: plain values that every rank receives. The answer is plain values too.
    - `weights`: source of the weights, for a message.

    If the ranks fail, this process exits with their code. Their logs are kept if they contain a traceback.
    """
    from meshwright.launch.local import run_ranks

    folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
    question_file = folder / "job.json"
    answer_file = folder / "answer.json"
    question_file.write_text(json.dumps(question), encoding="utf-8")
    threads = max(1, usable_cores() // cluster.ranks)
    print(f"loading {weights} on {cluster.ranks} ranks", file=sys.stderr)
    code = run_ranks(
        "meshwright.training.answer_rank",
        [module, str(question_file), str(answer_file)],
        cluster=cluster,
        logs=folder / "logs",
        threads=threads,
    )
    answer = json.loads(answer_file.read_text(encoding="utf-8")) if code == EXIT_DONE else None
    if code not in (EXIT_INTERNAL, EXIT_COMMUNICATION):
        shutil.rmtree(folder)
    if answer is None:
        sys.exit(code)
    return answer
