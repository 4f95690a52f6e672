"""An engine that records the shape and the times of each step. The cost model of deployments is fitted to these records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.kernels.paged_attention import PROGRAMS_PER_PROCESSOR
from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine
from meshwright.serve.generation import Update
from meshwright.serve.readback import LaunchedStep
from meshwright.spec.engine import EngineOptions
from meshwright.spec.serve_profile import ProfiledChunk


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The record of one step. All times are seconds of the engine's timer."""

    decodes: int
    """Number of decodes."""
    positions: int
    """Sum over all decodes of the number of positions to which the decode attends, its own position included."""
    longest: int
    """Largest number of positions to which one decode attends."""
    chunks: tuple[ProfiledChunk, ...]
    """The chunks of prompts."""
    launch_begin: float
    """Time when the host began to plan and launch the step."""
    launch_end: float
    """Time when the host had launched the step."""
    device_begin: float
    """Time when the device could begin the step: the launch had begun, and the device had completed the step before."""
    device_end: float
    """Time when the device had completed the step."""
    end: float
    """Time when the host had read the step's tokens."""


class TimedEngine(Engine):
    """An engine that records its completed steps in `steps`. `timer` returns the time in seconds."""

    def __init__(self, model: Decoder, options: EngineOptions, timer: Callable[[], float]) -> None:
        self.steps: list[TimedStep] = []
        self._timer = timer
        self.launched = 0
        """Number of steps that were launched so far."""
        self._launches: dict[int, Callable[[], TimedStep]] = {}
        self._last_end = 0.0
        super().__init__(model, options=options)
        self._on_device = model.embed.weight.is_cuda
        self._origin: tuple[torch.cuda.Event, float] | None = None
        """An event on the device, and the time of the event by the timer. None on a CPU."""
        self.forget_steps()

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched while the one before it runs."""
        return self._overlap

    @property
    def times_device(self) -> bool:
        """Whether the times of steps are measured on the device. If not, they are measured on the host."""
        return self._origin is not None

    @property
    def whole_tokens(self) -> int:
        """On a GPU, `BatchInputs.prompt_unit`: the first chunk of a prompt attends without the cache from this size on. 0 on a CPU."""
        return self._inputs.prompt_unit if self._on_device else 0

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens to which steps with prompts are padded, ascending. Larger steps are not padded."""
        return self._runner.prompt_sizes

    @property
    def decode_programs(self) -> int:
        """Number of programs into which the GPU's kernel divides the attention of decodes. 0 on a CPU."""
        if not self._on_device:
            return 0
        return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(self._inputs.device).multi_processor_count

    def forget_steps(self) -> None:
        """Begin a new list of steps. It also sets `_origin` again, because the device's clock and the timer drift apart within minutes."""
        self.steps = []
        if self._on_device:
            event = _recorded()
            event.synchronize()
            self._origin = event, self._timer()

    def _launch(self, updates: list[Update], drafting: bool) -> LaunchedStep | None:
        begin = self._timer()
        device_begin = self._mark()
        launched = super()._launch(updates, drafting)
        if launched is None:
            return None
        launch_end = self._timer()
        device_end = self._mark()
        step = launched.step
        attended = [part.start + 1 for part in step.parts[: step.decodes]]
        positions = sum(attended)
        longest = max(attended, default=0)
        chunks = tuple(ProfiledChunk(start=part.start, count=part.count) for part in step.parts[step.decodes :])

        def completed() -> TimedStep:
            end = self._timer()
            first = self._time_of(device_begin)
            last = self._time_of(device_end)
            if first is None or last is None:
                first = max(begin, self._last_end)
                last = end
            return TimedStep(step.decodes, positions, longest, chunks, begin, launch_end, first, last, end)

        self.launched += 1
        self._launches[step.number] = completed
        return launched

    def _complete(self, launched: LaunchedStep, updates: list[Update]) -> None:
        super()._complete(launched, updates)
        step = self._launches.pop(launched.step.number)()
        self.steps.append(step)
        self._last_end = step.end

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._origin is None else _recorded()

    def _time_of(self, event: torch.cuda.Event | None) -> float | None:
        """Return the time when the device reached the event, by the timer."""
        if event is None or self._origin is None:
            return None
        event.synchronize()
        first, seconds = self._origin
        return seconds + first.elapsed_time(event) / 1000


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
