"""`meshwright train`: starts the ranks of a run on this host, or joins a job as one rank if a launcher started this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from meshwright.cli.check import report_all_mistakes
from meshwright.cli.options import Arguments, Runs, load, print_now
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.launch.prepare import PreparedRun
    from meshwright.spec.cluster import ClusterSpec
    from meshwright.spec.job import TrainSpec
    from meshwright.spec.plan import Plan
    from meshwright.spec.run import Assignment, RunSpec

ProfileSteps = Annotated[
    str | None,
    typer.Option(
        "--profile-steps", metavar="A:B", help="Write one Perfetto trace per rank of steps A to B into RUN/traces/."
    ),
]
Timeline = Annotated[
    str | None,
    typer.Option(
        "--timeline",
        metavar="A:B",
        help="Write one Perfetto trace of what all ranks did in steps A to B, under what was predicted, into RUN/timelines/.",
    ),
]
ReplayRouting = Annotated[
    Path | None,
    typer.Option(
        "--replay-routing",
        metavar="FILE",
        help="Give experts the loads of a CSV (layer, step, expert_0, …) or of a run's metrics.jsonl, whatever routers choose.",
    ),
]


def train(
    arguments: Arguments = None,
    runs: Runs = Path("runs"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run beside an earlier one of this name, as NAME-2, NAME-3, …")
    ] = False,
    profile_steps: ProfileSteps = None,
    timeline: Timeline = None,
    replay_routing: ReplayRouting = None,
    agent: Annotated[
        bool,
        typer.Option(
            "--agent",
            help="Be the agent of this host in a run on several hosts: start its ranks, and restart them after failures.",
        ),
    ] = False,
) -> None:
    """Train a model from a run file, or continue a run that was stopped.

    The same command starts and resumes: a run of this name with the same configuration continues from its newest good checkpoint.
    Local ranks are started by this command itself. Under torchrun, Slurm or Kubernetes (RANK or SLURM_PROCID set) it joins as one rank.
    Started once per node by Slurm or an indexed Kubernetes job, with MESHWRIGHT_COORDINATOR set, it is the agent of its node (--agent).

    Examples:

        meshwright train run.yaml

        meshwright train run.yaml train.steps=200 cluster.gpus_per_node=4

        torchrun --nproc-per-node 8 -m meshwright train run.yaml

        MESHWRIGHT_COORDINATOR=10.0.0.1:29400 MESHWRIGHT_TOKEN_FILE=token meshwright train run.yaml --agent

    Ctrl-C ends the run after the running step, with a checkpoint and code 130; a second one ends it at once. SIGTERM or SIGUSR1 (a
    scheduler's warning) does as the first, with code 75.
    """
    from meshwright.launch.folder import renamed
    from meshwright.observe.closing import closing_lines
    from meshwright.spec.rank_environment import check_tasks, is_node_agent, started_by_launcher

    report = partial(report_all_mistakes, arguments, runs, fresh=fresh)
    with report():
        run = load(arguments, runs)
        steps = parse_steps("--profile-steps", profile_steps)
        drawn = parse_steps("--timeline", timeline)
        for option, span in (("--profile-steps", steps), ("--timeline", drawn)):
            if span and run.train.epochs is None and span[1] > run.train.steps:
                raise BadInput(f"{option} {span[0]}:{span[1]}: the run ends with step {run.train.steps}")
        if replay_routing is not None:
            from meshwright.config.recorded_loads import read_loads

            read_loads(replay_routing, run.model)
        check_tasks(run.cluster.gpus_per_node)
        if agent or is_node_agent():
            sys.exit(
                start_agent(
                    run,
                    arguments or [],
                    runs,
                    refused={
                        "--fresh": fresh,
                        "--profile-steps": steps,
                        "--timeline": drawn,
                        "--replay-routing": replay_routing,
                    },
                )
            )
        if started_by_launcher():
            join_ranks(run, runs, fresh, steps, drawn, report, replay_routing)
        run = renamed(run, runs) if fresh else run
        code = start_ranks(run, runs, steps, drawn, replay_routing)
    for line in closing_lines(runs / run.name, code):
        print_now(line)
    sys.exit(code)


def start_ranks(
    run: RunSpec,
    runs: Path,
    profile: tuple[int, int] | None,
    timeline: tuple[int, int] | None = None,
    replay: Path | None = None,
) -> int:
    """Train on ranks of this host, with messages on this terminal. Returns the exit code of the job.

    `profile` and `timeline` are ranges (first step, last step) to record. `replay` is a file of recorded expert loads.
    """
    from meshwright.launch.job import run_job

    return run_job(run, runs, profile=profile, timeline=timeline, replay=replay, note=print_now, announce=announce)


def start_agent(run: RunSpec, arguments: list[str], runs: Path, refused: dict[str, object]) -> int:
    """Run the agent of this host. Returns the exit code of the job. Raises BadInput if an option in `refused` has a value."""
    from meshwright.launch.hosts import run_agent

    for option, value in refused.items():
        if value:
            raise BadInput(
                f"{option} and --agent exclude each other (the agent of a node, if Slurm or Kubernetes started it)"
            )
    return run_agent(run, arguments, runs)


def join_ranks(
    run: RunSpec,
    runs: Path,
    fresh: bool,
    profile: tuple[int, int] | None,
    timeline: tuple[int, int] | None,
    report: Callable[[], AbstractContextManager[None]],
    replay: Path | None = None,
) -> NoReturn:
    """Run one rank of a job that a launcher started, and exit with its code. Rank 0 prepares the run for all ranks.

    `report` gives a context around the preparation. It turns an error into a report of every mistake.
    """
    from meshwright.events.start import StartClock
    from meshwright.spec.folders import compiler_cache

    clock = StartClock()
    clock.end("command")
    from meshwright.spec.rank_environment import RankEnvironment
    from meshwright.training.lifecycle import RankLife

    life = RankLife(RankEnvironment.from_environment())
    if cache := compiler_cache():
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))

    def work() -> None:
        from meshwright.training.rank import import_all

        import_all(cuda=not run.cluster.is_cpu)
        from meshwright.launch.folder import folder_lock, renamed
        from meshwright.parallel.world import join
        from meshwright.training.join import broadcast_assignment
        from meshwright.training.worker import run_rank

        clock.end("imports")

        def prepare() -> Assignment | None:
            named = renamed(run, runs) if fresh else run
            lock = folder_lock(runs / named.name)
            lock.__enter__()
            life.add_cleanup(lambda: lock.__exit__(None, None, None))
            with report():
                return _prepared(named, runs, profile, timeline, replay)

        world = join(life.environment, run.cluster, timeout_seconds=run.train.timeout_seconds)
        clock.end("join")
        if assignment := broadcast_assignment(world, prepare):
            life.log_to(Path(assignment.folder))
            clock.end("plan")
            run_rank(assignment, world, life, clock)
        world.leave()

    life.run(work)


def _prepared(
    run: RunSpec,
    runs: Path,
    profile: tuple[int, int] | None,
    timeline: tuple[int, int] | None,
    replay: Path | None,
) -> Assignment | None:
    """Prepare the run, print it, and return the assignment of the ranks. None if the run is already finished."""
    from meshwright.launch.prepare import prepare_run

    prepared = prepare_run(run, runs, profile=profile, note=print_now, timeline=timeline, replay=replay)
    if prepared is None:
        return None
    announce(prepared)
    return prepared.assignment


def announce(prepared: PreparedRun) -> None:
    """Print the run, its devices and its plan before the start."""
    from meshwright.cli.plan_words import adapter_text, axes_line, layers_line
    from meshwright.launch.disk import checkpoints_line
    from meshwright.observe.number_text import short
    from meshwright.spec.model import flops_per_token, layer_order, parameter_count

    assignment = prepared.assignment
    run = assignment.run
    plan = assignment.plan
    saves_memory = any(layer.recompute != "none" or layer.offload != "none" for layer in plan.layers)
    seq = run.train.seq_len
    print_now(f"{'resume' if prepared.resumes else 'run'} {assignment.folder}")
    print_now(
        f"  {short(parameter_count(run.model))} parameters, {flops_per_token(run.model, seq, causal=True) / 1e9:.3g} GFLOP a token "
        f"(causal; {flops_per_token(run.model, seq, causal=False) / 1e9:.3g} full), {_tokens_a_step(run.train)}, "
        f"{run.train.steps} steps"
    )
    if order := layer_order(run.model):
        print_now(f"  {order}")
    if run.model.adapter is not None:
        print_now(f"  adapters: {adapter_text(run.model, seq)}")
    print_now(f"  on {_devices(run.cluster)}")
    batch = plan.batch
    parts = [
        axes_line(plan),
        f"micro-batch {batch.micro_batch}" + (f" × {batch.accumulate}" if batch.accumulate > 1 else ""),
        _formats(run, plan),
        *([layers_line(plan)] if saves_memory else []),
    ]
    print_now(f"  plan: {', '.join(parts)}")
    for reason in plan.why[:1]:
        print_now(f"    {reason}")
    for line in prepared.data_lines:
        print_now(f"  {line}")
    if line := checkpoints_line(run):
        print_now(f"  {line}")


def _tokens_a_step(train: TrainSpec) -> str:
    """Return the number of tokens of a step, in words. With a batch ramp, it names the first and the last number."""
    steps = f"{train.tokens_per_step:,} tokens a step"
    if not train.batch_ramp:
        return steps
    return f"{train.batch_ramp[0].batch * train.seq_len:,} to {steps} (all of them after step {train.ramp_steps:,})"


def _devices(cluster: ClusterSpec) -> str:
    """Return the devices of a cluster in a few words. For CPU ranks, it also says how many GPUs of this host are idle."""
    from meshwright.launch.machine import visible_gpus

    nodes = f"{cluster.nodes} nodes of " if cluster.nodes > 1 else ""
    devices = f"{nodes}{cluster.gpus_per_node} × {cluster.gpu}"
    if not cluster.is_cpu:
        return devices
    idle = visible_gpus()
    hint = f" ({idle} GPU{'s' * (idle > 1)} idle: cluster=auto uses the devices of this machine)"
    return f"{devices}{hint if idle else ''}"


def _formats(run: RunSpec, plan: Plan) -> str:
    """Return the formats of compute and of linear layers in words."""
    precision = plan.precision
    formats = dict.fromkeys(layer.linear or precision.linear for layer in plan.layers)
    low = [name for name in formats if name != "compute"]
    if not low:
        return precision.compute
    emulated = " (emulated on the CPU, slowly)" if run.cluster.is_cpu else ""
    return f"{precision.compute}, {'some ' * ('compute' in formats)}linear layers {' and '.join(low)}{emulated}"


def parse_steps(option: str, text: str | None) -> tuple[int, int] | None:
    """Parse `A:B` into two step numbers (first, last). None if `text` is None. Raises BadInput if the form is wrong."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise BadInput(f"{option} {text}: expected A:B with 1 ≤ A ≤ B, e.g. 10:12")
    return int(first), int(last)
