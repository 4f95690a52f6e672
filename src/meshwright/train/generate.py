"""Sampling text from a model, by running it on all tokens so far for each new one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.models.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder, prompt: Sequence[int], *, tokens: int, temperature: float, top_k: int, seed: int, stop: int | None
) -> list[int]:
    """Up to `tokens` new token ids after `prompt`, ending early at `stop`.

    temperature 0 takes the likeliest token; otherwise one of the `top_k` likeliest (0: any) is drawn. The draw is a function of `seed`.
    """
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(seed)
    sequence, limit = list(prompt), model.spec.max_seq_len
    for _ in range(tokens):
        window = torch.tensor([sequence[-limit:]], device=device)
        chosen = _draw(model(window)[0, -1].float().cpu(), temperature, top_k, draws)
        if chosen == stop:
            break
        sequence.append(chosen)
    return sequence[len(prompt) :]


def _draw(logits: torch.Tensor, temperature: float, top_k: int, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        floor = logits.topk(min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draws))
