"""Times the forward and the backward of causal attention with the kernel that training uses (kernels.attention)."""

from __future__ import annotations

from functools import partial

import torch

from meshwright.kernels.attention import attention, make_mask
from meshwright.profile.call_timing import Call, TeamClock
from meshwright.profile.team import Team
from meshwright.spec.profile import AttentionTime

Case = tuple[int, int, int, int, int, int | None]
"""(tokens of a sequence, heads, key/value heads, size of a head, tokens of all sequences, window in tokens or None)."""
GPU_CASES: tuple[Case, ...] = (
    (2048, 32, 8, 128, 16384, None),
    (4096, 32, 8, 128, 16384, None),
    (8192, 32, 8, 128, 16384, None),
    (8192, 32, 8, 64, 16384, None),
    (2048, 40, 40, 128, 8192, None),
    (32768, 32, 8, 128, 32768, None),
    (4096, 8, 4, 256, 16384, None),
    (4096, 32, 8, 128, 16384, 1024),
    (4096, 64, 8, 64, 16384, 128),
    (4096, 8, 4, 256, 16384, 1024),
)
"""Cases that are measured on a GPU."""
CPU_CASES: tuple[Case, ...] = (
    (128, 4, 4, 32, 512, None),
    (256, 4, 4, 32, 512, None),
    (256, 8, 4, 64, 512, None),
    (512, 8, 8, 64, 512, None),
    (512, 8, 8, 64, 512, 128),
)
"""Cases that are measured on a CPU."""


def attention_times(team: Team, clock: TeamClock, budget: float) -> list[AttentionTime]:
    """Return the times of all cases for this device, in the dtype that training uses on it, within about `budget`
    seconds.
    """
    cases = GPU_CASES if team.cuda else CPU_CASES
    return [_time_case(team, clock, case, budget / len(cases)) for case in cases]


def _time_case(team: Team, clock: TeamClock, case: Case, budget: float) -> AttentionTime:
    forward, backward = calls_of(team, case)
    return attention_time_of(team, case, clock.seconds(forward, budget / 3), clock.seconds(backward, budget * 2 / 3))


def calls_of(team: Team, case: Case) -> tuple[Call, Call]:
    """Return a call of the forward and a call of the backward of one case.

    Queries have shape (sequences, seq, heads, head_dim), keys and values (sequences, seq, kv_heads, head_dim).
    """
    seq, heads, kv_heads, head_dim, tokens, window = case
    dtype = torch.bfloat16 if team.cuda else torch.float32

    def random(count: int) -> torch.Tensor:
        tensor = torch.randn(tokens // seq, seq, count, head_dim, device=team.device, dtype=dtype)
        return tensor.requires_grad_()

    q = random(heads)
    k = random(kv_heads)
    v = random(kv_heads)
    mask = make_mask(None, window, seq, team.device, head_dim=head_dim, dtype=dtype)
    output = attention(q, k, v, mask)
    output_gradient = torch.randn_like(output)
    return partial(attention, q, k, v, mask), partial(
        torch.autograd.grad, output, (q, k, v), output_gradient, retain_graph=True
    )


def attention_time_of(team: Team, case: Case, forward_seconds: float, backward_seconds: float) -> AttentionTime:
    """Return the measurement of a case."""
    seq, heads, kv_heads, head_dim, tokens, window = case
    return AttentionTime(
        format="bf16" if team.cuda else "fp32",
        seq=seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tokens=tokens,
        window=window,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    )
