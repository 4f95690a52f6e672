"""Functions that ranks run in the training tests: whole training runs in a process group of the pool, and their results."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.format.manifest import CONTENTS
from meshwright.checkpoint.store import CheckpointStore
from meshwright.models.decoder import Decoder
from meshwright.observe.metrics import MetricsWriter
from meshwright.optim.fused import MOMENTS
from meshwright.parallel.apply import local_weights
from meshwright.parallel.world import World
from meshwright.spec.errors import BadInput, MeshwrightError
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizers import MOMENTUM
from meshwright.spec.plan import DATA_AXES
from meshwright.spec.run import Assignment
from meshwright.training.evaluate import Evaluation, evaluate
from meshwright.training.join import broadcast_assignment
from meshwright.training.loop import train
from meshwright.training.reporting import Reporter
from meshwright.training.run_state import load_initial
from meshwright.training.session import TrainingSession, open_session
from meshwright.training.stop import StopRequest
from tests.distributed.test_equality import assemble_whole


@dataclass
class Seen:
    """Results of a run on one rank.

    `began` is the step from which the run started. `model_rank` is the rank's index among the ranks that read the same samples. `tensors`
    are the whole weights and moments of its stages, on the first data rank only.
    """

    began: int
    model_rank: int
    error: tuple[str, str] | None
    steps: list[dict[str, Any]]
    validations: list[tuple[int, Evaluation]]
    indices: list[list[int]]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.steps]

    @property
    def last(self) -> int:
        return self.steps[-1]["step"] if self.steps else self.began


class Watching(Reporter):
    """Records the metrics and validations that a run reports."""

    def __init__(self, session: TrainingSession) -> None:
        path = session.folder / "metrics.jsonl"
        super().__init__(MetricsWriter(path, resume_from=session.step) if session.world.leads else None, None, None)
        self.steps: list[dict[str, Any]] = []
        self.validations: list[tuple[int, Evaluation]] = []

    def step(self, record: dict[str, Any]) -> None:
        super().step(record)
        self.steps.append(record)

    def validation(self, step: int, result: Evaluation) -> None:
        super().validation(step, result)
        self.validations.append((step, result))


def run(
    world: World,
    assignment: Assignment,
    stop_at: int = 0,
    stop_rank: int = 0,
    flag: int = 1,
    poison: str = "",
    poison_rank: int = 1,
) -> Seen:
    """Continue the run from the newest checkpoint in its folder, to its end or to the end of step `stop_at`.

    The stop is requested on `stop_rank` only, during that step, with the value `flag`. `poison` names a weight of which `poison_rank` sets
    one element to NaN before the first step.
    """
    session = open_session(assignment, world)
    stop, began = StopRequest(), session.step
    indices = _recorded(session)

    play = session.engine.executor.play

    def play_and_ask(*arguments: Any, **named: Any) -> torch.Tensor:
        if session.step == stop_at - 1 and world.rank == stop_rank:
            stop.flag = flag
        return play(*arguments, **named)

    session.engine.executor.play = play_and_ask
    if poison and world.rank == poison_rank:
        with torch.no_grad():
            _part(session.engine.model.get_parameter(poison)).view(-1)[0] = torch.nan
    error = None
    with closing(Watching(session)) as reporter:
        try:
            train(session, reporter, stop)
        except MeshwrightError as raised:
            error = (type(raised).__name__, str(raised))
    tensors = _whole(session) if session.mesh.data_rank == 0 else _whole(session, keep=False)
    steps = assignment.plan.batch.accumulate * len(reporter.steps)
    model_rank = 0
    for axis, size in session.mesh.layout.axes:
        model_rank = model_rank if axis in DATA_AXES else model_rank * size + session.mesh.coordinate(axis)
    return Seen(began, model_rank, error, reporter.steps, reporter.validations, indices[:steps], tensors)


def opened(world: World, assignment: Assignment) -> tuple[int, dict[str, torch.Tensor]]:
    """Open a run; returns the step from which it resumes, and the whole tensors of this rank's stages."""
    session = open_session(assignment, world)
    return session.step, _whole(session)


def initial(world: World, assignment: Assignment) -> tuple[Seen, list[tuple[str, int, int]]]:
    """Run with initial weights from a folder; returns the results and (tensor, first row, last row) of each read of this rank."""
    from meshwright.checkpoint.models.hf import HFReader
    from meshwright.checkpoint.read.reader import CheckpointReader

    read: list[tuple[str, int, int]] = []
    originals = {reader_class: reader_class.read_rows for reader_class in (HFReader, CheckpointReader)}

    def recording(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def read_rows(reader: Any, tensor: Any, first: int, last: int) -> torch.Tensor:
            read.append((str(getattr(tensor, "name", tensor)).removeprefix("model."), first, last))
            return original(reader, tensor, first, last)

        return read_rows

    for reader_class, original in originals.items():
        reader_class.read_rows = recording(original)
    try:
        return run(world, assignment), read
    finally:
        for reader_class, original in originals.items():
            reader_class.read_rows = original


def refusal(world: World, spec: ModelSpec, init: str) -> str:
    """The error of `load_initial` for weights that do not fit the model."""
    try:
        load_initial(local_weights(Decoder(spec)), spec, init)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def validate_and_compare(world: World, assignment: Assignment) -> tuple[list[bool], list[bool]]:
    """Whether each parameter is a shard before and after one evaluation."""
    session = open_session(assignment, world)
    assert session.held_out is not None

    def sharded() -> list[bool]:
        return [isinstance(parameter, DTensor) for parameter in session.engine.model.parameters()]

    before_validation = sharded()
    evaluate(session.engine, session.held_out, mesh=session.mesh, micro_batch=2, device=world.device, plan=session.plan)
    return before_validation, sharded()


def received_assignment(world: World, assignment: Assignment | None, full_disk: bool = False) -> Any:
    """Return the result or error of `broadcast_assignment` if rank 0 prepares `assignment`, or fails to prepare it."""

    def prepare() -> Assignment:
        if full_disk:
            raise OSError(errno.ENOSPC, "No space left on device", "/runs/x/config.yaml")
        if assignment is None:
            raise BadInput("planned")
        return assignment

    try:
        return broadcast_assignment(world, prepare)
    except (MeshwrightError, OSError) as error:
        return type(error).__name__, str(error)


def traced(world: World, assignment: Assignment) -> list[str]:
    """Run with profiling; returns the names of the trace files after all ranks have finished."""
    run(world, assignment)
    torch.distributed.barrier()
    return sorted(path.name for path in (Path(assignment.folder) / "traces").iterdir())


def _recorded(session: TrainingSession) -> list[list[int]]:
    """A list that collects the global sample indices of every micro-batch that the session's loader reads later, in order."""
    batches: list[list[int]] = []
    original = session.data.samples

    def samples(indices: Any) -> Any:
        batches.append([int(index) for index in indices])
        return original(indices)

    session.data.samples = samples  # type: ignore[method-assign]
    return batches


def _whole(session: TrainingSession, *, keep: bool = True) -> dict[str, torch.Tensor]:
    """Weights and moments of this rank's stages, gathered over shard and tensor ranks; empty unless `keep`. Collective."""
    whole = assemble_whole(as_dtensors(session), session.run.model, session.mesh)
    return whole if keep else {}


def as_dtensors(session: TrainingSession) -> dict[str, torch.Tensor]:
    """The session's state, each tensor with the layout of its parameter."""
    parameters = dict(session.engine.model.named_parameters())
    prefixes = ["model.", "ema.", *(f"optimizer.{state}." for state in (*MOMENTS, *MOMENTUM))]
    dtensors = {}
    for name, parts in session.state().items():
        prefix = next(candidate for candidate in prefixes if name.startswith(candidate))
        full, local = parameters[name.removeprefix(prefix)].detach(), parts.read()
        if isinstance(full, DTensor):
            layout = {"run_check": False, "shape": full.shape, "stride": full.stride()}
            local = DTensor.from_local(local, full.device_mesh, full.placements, **layout)
        dtensors[name] = local
    return dtensors


def saved_both_ways(world: World, assignment: Assignment, folder: str) -> dict[str, list[bytes]]:
    """File contents of two checkpoints by name: of the session's state, and of the same tensors as DTensors. Collective."""
    session = open_session(assignment, world)
    files: dict[str, list[bytes]] = {}
    for name, tensors in (("parts", session.state()), ("dtensors", as_dtensors(session))):
        path = CheckpointStore(Path(folder) / name, group=world.control).save(1, tensors, {}, {}).path
        for file in sorted(path.iterdir()):
            if file.suffix == ".safetensors" or file.name == CONTENTS:
                files.setdefault(file.name, []).append(file.read_bytes())
    return files


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
