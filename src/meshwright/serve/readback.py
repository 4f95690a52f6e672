"""`TokenReadback` copies the results of a step to the host. The copy is started with the step, and read when it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.policies.batch_request import EngineStep, RequestPart
from meshwright.serve.batch_inputs import PackedStep
from meshwright.serve.generation import TokenLogprob
from meshwright.serve.prompt_scores import StepScores
from meshwright.serve.sampling import TokenLogprobs

BUFFERS = 3
"""Number of pinned buffers for tokens, which steps use in turn. Two steps may be in flight, so the third buffer is always free."""


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device computes, and whose tokens the host has not read yet."""

    step: EngineStep
    parts: Sequence[RequestPart]
    """The parts that get a token."""
    tokens: Tensor
    """Memory of the host with the token of each sample, valid after the event `copied`.

    In a step with drafts, the numbers of accepted drafts of the parts with drafts come after the tokens.
    """
    logprobs: TokenLogprobs | None
    """Log probabilities of the tokens, on the host, valid after `copied`. None if no request wants them."""
    copied: torch.cuda.Event | None
    """Event at the end of the copies to the host; None on a CPU."""
    scores: StepScores | None = None
    """Log probabilities of prompts, on the host, valid after `copied`. None if no request wants them."""
    draft_counts: Sequence[int] = ()
    """Number of tokens of each part with drafts (1 + its drafts). These parts come first in `parts`."""

    def has_come(self) -> bool:
        """Return whether the tokens are on the host, so that `read` does not wait. Always false on a CPU."""
        return self.copied is not None and self.copied.query()

    def read(self) -> list[int]:
        """Return `tokens` as a list. It waits until the device has computed them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tokens.tolist()

    def read_drafted(self) -> list[list[tuple[int, TokenLogprob | None]]]:
        """Return the new tokens of each part, with log probabilities. A part gets its accepted drafts and one more token."""
        drafted = len(self.draft_counts)
        values = self.read()
        pairs = list(zip(values[: len(values) - drafted], self.token_logprobs(len(values) - drafted), strict=True))
        new = []
        start = 0
        for count, accepted in zip(self.draft_counts, values[len(values) - drafted :], strict=True):
            new.append(pairs[start : start + accepted + 1])
            start += count
        return new + [[pair] for pair in pairs[start:]]

    def token_logprobs(self, tokens: int) -> list[TokenLogprob | None]:
        """Return the log probabilities of the first `tokens` tokens; None for each token if no request wants them. Call `read` before."""
        if self.logprobs is None:
            return [None] * tokens
        if not self.logprobs.top.shape[1]:
            return [TokenLogprob(p, ()) for p in self.logprobs.chosen.tolist()]
        chosen, top_tokens, top = (values.tolist() for values in self.logprobs)
        return [
            TokenLogprob(p, tuple(zip(*pairs, strict=True))) for p, *pairs in zip(chosen, top_tokens, top, strict=True)
        ]


class TokenReadback:
    """Copies the results of steps to pinned memory of the host. `tokens` is the largest number of values that `start` copies for a step."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        count = BUFFERS if self._cuda else 0
        self._buffers = [torch.empty(tokens, dtype=torch.int32, pin_memory=True) for _ in range(count)]
        self._events = [torch.cuda.Event() for _ in range(count)]
        self._turn = 0

    def start(
        self,
        step: EngineStep,
        packed: PackedStep,
        tokens: Tensor,
        logprobs: TokenLogprobs | None,
        scores: StepScores | None = None,
        accepted: Tensor | None = None,
    ) -> LaunchedStep:
        """Start to copy the results of a step to the host.

        - `tokens`: `(samples,)`: the new tokens.
        - `logprobs`: log probabilities of the new tokens.
        - `scores`: log probabilities of prompt tokens.
        - `accepted`: `(drafted,)`: numbers of accepted drafts, in a step with drafts.

        On a GPU, the third further call of `start` overwrites the tokens of the returned step.
        """
        counts = () if packed.drafts is None else packed.drafts.counts
        if accepted is not None:
            tokens = torch.cat((tokens, accepted))
        if not self._cuda:
            return LaunchedStep(step, packed.sampled_parts, tokens, logprobs, None, scores, counts)
        buffer = self._buffers[self._turn][: len(tokens)]
        event = self._events[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        buffer.copy_(tokens, non_blocking=True)
        if logprobs is not None:
            logprobs = TokenLogprobs(*map(_to_pinned_memory, logprobs))
        if scores is not None:
            scores = scores._replace(values=tuple(map(_to_pinned_memory, scores.values)))
        event.record()
        return LaunchedStep(step, packed.sampled_parts, buffer, logprobs, event, scores, counts)


def _to_pinned_memory(values: Tensor) -> Tensor:
    if not values.numel():
        return torch.empty_like(values, device="cpu")
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
