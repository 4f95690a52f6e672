"""Blocks cut by key/value heads, against the indices of a tensor; sums of weights, against those of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint.models.stored_model import StoredModel
from meshwright.models.decoder import Decoder
from meshwright.parallel.tensor_inference import divide_for_inference
from meshwright.serve.head_slices import HeadSlices
from meshwright.serve.weight_sums import weight_sums
from meshwright.spec.layout import WHOLE, AxisPart
from meshwright.spec.model import ModelSpec
from tests.models.tiny import DEEPSEEK_V2, LLAMA, SHARED
from tests.serve.helpers import tiny


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 2), (2, 2), (2, 4), (1, 2), (4, 1)])
def test_a_rank_has_its_heads_and_all_parts_make_the_block(kv_heads: int, ranks: int) -> None:
    spec = replace(LLAMA, kv_heads=kv_heads)
    heads = HeadSlices(spec, ranks, tokens_per_block=4, itemsize=2)
    values = torch.arange(3 * 2 * 2 * kv_heads * 4 * 16, dtype=torch.int16).view(3, 2, 2, kv_heads, 4, 16)
    blocks = values.view(torch.uint8).reshape(3, -1)
    assert blocks.shape[1] == heads.block_bytes
    parts = [heads.cut(blocks, rank) for rank in range(ranks)]
    for rank, part in enumerate(parts):
        first = rank * kv_heads // ranks
        expected = values[:, :, :, first : first + max(1, kv_heads // ranks)].contiguous()
        assert torch.equal(part, expected.view(torch.uint8).reshape(3, -1))
    assert torch.equal(heads.join(parts), blocks)


def test_ranks_have_whole_latents() -> None:
    heads = HeadSlices(DEEPSEEK_V2, 2, tokens_per_block=4, itemsize=4)
    blocks = torch.randint(256, (2, 2 * 4 * 26 * 4), dtype=torch.uint8)
    parts = [heads.cut(blocks, rank) for rank in range(2)]
    assert torch.equal(parts[1], blocks) and torch.equal(heads.join(parts), blocks)


@pytest.mark.parametrize(
    "spec", [replace(LLAMA, kv_heads=1), SHARED, DEEPSEEK_V2], ids=["one key head", "shared", "v2"]
)
def test_sums_of_weights_do_not_depend_on_the_ranks(spec: ModelSpec) -> None:
    whole = tiny(spec)
    weights = dict(whole.named_parameters())
    stored = StoredModel(spec, lambda parameter, start, stop: weights[parameter.name][start:stop], lambda: None)
    total = 0
    for rank in range(2):
        with torch.device("meta"):
            model = Decoder(spec)
        divide_for_inference(model, AxisPart(rank, 2), cast(dist.ProcessGroup, None))
        model = model.to(torch.float32).to_empty(device="cpu")
        stored.copy_to(model, AxisPart(rank, 2))
        total = total + weight_sums(model, spec, AxisPart(rank, 2))
    sums = weight_sums(whole, spec, WHOLE)
    assert torch.equal(total, sums) and len(sums) == len(weights)
    weights["layers.1.attention_norm.weight"].data[3] += 1
    assert not torch.equal(weight_sums(whole, spec, WHOLE), sums)
