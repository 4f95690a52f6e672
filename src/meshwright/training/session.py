"""A rank's session: all objects that a run needs, created in order."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.format.inventory import newest_step
from meshwright.checkpoint.models.adapters import BASE
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.store import CheckpointStore
from meshwright.config.recorded_loads import read_loads
from meshwright.data.loader import DataSource, StepReader, Windows, has_validation, open_data
from meshwright.data.sample_steps import SampleSteps
from meshwright.data.streams.source import merge_cursors
from meshwright.data.verification import ShardVerifier
from meshwright.durable.writes import write_durable
from meshwright.events.messages import MessageChannel
from meshwright.events.progress import ProgressPage, ProgressSender
from meshwright.events.span import SPAN_PHASES
from meshwright.events.span_ring import SpanWriter, ring_path
from meshwright.events.start import StartClock
from meshwright.observe.device_clock import HostTime
from meshwright.observe.environment import environment
from meshwright.observe.recorder import DetailRecorder, StepRecorder
from meshwright.optim.optimizer import Optimizer
from meshwright.parallel.apply import PlannedModel, build_engine
from meshwright.parallel.fsdp import DTYPES
from meshwright.parallel.mesh import Mesh, build_mesh
from meshwright.parallel.replayed_routing import ReplayedRouting, replay_loads
from meshwright.parallel.sharded_unit import ShardedUnit
from meshwright.parallel.shared_ranks import ranks_of_stage
from meshwright.parallel.world import World
from meshwright.policies.sample_balance import rank_pool
from meshwright.policies.skipped_samples import SampleRange
from meshwright.spec.errors import BadInput
from meshwright.spec.hybrid import exchanged_heads, slot_numbering
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import LambSpec, MuonSpec
from meshwright.spec.plan import Plan
from meshwright.spec.run import Assignment, Lease, RunSpec
from meshwright.state.parts import StateParts
from meshwright.training.evaluate import HeldOut
from meshwright.training.expert_decisions import ExpertDecisions
from meshwright.training.expert_moves import ExpertMoves
from meshwright.training.numerics import NumericalPolicy
from meshwright.training.preferences import PreferenceRun
from meshwright.training.resume import Tier, resume
from meshwright.training.run_state import CURSORS, load_adapters, load_base, load_initial, run_state

if TYPE_CHECKING:
    from meshwright.rl.rollouts import Rollouts

KEPT_CURSORS = 4
"""Number of latest saves whose positions in the data a session keeps. A save is described only some time after it has begun."""
KEPT_RANGES = 64
"""Number of latest steps whose sample ranges a session keeps. The figures of a step are read one step late."""


@dataclass
class TrainingSession:
    """A run on one rank, ready for its next step.

    - `step`: the last step whose update the weights contain.
    - `tokens`: the valid tokens that were consumed until then.
    - `next_sample`: the first sample of the next step.
    - `samples_of`: the sample ranges of the latest steps.
    - `attempt`: counts how often the ranks were started within the job.
    - `steps_before`: `train.steps` of the start that wrote the resumed checkpoint.
    """

    run: RunSpec
    plan: Plan
    folder: Path
    world: World
    mesh: Mesh
    engine: PlannedModel
    optimizer: Optimizer
    store: CheckpointStore
    data: DataSource
    held_out: HeldOut | None
    recorder: StepRecorder
    spans: SpanWriter | None
    start: StartClock
    profile: tuple[int, int] | None
    lease: Lease
    timeline: tuple[int, int] | None = None
    attempt: int = 1
    resumed_from: Tier | None = None
    replay: ReplayedRouting | None = None
    decisions: ExpertDecisions | None = None
    numerics: NumericalPolicy = field(init=False)
    step: int = 0
    tokens: int = 0
    next_sample: int = 0
    samples_of: dict[int, SampleRange] = field(default_factory=dict)
    steps_before: int | None = None
    loaded: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the checkpoint that was loaded last; empty if none was loaded."""
    rollouts: Rollouts | None = None
    """Samples the steps of a run with reinforcement learning; None for other runs."""
    preferences: PreferenceRun | None = None
    """The objective of a run on preferences; None for other runs."""
    cursors: dict[int, dict[str, Any]] = field(default_factory=dict)
    """For each of the latest saved steps, the positions of all ranks in data that are read without preparation."""
    base: str | None = None
    """Digest of the frozen weights of a run with adapters; None for other runs."""
    progress: ProgressSender = field(
        default_factory=lambda: ProgressSender(ProgressPage.create(), MessageChannel(None))
    )

    def send_progress(self, progress: ProgressSender) -> None:
        """Report progress to the launcher from now on."""
        self.progress = progress
        self.recorder.page = progress.page
        self.engine.executor.on_action = progress.page.set_action
        if self.rollouts is not None:
            self.rollouts.on_progress = progress.page.set_action

    def step_reader(self) -> StepReader:
        """Return the reader of this rank's part of each step."""
        if self.rollouts is not None:
            return self.rollouts
        mesh = self.mesh
        batch = self.plan.batch
        samples = self.plan.samples
        if samples is not None:
            heads = exchanged_heads(self.run.model.kv_heads, mesh.axis_size("tensor"))
            pool = rank_pool(samples, mesh.data_ranks, mesh.axis_size("pipeline"), heads)
            return SampleSteps(
                self.data,
                tokens=self.run.train.tokens_per_step,
                pool=pool,
                rank=mesh.data_rank,
                numbering=slot_numbering(self.plan),
            )
        return Windows(
            self.data,
            global_batch=batch.global_batch,
            ramp=self.run.train.batch_ramp,
            data_rank=mesh.data_rank,
            data_ranks=mesh.data_ranks,
            micro_batch=batch.micro_batch,
        )

    def end_step(self, step: int, samples: SampleRange) -> None:
        """Record that `step`, which read `samples`, is now the last step."""
        self.step = step
        self.next_sample = samples[1]
        self.samples_of[step] = samples
        self.samples_of.pop(step - KEPT_RANGES, None)

    def phases(self, step: int) -> dict[str, float]:
        """Return the seconds of a step by phase; empty if the run does not report phases."""
        seconds = self.recorder.step_times(step) if self.run.observe.phases else {}
        if self.rollouts is not None and "data" in seconds:
            seconds["rollout"] = seconds.pop("data")
        return seconds

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record garbage collections in a `with` block. At its end, complete the file of spans."""
        try:
            with self.recorder.garbage_collections():
                yield
        finally:
            if self.rollouts is not None:
                self.rollouts.close()
            if self.spans is not None:
                with suppress(RuntimeError):  # after an error of the device its events cannot be read
                    self.recorder.flush()
                self.spans.close()

    def plain_state(self, step: int, tokens: int) -> dict[str, Any]:
        """Return the plain values for a checkpoint of `step`; `tokens` were consumed until then."""
        others = self.numerics.state(step) | ({} if self.decisions is None else self.decisions.state(step))
        # A background save calls this when later steps have already been launched.
        others |= {} if self.base is None else {BASE: self.base}
        next_sample = self.samples_of[step][1] if step in self.samples_of else self.next_sample
        others |= {} if self.rollouts is None else self.rollouts.state(next_sample)
        others |= {} if step not in self.cursors else {CURSORS: self.cursors[step]}
        return run_state(step, self.run.train, tokens, next_sample, self.data.record(), others)

    def gather_cursors(self, step: int) -> None:
        """Collect the positions in streamed data after `step`, the current step, from all ranks. Collective."""
        if not self.data.streams:
            return
        own = {name: known.tolist() for name, known in self.data.cursors(self.next_sample).items()}
        known = RankGroup(self.world.control).run_on_all("collecting positions in the data", lambda: own)
        self.cursors[step] = {name: merge_cursors([each[name] for each in known]).tolist() for name in own}
        for earlier in sorted(self.cursors)[:-KEPT_CURSORS]:
            del self.cursors[earlier]

    def state(self) -> dict[str, StateParts]:
        """Return this rank's tensors of the run's state by name. Waits for the last update of offloaded state."""
        return {parts.name: parts for parts in self.optimizer.state()}


def open_session(
    assignment: Assignment,
    world: World,
    clock: StartClock | None = None,
    on_action: Callable[[int], None] = lambda index: None,
) -> TrainingSession:
    """Build model, optimizer and data on the plan's mesh, and resume from the newest good checkpoint if there is one.

    `clock` counts the phases of the start. `on_action` is called at each action of forwards that run before the first step.
    """
    clock = clock or StartClock()
    run = assignment.run
    plan = assignment.plan
    folder = Path(assignment.folder)
    mesh = build_mesh(plan, world)
    clock.end("mesh")
    losses = {
        "loss_chunk": run.train.loss_chunk,
        "balance_loss": run.train.balance_loss,
        "balance_bias": 0.0 if run.model.adapter else run.train.balance_bias,
        "prediction_loss": run.train.prediction_loss,
        "z_loss": run.train.z_loss,
        "router_z_loss": run.train.router_z_loss,
    }
    exact = run.rl is not None and run.rl.exact
    recomputes = not (exact and mesh.device.type == "cuda")
    engine = build_engine(run.model, plan, mesh, seed=run.seed, recomputes=recomputes, on_phase_end=clock.end, **losses)
    if exact:
        from meshwright.rl.rollouts import use_exact_forward  # imports the engine, which other runs do without

        use_exact_forward(engine.model, run, DTYPES[plan.precision.compute], world.ranks)
    clock.end("model")
    data, held_out = _open_data(run, ShardVerifier(world.rank, world.ranks))
    _check_same_streams(data, RankGroup(world.control))
    clock.end("data")
    optimizer = open_optimizer(engine, run.model, run.train, mesh)
    clock.end("optimizer")
    spans = SpanWriter(*_span_file(assignment, world, mesh)) if run.observe.spans else None
    recorder_class = StepRecorder if spans or run.observe.phases else DetailRecorder
    recorder = recorder_class(world.device, world.rank, sink=spans.write if spans else None)
    session = TrainingSession(
        run=run,
        plan=plan,
        folder=folder,
        world=world,
        mesh=mesh,
        engine=engine,
        optimizer=optimizer,
        store=CheckpointStore(
            folder / "checkpoints",
            group=world.control,
            device_group=world.device_group,
            recorder=recorder,
            lease=assignment.lease,
        ),
        data=data,
        held_out=held_out,
        recorder=recorder,
        spans=spans,
        start=clock,
        profile=assignment.profile,
        lease=assignment.lease,
        timeline=assignment.timeline,
        attempt=assignment.attempt,
    )
    if assignment.replay_routing is not None:
        session.replay = _replayed_routing(session, Path(assignment.replay_routing))
    moves = None
    if plan.experts is not None and plan.experts.placement == "balanced":
        moves = ExpertMoves(engine.model, mesh, optimizer, engine.weights)
    session.decisions = ExpertDecisions.open(run, plan, mesh, engine.present_experts, moves)
    if session.replay is not None and session.decisions is not None and session.decisions.owners is not None:
        session.replay.positions = session.decisions.owners.positions
    session.numerics = NumericalPolicy(
        run.train, folder, assignment.skip_samples, mesh.axis_size("replicate"), lambda: newest_step(session.folder)
    )
    if run.model.adapter is not None:  # checkpoints do not have the frozen weights
        session.base = load_base(engine, run.model, run.model.init, run.seed)
    if run.preference is not None:
        clock.end("load")
        session.preferences = PreferenceRun.open(session, on_action)
        clock.end("reference")
    session.resumed_from = resume(session, assignment.resume_at_most)
    if session.resumed_from is None:
        if session.base is None:
            load_initial(engine.weights, run.model, run.model.init)
        else:
            load_adapters(engine.weights, run.model, session.base)
        optimizer.start_average()
    optimizer.release_master_weights()
    if run.rl is not None:
        from meshwright.rl.rollouts import Rollouts

        session.rollouts = Rollouts(run, plan, mesh, engine.weights, data, RankGroup(world.control), world.device_group)
        session.rollouts.restore(session.loaded)
    clock.end("load")
    if world.leads:
        _write_environment(folder)
    return session


def _replayed_routing(session: TrainingSession, path: Path) -> ReplayedRouting:
    """Make the routers of the session's model replay the loads that are recorded in a file."""
    spec = session.run.model
    routing = session.engine.executor.rank_model.routing
    if session.run.train.batch_ramp:
        raise BadInput(
            "--replay-routing: expected no train.batch_ramp: recorded loads are those of a step of train.global_batch"
        )
    loads = read_loads(path, spec)
    assert routing is not None  # read_loads refuses a dense model
    return replay_loads(session.engine.model, routing, loads, session.plan, session.mesh, session.run.train.seq_len)


def open_optimizer(engine: PlannedModel, model: ModelSpec, train: TrainSpec, mesh: Mesh) -> Optimizer:
    """Create the optimizer of a rank's engine. Collective for optimizers that update whole matrices."""
    ranks = ranks_of_stage(mesh) if isinstance(train.optimizer, (LambSpec, MuonSpec)) else None
    optimizer = Optimizer(
        engine.model,
        model,
        train,
        engine.weights,
        engine.host_offloaded,
        ranks,
        moments=engine.moments,
        offload_fraction=engine.offload_fraction,
        offload_staging=engine.offload_staging,
    )
    if engine.host_offloaded:
        _defer_updates(engine, optimizer)
    return optimizer


def _defer_updates(engine: PlannedModel, optimizer: Optimizer) -> None:
    """Arrange that a unit's update of state in host memory is launched just before the unit's weights are gathered."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}

    def complete(unit: ShardedUnit | None) -> bool:
        if unit is None:
            return optimizer.complete_updates()
        shards = (parameter.shard for group in unit.groups for parameter in group.parameters)
        return optimizer.complete_updates([names[id(shard)] for shard in shards])

    engine.executor.before_gather = complete
    engine.executor.launch_copies = optimizer.launch_copies
    optimizer.defer_updates()


def _span_file(assignment: Assignment, world: World, mesh: Mesh) -> tuple[Path, dict[str, Any]]:
    """Return the path and the header of this rank's file of spans."""
    epoch = assignment.lease.epoch
    attempt = assignment.attempt
    header = {
        "rank": world.rank,
        "ranks": world.ranks,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "epoch": epoch,
        "attempt": attempt,
        "device": world.device.type,
        "coordinates": dict(mesh.coordinates),
        "phases": SPAN_PHASES,
        "wall_minus_monotonic_ns": HostTime().offset_ns,
    }
    return ring_path(Path(assignment.folder), epoch, attempt, world.rank), header


def _open_data(run: RunSpec, verifier: ShardVerifier) -> tuple[DataSource, HeldOut | None]:
    """Open the training data, and the validation data if there are any; both consist of documents, or both of windows."""
    opened = partial(
        open_data,
        run.data,
        seed=run.seed,
        vocab_size=run.model.vocab_size,
        verifier=verifier,
        preference=run.preference,
    )
    data = opened(seq_len=run.train.seq_len, conversations=run.rl is not None)
    train = run.train
    if not has_validation(run.data, train.seq_len):
        return data, None
    validation = opened(seq_len=train.seq_len, split="validation")
    return data, HeldOut.of(validation, run.data.validation_tokens, train.global_batch_tokens)


def _check_same_streams(data: DataSource, ranks: RankGroup) -> None:
    """Raise BadInput if ranks see different files in a source that is read without preparation. Collective if there is such a source."""
    if not data.streams:
        return
    seen = ranks.run_on_all(
        "comparing the data", lambda: {name: each.index.digest for name, each in data.streams.items()}
    )
    for name in data.streams:
        other = next((rank for rank, each in enumerate(seen) if each[name] != seen[0][name]), None)
        if other is not None:
            raise BadInput(
                f"data.mix: {name}: rank {other} lists other files, sizes or tags than rank 0; all hosts need the same files, local ones "
                "with the same times",
                key="data.mix",
            )


def _write_environment(folder: Path) -> None:
    write_durable(folder / "environment.json", json.dumps(environment(), indent=1))
