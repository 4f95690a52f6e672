"""Text generation under a training plan. For each new token the model runs on all tokens so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from meshwright.data.loader import MicroBatch
from meshwright.events.span import NullRecorder
from meshwright.kernels.token_draw import draw_tokens
from meshwright.parallel.apply import PlannedModel
from meshwright.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class GenerationSampling:
    """Sampling parameters.

    - `tokens`: the most new tokens.
    - `temperature`: 0 takes the likeliest token, otherwise a token is drawn.
    - `top_k`: tokens are drawn among this many likeliest ones; 0: among all.
    - `seed`: a draw is a function of the seed and the token's position (`kernels.token_draw`).
    - `stops`: tokens at which the text ends; they are not part of it.
    """

    tokens: int
    temperature: float
    top_k: int
    seed: int
    stops: tuple[int, ...]


def generate_under_plan(
    engine: PlannedModel,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    how: GenerationSampling,
    *,
    progress: Callable[[int], None],
) -> list[list[int]]:
    """Return the new token ids for each prompt, computed by a model distributed over ranks. Every rank returns all of them. Collective.

    Each prompt is a micro-batch, so several prompts fill a pipeline. All data ranks run the same prompts: more data ranks need less memory
    per rank for weights, but do not save time. `progress` is called with the number of new tokens of the longest text.
    """
    schedule_for = cache(engine.evaluation_schedule)
    parts = mesh.axis_size("tensor") * mesh.axis_size("context_ulysses") * mesh.axis_size("context_ring")
    parts *= 1 + (mesh.axis_size("context_ring") > 1)  # a ring's ranks have two chunks each
    source = mesh.layout.rank({"pipeline": engine.training.rank_of[-1]})

    def next_tokens(texts: Sequence[_Text]) -> list[int]:
        windows = [text.window for text in texts]
        batches = [_without_targets(_padded(window, parts), mesh.device) for window in windows]
        logits = engine.executor.logits(schedule_for(len(texts)), batches, NullRecorder())
        chosen = torch.zeros(len(texts), dtype=torch.int64)
        for number, text in enumerate(texts):
            if number in logits:
                chosen[number] = text.draw(logits[number][0, len(windows[number]) - 1])
        dist.broadcast(chosen, source, group=mesh.world.control)
        return chosen.tolist()

    longest = engine.model.spec.max_seq_len
    texts = [_Text(prompt, how, longest - longest % parts) for prompt in prompts]
    while unfinished := [text for text in texts if not text.ended]:
        for text, token in zip(unfinished, next_tokens(unfinished), strict=True):
            text.add(token)
        progress(max(len(text.new) for text in texts))
    return [text.new for text in texts]


class _Text:
    """A prompt and the new tokens after it."""

    def __init__(self, prompt: Sequence[int], how: GenerationSampling, longest: int) -> None:
        self._prompt = list(prompt)
        self._how = how
        self._longest = longest
        self.new: list[int] = []
        self.ended = not how.tokens

    @property
    def window(self) -> list[int]:
        """The tokens that the model reads: the latest ones, as many as it has positions for."""
        return [*self._prompt, *self.new][-self._longest :]

    def draw(self, logits: torch.Tensor) -> int:
        """Return the next token, given the logits `(vocab)` after the last token."""
        how = self._how
        position = len(self._prompt) + len(self.new)
        options = (torch.tensor([value]) for value in (how.temperature, how.top_k, how.seed, position))
        return int(draw_tokens(logits[None].cpu(), *options))

    def add(self, token: int) -> None:
        stopped = token in self._how.stops
        self.new += [] if stopped else [token]
        self.ended = stopped or len(self.new) == self._how.tokens


def _padded(tokens: Sequence[int], multiple: int) -> list[int]:
    """Return `tokens` padded to a multiple of `multiple`. Attention is causal, so no token reads the padding."""
    return [*tokens, *[0] * (-len(tokens) % multiple)]


def _without_targets(tokens: Sequence[int], device: torch.device) -> MicroBatch:
    return MicroBatch(torch.tensor([tokens], device=device), None, None, None, valid_tokens=0)
