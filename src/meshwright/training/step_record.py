"""Converts a step's values on the device to its record in metrics.jsonl, one step late to avoid synchronisation.

The host launches step n + 1 before it reads the values of step n. The device then still has work, so reading costs no time. The values are
copied to the host on a stream of their own. On the compute stream they would wait in the copy engine's queue behind chunks of an offloaded
optimizer.
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
"""Number of steps between two records of sample lengths."""
MOST_LENGTHS = 16_384
"""Lengths are recorded only for steps with at most this many samples."""
SHORT_LOADS = 1024
"""Up to this many expert loads are recorded in every step."""
LOADS_INTERVAL = 10
"""Number of steps between two records of expert loads, if there are more loads than `SHORT_LOADS`."""


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
    """The clock's stamp after the copies of `values`, `loads` and `sums`; None if nothing is copied (on a CPU)."""
    figures: StepFigures | None = None
    """The tensors on the device that are copied. They are referenced here until the copies have ended."""


class StepFigureReader:
    """Converts the figures of steps to metric records, in order.

    The time of a step is measured on the device's clock, from the end of the previous step to the end of this step.
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
        """`of_sums` computes figures from the sums of a step's objective; None if the run has none."""
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
        """Add the figures of a launched step. Returns the records that are complete now.

        `lengths` has the lengths of the step's samples on all ranks. If all samples have `train.seq_len` tokens, it is None, and
        `sequences` is their number; None: `train.global_batch`.
        """
        loads = figures.loads
        if loads is not None and step > 1 and step % loads_interval(loads.numel()):
            loads = None
        pending = _Pending(step, host, figures.values, self._clock.stamp(), loads, figures.sums, lengths, sequences)
        if self._copies is None:
            self._pending.append(pending)
            return self.drain()
        # The step is stamped and copied before `drain` makes the host wait for the previous step.
        pending = self._copied(pending, figures, self._copies)
        earlier = self.drain()
        self._pending.append(pending)
        return earlier

    def _copied(self, pending: _Pending, figures: StepFigures, copies: torch.cuda.Stream) -> _Pending:
        """Start the copies of a step's tensors. Returns the step with tensors in host memory, complete at its stamp `copied`."""
        copies.wait_event(pending.end)
        with torch.cuda.stream(copies):
            values, loads, sums = (
                None if tensor is None else _to_host(tensor) for tensor in (pending.values, pending.loads, pending.sums)
            )
            assert values is not None
            copied = self._clock.stamp()
            return replace(pending, values=values, loads=loads, sums=sums, copied=copied, figures=figures)

    def drain(self) -> list[dict[str, Any]]:
        """Return the records of all added steps; waits for the device if necessary."""
        records = []
        while self._pending:
            records.append(self._record(self._pending.pop(0)))
        return records

    def pause(self) -> None:
        """Exclude the time since the last step from the time of the next step, for example the time of a checkpoint or a validation.

        Raises RuntimeError if a step has not been read yet, because that step would then end before it began.
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
        """Return the bytes that the step sent between nodes. Steps with fewer sequences than the prediction is for return none."""
        if self._wire is None:
            return {}
        if sequences is not None and self._run.train.batch_ramp and sequences < self._run.train.global_batch:
            self._wire.pause()
            return {}
        return self._wire.step()

    def _work(self, lengths: np.ndarray | None, sequences: int) -> tuple[int, dict[bool, float]]:
        """Return the tokens of a step on all ranks, and its FLOPs: with causal attention (True) and with full attention (False)."""
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
    """Start a copy to pinned host memory on the current stream and return the copy."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def sample_figures(step: int, lengths: np.ndarray, padding: float) -> dict[str, Any]:
    """Return figures of a step with samples of any length. Some steps also have the lengths themselves, if they are not too many."""
    figures: dict[str, Any] = {"samples": len(lengths), "padding": padding}
    if step % LENGTHS_INTERVAL == 1 and len(lengths) <= MOST_LENGTHS:
        figures["sample_lengths"] = lengths.tolist()
    return figures


def loads_interval(counts: int) -> int:
    """Return after how many steps expert loads are recorded, if a record has `counts` loads."""
    return 1 if counts <= SHORT_LOADS else LOADS_INTERVAL


def memory_peak(device: torch.device) -> dict[str, int]:
    """Return the peak memory of this rank: reserved and allocated by torch on a GPU, resident in host memory on a CPU."""
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        return {"memory_peak_bytes": torch.cuda.max_memory_reserved(device), "memory_allocated_peak_bytes": allocated}
    return {"memory_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
