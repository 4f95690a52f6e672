"""Conversion of a step's device values to its line in metrics.jsonl, one step late to avoid synchronisation.

The host launches step n + 1 before it reads step n; then the device still has work, so reading costs nothing. A stream of its own copies
figures to the host: on the compute stream they would wait there behind chunks of an offloaded optimizer in the copy engine's queue.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from meshwright.observe.device_clock import DeviceClock, clock_of
from meshwright.spec.model import flops_per_token
from meshwright.spec.plan import Plan
from meshwright.spec.run import RunSpec
from meshwright.training.stop import StopFlags
from meshwright.training.train_step import StepFigures
from meshwright.training.wire_count import WireCount

LENGTHS_INTERVAL = 50
"""Steps between two records of sample lengths."""
MOST_LENGTHS = 16_384
"""Most samples of a recorded step."""
SHORT_LOADS = 1024
"""Most expert loads in every line of metrics.jsonl."""
LOADS_INTERVAL = 10
"""Steps between two lines with more loads than that."""


@dataclass(frozen=True)
class _Pending:
    step: int
    host: dict[str, Any]
    values: torch.Tensor
    end: Any
    loads: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    lengths: np.ndarray | None = None
    sequences: int | None = None
    copied: Any = None
    """The stamp after the copies of `values`, `loads` and `sums`; None where nothing is copied."""
    figures: StepFigures | None = None
    """The copied tensors on the device, which must exist until then."""


class StepFigureReader:
    """Converts step figures to metric records in order.

    A step's time runs from the end of the previous step to its own end, on the device's clock.
    """

    def __init__(
        self,
        run: RunSpec,
        plan: Plan,
        device: torch.device,
        tokens_before: int,
        wire: WireCount | None = None,
        of_sums: Callable[[Sequence[float]], dict[str, Any]] | None = None,
    ) -> None:
        """`of_sums` makes figures of the sums of a step's objective."""
        self._of_sums = of_sums
        self._run = run
        self._device = device
        self._wire = wire
        self._tokens = tokens_before
        self._pending: list[_Pending] = []
        self._clock: DeviceClock = clock_of(device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last_end = self._clock.stamp()
        further = ("prediction_loss",) if run.model.prediction_depth else ()
        routed = ("router_z_loss",) if run.train.router_z_loss else ()
        self._model_figures = (*further, "balance_loss", "expert_load", *routed)
        self._flops_per_token = lru_cache(maxsize=1 << 16)(flops_per_token)
        self._peak = run.cluster.peak_flops(plan.precision.compute)
        self.flags = StopFlags()

    def push(
        self,
        step: int,
        figures: StepFigures,
        host: dict[str, Any],
        lengths: np.ndarray | None = None,
        sequences: int | None = None,
    ) -> list[dict[str, Any]]:
        """Add a launched step's figures; returns the records that are complete.

        `lengths` are those of the step's samples over all ranks; None if all have `train.seq_len` tokens. Then `sequences` is their number;
        None: `train.global_batch`.
        """
        loads = figures.loads
        if loads is not None and step > 1 and step % loads_interval(loads.numel()):
            loads = None
        pending = _Pending(step, host, figures.values, self._clock.stamp(), loads, figures.sums, lengths, sequences)
        if self._copies is None:
            self._pending.append(pending)
            return self.drain()
        # Stamped and copied before the host waits for the step before it.
        pending = self._copied(pending, figures, self._copies)
        earlier = self.drain()
        self._pending.append(pending)
        return earlier

    def _copied(self, pending: _Pending, figures: StepFigures, copies: torch.cuda.Stream) -> _Pending:
        """The step with tensors in host memory, complete at its stamp `copied`."""
        copies.wait_event(pending.end)
        with torch.cuda.stream(copies):
            values, loads, sums = (
                None if tensor is None else _to_host(tensor) for tensor in (pending.values, pending.loads, pending.sums)
            )
            assert values is not None
            copied = self._clock.stamp()
            return replace(pending, values=values, loads=loads, sums=sums, copied=copied, figures=figures)

    def drain(self) -> list[dict[str, Any]]:
        """Records of all added steps; waits for the device if necessary."""
        records = []
        while self._pending:
            records.append(self._record(self._pending.pop(0)))
        return records

    def pause(self) -> None:
        """Exclude the time since the last step (a checkpoint, a validation) from the next step.

        Raises RuntimeError if a step has not been read yet: it would end before it began.
        """
        if self._pending:
            raise RuntimeError(f"pause before step {self._pending[0].step} was read: drain first")
        self._last_end = self._clock.stamp()
        if self._wire:
            self._wire.pause()

    def _record(self, pending: _Pending) -> dict[str, Any]:
        self._clock.wait(pending.end if pending.copied is None else pending.copied)
        loss, norm, valid, token_sum, flag, skips, *of_model, z_loss = pending.values.tolist()
        seconds = self._clock.seconds(self._last_end, pending.end)
        self._last_end = pending.end
        self.flags = StopFlags(pending.step, int(flag))
        self._tokens += int(valid)
        train = self._run.train
        tokens, flops = self._work(pending.lengths, pending.sequences or train.global_batch)
        rate = tokens / seconds
        peak = self._peak and self._peak * self._run.cluster.ranks * seconds
        return {
            "kind": "step",
            "step": pending.step,
            "loss": loss,
            "grad_norm": norm,
            "tokens": self._tokens,
            "token_sum": int(token_sum),
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / self._run.cluster.ranks,
            "mfu": flops[True] / peak if peak else None,
            "mfu_full": flops[False] / peak if peak else None,
            "step_seconds": seconds,
            **({"update_skipped": True, "skipping_replicas": int(skips)} if skips else {}),
            **dict(zip(self._model_figures, of_model, strict=False)),
            **({"z_loss": z_loss} if train.z_loss else {}),
            **({} if pending.loads is None else {"expert_loads": pending.loads.long().tolist()}),
            **({} if pending.sums is None or self._of_sums is None else self._of_sums(pending.sums.tolist())),
            **memory_peak(self._device),
            **self._wire_bytes(pending.sequences),
            **pending.host,
        }

    def _wire_bytes(self, sequences: int | None) -> dict[str, float]:
        """Bytes between nodes of the step; none in a step of fewer sequences than the prediction is for."""
        if self._wire is None:
            return {}
        if sequences is not None and self._run.train.batch_ramp and sequences < self._run.train.global_batch:
            self._wire.pause()
            return {}
        return self._wire.step()

    def _work(self, lengths: np.ndarray | None, sequences: int) -> tuple[int, dict[bool, float]]:
        """Tokens of a step over all ranks, and its FLOPs with attention counted causal (True) or full."""
        train = self._run.train
        model = self._run.model
        if lengths is None:
            lengths = np.array([train.seq_len])
            counts = np.array([sequences])
        else:
            lengths, counts = np.unique(lengths, return_counts=True)
        flops = {
            causal: sum(
                count * length * self._flops_per_token(model, length, causal=causal)
                for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
            )
            for causal in (True, False)
        }
        return int(lengths @ counts), flops


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned host memory, launched on the current stream."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def sample_figures(step: int, lengths: np.ndarray, padding: float) -> dict[str, Any]:
    """Figures of a step's samples of any length; in some steps also the lengths `(S,)`, if they are not too many."""
    figures: dict[str, Any] = {"samples": len(lengths), "padding": padding}
    if step % LENGTHS_INTERVAL == 1 and len(lengths) <= MOST_LENGTHS:
        figures["sample_lengths"] = lengths.tolist()
    return figures


def loads_interval(counts: int) -> int:
    """Return the interval in steps between records of expert loads, for `counts` loads a record."""
    return 1 if counts <= SHORT_LOADS else LOADS_INTERVAL


def memory_peak(device: torch.device) -> dict[str, int]:
    """Peak memory of this rank: reserved and allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        return {"memory_peak_bytes": torch.cuda.max_memory_reserved(device), "memory_allocated_peak_bytes": allocated}
    return {"memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
