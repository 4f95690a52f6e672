"""GPU: the sampler draws the tokens that it draws on a CPU, and its draws wait for nothing."""

from __future__ import annotations

import pytest
import torch

from meshwright.kernels.likeliest import keep_likeliest
from meshwright.kernels.token_draw import draw_from_scores
from meshwright.serve.sampling import GREEDY, Sampler, SamplingOptions

pytestmark = pytest.mark.gpu

VOCAB, TEXT = 128_256, (5, 9, 5, 77, 5)
OPTIONS = [
    GREEDY,
    SamplingOptions(seed=5),
    SamplingOptions(temperature=0.6, seed=2**62),
    SamplingOptions(top_k=50, top_p=0.9, seed=6),
    SamplingOptions(min_p=0.02, temperature=1.5, seed=7),
    SamplingOptions(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 5.0, 9: -100.0}, seed=8),
    SamplingOptions(allowed_token_ids=[*range(0, 2000, 2)], bad_words=((4,), (77, 5, 8)), min_tokens=9, seed=9),
    SamplingOptions(bad_words=[[token] for token in range(100)], min_tokens=9, temperature=0.0),
]


@pytest.mark.parametrize("options", [OPTIONS[:1], OPTIONS[:3], OPTIONS], ids=["greedy", "drawn", "all"])
def test_tokens_are_those_of_a_cpu(options: list[SamplingOptions]) -> None:
    torch.manual_seed(0)
    logits, table_rows = 3 * torch.randn(len(options), VOCAB), torch.arange(len(options))
    samplers = [Sampler(len(options), torch.device(device), VOCAB) for device in ("cpu", "cuda")]
    for sampler in samplers:
        for index, each in enumerate(options):
            sampler.assign(index, each, TEXT, 3, stop_ids=range(200, 300))
    equal = 0
    for position in range(20):
        positions = torch.full((len(options),), position)
        on_cpu = samplers[0].sample(logits, table_rows, positions)
        inputs = [x.cuda() for x in (logits, table_rows, positions)]
        torch.cuda.set_sync_debug_mode("error" if position else "default")
        try:
            here = samplers[1].sample(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        equal += int((here.cpu() == on_cpu).sum())
        logits = logits.roll(17, 1)
    assert equal == 20 * len(options)


def test_the_kernel_draws_the_tokens_of_the_plain_operations() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        scores = (3 * torch.randn(64, VOCAB, device="cuda")).to(dtype)
        arguments = (
            torch.full((64,), 0.8, device="cuda"),
            torch.arange(64, device="cuda"),
            torch.arange(64, device="cuda"),
        )
        reference = draw_from_scores(scores, *arguments, reference=True)
        # Scores that differ by less than the rounding of the logarithms may change places.
        assert (draw_from_scores(scores, *arguments) == reference).sum() >= 63


def test_the_kernel_keeps_the_likeliest_of_the_plain_operations() -> None:
    torch.manual_seed(0)
    scores = 3 * torch.randn(64, VOCAB, device="cuda")
    top_k = torch.tensor([0, 1, 50, 200_000], device="cuda").repeat(16)
    top_p = torch.tensor([0.0, 0.3, 0.9, 1.0], device="cuda").repeat_interleave(16)
    min_p = torch.tensor([0.0, 0.0, 0.01, 0.0], device="cuda").repeat(16)
    kept = keep_likeliest(scores, top_k, top_p, min_p).isfinite()
    expected = keep_likeliest(scores, top_k, top_p, min_p, reference=True).isfinite()
    # Sums of probabilities in another order move the threshold of top-p past few tokens.
    assert (kept != expected).sum(1).max() <= 3
    assert torch.equal(kept[48:], expected[48:])
