"""A toy rank: a few tensors that follow from the step, saved by `BackgroundSaver` as a rank of a training run does it."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.ranks import RankGroup
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write.background import BackgroundSaver, LiveState, SaveResult
from meshwright.launch.folder import take_over
from meshwright.spec.run import Lease
from meshwright.state.parts import StateParts

SIZES = {"embed": (40, 16), "a": (16, 16), "b": (5,), "c": (33, 7), "head": (40, 16)}
GROUPS = [["embed"], ["a", "b"], ["c", "head"]]


class ToyRank:
    """Weights and one moment whose values follow from the step, under the lease of `run`."""

    def __init__(
        self, run: Path, *, scale: int = 1, lease: Lease | None = None, keep: int = 3, **limits: float
    ) -> None:
        self.checkpoints = run / "checkpoints"
        if lease is None:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lease = take_over(run)
        self.lease = lease
        self.tensors = {
            f"{prefix}.{name}": torch.zeros(shape[0] * scale, *shape[1:])
            for prefix in ("model", "optimizer.exp_avg")
            for name, shape in SIZES.items()
        }
        parts = {name: StateParts.of_whole(name, tensor) for name, tensor in self.tensors.items()}
        state = LiveState(parts, GROUPS, {name: name.rpartition(".")[2] for name in parts})
        self.saver = BackgroundSaver(
            self.checkpoints,
            RankGroup(None),
            state,
            torch.device("cpu"),
            lease=lease,
            keep=keep,
            local_ranks=1,
            **limits,
        )

    def update(self, step: int) -> None:
        """The values of `step`, without a look at copies."""
        for name in self.tensors:
            self.update_one(name, step)

    def update_one(self, name: str, step: int) -> None:
        self.tensors[name].copy_(value(name, step, self.tensors[name].shape))

    def begin(self, step: int) -> None:
        """Begin the save of `step`, and update to the next step behind the copies as an optimizer does."""
        self.saver.agree_on_readiness()
        copies = self.saver.begin(step)
        self.saver.describe(step, lambda: encode_plain({"step": step}, {}))
        for group in copies.groups:
            copies.wait(group)
            for name in self.tensors:
                if name.rpartition(".")[2] in group:
                    self.update_one(name, step + 1)

    def save(self, step: int, seconds: float = 60.0) -> SaveResult:
        """Save the values of `step`, and return how that ended."""
        self.update(step)
        self.begin(step)
        assert self.saver.wait(seconds)
        result = self.saver.result()
        assert result is not None
        return result


def value(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    """Return the values of the tensor `name` after `step`."""
    start = step * 1000 + sorted(SIZES).index(name.rpartition(".")[2]) * 7 + (name.startswith("optimizer") * 3)
    return torch.arange(start, start + shape.numel(), dtype=torch.float32).view(shape)


def newest(run: Path, scale: int = 1) -> int | None:
    """The step of the newest good checkpoint, each tensor of which has that step's values; None where there is none."""
    path = CheckpointStore(run / "checkpoints").newest_good()
    if path is None:
        return None
    loaded = {
        f"{prefix}.{name}": torch.zeros(shape[0] * scale, *shape[1:])
        for prefix in ("model", "optimizer.exp_avg")
        for name, shape in SIZES.items()
    }
    step = CheckpointStore(path.parent).load(path, loaded)["step"]
    assert (
        path.name.removeprefix(".replaced-").partition(".")[0] == f"step-{step:08d}"
    )  # a crash may leave it moved aside
    for name, tensor in loaded.items():
        assert torch.equal(tensor, value(name, step, tensor.shape)), (name, step)
    return step
