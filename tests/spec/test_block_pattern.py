"""The order of a model's kinds of blocks: terms, mistakes, and the blocks that follow from it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import cycle, islice

import pytest
from tests.models.tiny import LLAMA, QWEN3_MOE

from meshwright.spec.block_pattern import expanded, pattern_mistakes, shortest_pattern
from meshwright.spec.blocks.positions import RopeScaling, YarnScaling
from meshwright.spec.dimension_checks import check_dimensions
from meshwright.spec.errors import BadInput
from meshwright.spec.model import KindSpec, flops_per_token, kind_names, layer_order, sequence

LOCAL, GLOBAL = KindSpec(sliding_window=9), KindSpec(sliding_window=0, rope_theta=1e6)
MIXED = replace(LLAMA, blocks={"local": LOCAL, "global": GLOBAL})


def test_a_pattern_repeats_behind_the_first_layers_and_is_cut_at_the_last() -> None:
    assert expanded(("2*local", "global", "3 * local")) == (*2 * ("local",), "global", *3 * ("local",))
    spec = replace(MIXED, layers=8, first=("global",), pattern=("2*local", "global"))
    assert "".join(name[0] for name in kind_names(spec)) == "gllgllgl"
    assert layer_order(spec) == "layers: global, then 2*local, global, repeated"
    listed = replace(MIXED, layers=3, sequence=("2*local", "global"))
    assert kind_names(listed) == ("local", "local", "global") and layer_order(listed) == "layers: 2*local, global"
    assert layer_order(LLAMA) == ""


@pytest.mark.parametrize("names", ["a", "aaaa", "aabaab", "aabaa", "abcab", "abac"])
def test_the_shortest_pattern_gives_the_names_again(names: str) -> None:
    pattern = shortest_pattern(names)
    assert "".join(islice(cycle(expanded(pattern)), len(names))) == names
    assert shortest_pattern("llllgllllgll") == ("4*l", "g")


def test_equal_blocks_are_one_kind_whatever_their_names() -> None:
    spec = replace(MIXED, layers=6, blocks={"a": KindSpec(), "b": KindSpec(), "c": LOCAL}, pattern=("a", "b", "c"))
    assert spec.layer_kinds == (0, 0, 1, 0, 0, 1) and spec.block_kinds[0] == replace(LLAMA, layers=6).block(0)
    assert [(run.first, run.count) for run in sequence(spec)] == [(0, 2), (2, 1), (3, 2), (5, 1)]


def test_a_kind_without_experts_is_dense_as_are_the_first_dense_layers() -> None:
    spec = replace(QWEN3_MOE, layers=4, blocks={"dense": KindSpec(routed=False), "rest": KindSpec()})
    spec = replace(spec, first_dense_layers=1, first=("rest", "dense"), pattern=("rest",))
    assert [spec.routed(layer) for layer in range(5)] == [False, False, True, True, True] and spec.routed_layers == 2
    assert len(spec.block_kinds) == 2, "the first two are alike"


def test_flops_of_unlike_layers_are_the_sum_of_their_own() -> None:
    spec = replace(MIXED, layers=4, pattern=("local", "global"))

    def of(kind: KindSpec) -> float:
        return flops_per_token(replace(LLAMA, layers=2, sliding_window=kind.sliding_window or None), 64, causal=True)

    head = 6.0 * LLAMA.hidden * LLAMA.vocab_size
    assert flops_per_token(spec, 64, causal=True) == pytest.approx(of(LOCAL) + of(GLOBAL) - head)


@pytest.mark.parametrize(
    ("kinds", "orders", "key", "expected", "near"),
    [
        (("local", "global"), {"pattern": ("locl", "local", "global")}, "pattern", "kinds of model.blocks", "local"),
        (("local", "global"), {"pattern": ("local",)}, "blocks.global", "its name in model.pattern", None),
        (("a",), {"first": ("5*a",)}, "first", "at most model.layers = 4", None),
        (("a",), {"first": ("2*a",)}, "first", "model.pattern for the others", None),
        (("a",), {"sequence": ("3*a",)}, "sequence", "model.layers = 4", None),
        (("a",), {"sequence": ("4*a",), "pattern": ("a",)}, "sequence", "no model.pattern", None),
        ((), {"pattern": ("a",)}, "pattern", "there are none", None),
    ],
)
def test_a_wrong_order_names_its_key_and_what_was_expected(
    kinds: tuple[str, ...], orders: dict[str, tuple[str, ...]], key: str, expected: str, near: str | None
) -> None:
    given = {"pattern": (), "first": (), "sequence": (), **orders}
    (mistake,) = pattern_mistakes(4, kinds, **given)
    assert mistake.key == key and expected in mistake.expected and mistake.near == near


def test_a_spec_of_another_process_has_an_equal_hash() -> None:
    spec = replace(MIXED, layers=4, pattern=("local", "global"))
    hash(spec), spec.block_kinds
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec and not {"_hash", "block_kinds"} & set(vars(copied)) and hash(copied) == hash(spec)


def test_experts_follow_dense_layers() -> None:
    spec = replace(QWEN3_MOE, layers=4, first_dense_layers=0, blocks={"d": KindSpec(routed=False), "e": KindSpec()})
    with pytest.raises(BadInput, match=r"dense layers before those with experts"):
        check_dimensions(replace(spec, pattern=("e", "d")))


def test_the_scaling_of_a_kind_replaces_that_of_the_model_of_either_form() -> None:
    scaled, yarn = RopeScaling(kind="linear", factor=4.0), YarnScaling()
    for model, kind, expected in (
        ({"yarn": yarn}, {"rope_scaling": scaled}, scaled),
        ({"rope_scaling": scaled}, {"yarn": yarn}, yarn),
        ({"yarn": yarn}, {}, yarn),
    ):
        spec = replace(LLAMA, **model, blocks={"a": KindSpec(**kind)}, pattern=("a",))
        rotary = spec.block(0).mixer.rotary
        assert rotary is not None and rotary.scaling == expected
