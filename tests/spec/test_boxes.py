"""Boxes (index ranges) of parameters on tensor ranks and shards: they cover every element, one copy being primary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.load import load_run
from meshwright.spec.errors import BadConfig
from meshwright.spec.layout import AxisPart, Division, check_tensor, local_boxes, local_shape, tensor_split_error
from meshwright.spec.model import ModelSpec, parameters


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    """A model of one layer and a number of tensor ranks that can divide it."""
    ranks = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if ranks % n == 0 or n % ranks == 0]))
    heads = max(ranks, kv_heads) * draw(st.integers(1, 2))
    mlp, qk_norm = draw(st.sampled_from(["swiglu", "gelu"])), draw(st.booleans())
    spec = ModelSpec(
        family="llama",
        layers=1,
        hidden=draw(st.integers(1, 9)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2,
        bias=draw(st.booleans()),
        ffn_hidden=ranks * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(ranks, 17)),
        max_seq_len=4,
        mlp=mlp,
        qk_norm=qk_norm,
        qk_norm_whole=qk_norm and draw(st.booleans()),
        positions=draw(st.sampled_from(["rope", "learned"])),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
    )
    return spec, ranks


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 5))
def test_ranks_hold_every_element_and_count_it_once(model: tuple[ModelSpec, int], shards: int) -> None:
    spec, ranks = model
    assert check_tensor(spec, ranks) is None
    for parameter in parameters(spec):
        held, counted = np.zeros(parameter.shape, int), np.zeros(parameter.shape, int)
        holders = np.zeros(parameter.shape, int)
        for tensor in range(ranks):
            own = 0
            for shard in range(shards):
                next_row = 0
                for box in local_boxes(parameter, Division(AxisPart(tensor, ranks)), AxisPart(shard, shards)):
                    index = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                    assert box.first_row == next_row and held[index].size == np.prod(box.sizes) > 0
                    next_row += box.sizes[0]
                    held[index] += 1
                    counted[index] += box.primary
                    holders[index] = box.copies
                own += next_row
            assert own == local_shape(parameter, Division(AxisPart(tensor, ranks)))[0]
        assert (counted == 1).all() and (held == holders).all()


@pytest.mark.parametrize(("expert", "shards"), [(1, 1), (2, 1), (4, 3), (2, 4), (1, 5), (4, 4)])
def test_expert_ranks_and_their_shards_hold_every_expert_once(expert: int, shards: int) -> None:
    """Shards hold whole experts if their number divides the experts, else rows of each expert."""
    spec = ModelSpec(
        family="mixtral",
        layers=1,
        hidden=8,
        heads=2,
        kv_heads=2,
        head_dim=2,
        ffn_hidden=8,
        vocab_size=9,
        max_seq_len=4,
        experts=8,
        experts_per_token=2,
        expert_hidden=6,
    )
    for parameter in (parameter for parameter in parameters(spec) if parameter.expert):
        holders, sizes = np.zeros(parameter.shape, int), []
        for expert_rank, shard in np.ndindex(expert, shards):
            division = Division(expert=AxisPart(expert_rank, expert))
            boxes = local_boxes(parameter, division, AxisPart(shard, shards))
            for box in boxes:
                holders[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] += 1
            sizes.append(sum(int(np.prod(box.sizes)) for box in boxes))
            assert local_shape(parameter, division) == (8 // expert, *parameter.shape[1:])
        assert (holders == 1).all()
        if (8 // expert) % shards == 0 or parameter.shape[1] % shards == 0:
            assert len(set(sizes)) == 1


def test_fused_weights_are_cut_block_by_block() -> None:
    """By hand: two ranks, four heads and two key/value heads of two, a feed-forward width of six."""
    spec = ModelSpec(
        family="llama", layers=1, hidden=4, heads=4, kv_heads=2, head_dim=2, ffn_hidden=6, vocab_size=9, max_seq_len=4
    )
    parameter_by_name = {parameter.name.rsplit(".", 2)[-2]: parameter for parameter in parameters(spec)}

    def parts(name: str, dim: int) -> list[list[int]]:
        boxes = [local_boxes(parameter_by_name[name], Division(AxisPart(rank, 2))) for rank in range(2)]
        return [
            [at for b in rank_boxes for at in range(b.offsets[dim], b.offsets[dim] + b.sizes[dim])]
            for rank_boxes in boxes
        ]

    assert parts("qkv", 0) == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    assert parts("gate_up", 0) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert parts("out", 1) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts("down", 1) == [[0, 1, 2], [3, 4, 5]]
    assert parts("embed", 0) == parts("head", 0) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert parts("norm", 0) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 12, 4, 16, 99, 64), "a divisor of model.heads = 12"),
        ((4, 12, 6, 16, 99, 64), "a divisor or a multiple of model.kv_heads = 6"),
        ((4, 12, 4, 18, 99, 64), "a divisor of model.ffn_hidden = 18"),
        ((4, 12, 4, 16, 3, 64), "at most model.vocab_size = 3"),
        ((4, 12, 4, 16, 99, 66), "a divisor of train.seq_len = 66"),
        ((4, 12, 2, 16, 99, 64), None),
        ((4, 12, 2, 16, 0, None), None),
    ],
)
def test_the_error_names_the_size_that_does_not_divide(
    sizes: tuple[int, int, int, int, int, int | None], message: str | None
) -> None:
    ranks, heads, kv_heads, width, *others = sizes
    error = tensor_split_error(ranks, heads, kv_heads, {"ffn_hidden": width}, *others)
    assert error == message if message is None else error is not None and error.startswith(message)


def test_a_pin_that_does_not_divide_the_model_is_an_error_at_its_key() -> None:
    base = [
        "model=llama3-8b",
        "train.seq_len=8192",
        "train.global_batch=16",
        "cluster.gpu=H100",
        "cluster.gpus_per_node=6",
    ]
    with pytest.raises(BadConfig, match=r"plan.tensor: expected a divisor of model.heads = 32.*got 3.*nearest: 2"):
        load_run(None, [*base, "plan.tensor=3"])
    load_run(None, [*base, "plan.tensor=2"])
