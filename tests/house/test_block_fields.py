"""Facts of a layer are asked of its description: other packages read the keys of bodies only in the places listed here.

A key of `model` that all layers share in the short form may differ by kind of layer, so code that reads it of the model is wrong for such
models, and a new mixer or feed-forward network must change each of these places.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import fields

from tests.house.parsed import parsed
from tests.house.test_architecture import SOURCE, files

from meshwright.spec.blocks.attention import AttentionSpec
from meshwright.spec.blocks.feed_forward import FeedForwardSpec
from meshwright.spec.blocks.latent_attention import LatentAttentionSpec
from meshwright.spec.blocks.moe import MoESpec, RouterSpec
from meshwright.spec.blocks.positions import RotarySpec
from meshwright.spec.model import ModelSpec

HOME = ("spec", "models", "families", "workload")
"""Packages that describe, compute and count layers."""
NOT_OF_LAYERS = {"family", "layers", "hidden", "vocab_size", "max_seq_len", "embedding_scale", "logit_factor", "tied"}
NOT_OF_LAYERS |= {
    "init_std",
    "logit_cap",
    "head",
    "prediction_depth",
    "blocks",
    "pattern",
    "first",
    "sequence",
    "positions",
    "norm",
    "adapter",
}
"""Keys of ModelSpec that are no body's; `positions`, `norm` and `head` are names of modules too."""
BODIES = (AttentionSpec, LatentAttentionSpec, FeedForwardSpec, MoESpec, RouterSpec, RotarySpec)
KEYS = {field.name for field in fields(ModelSpec)} - NOT_OF_LAYERS
OWN = {field.name for body in BODIES for field in fields(body)}

HEADS = "kinds of layers have the model's heads, and ranks divide these"
EXPERTS = "kinds of layers have the model's experts or none, and ranks divide these"
SHOWN = "a number for a reader"
SIZED = "makes a larger or smaller model of the same form"
PRICED = "a count that a rate of requests or of exchanges is for"
PLACES = {
    "checkpoint/models/hf.py": ("head_dim heads kv_heads", SHOWN),
    "cli/plan_largest.py": ("ffn_hidden heads", SHOWN),
    "config/recorded_loads.py": ("experts", EXPERTS),
    "costs/serve_costs.py": ("experts experts_per_token kv_heads kv_rank parallel_block", PRICED),
    "costs/serve_work.py": ("experts experts_per_token", PRICED),
    "parallel/context.py": ("heads kv_heads", HEADS),
    "parallel/expert_inference.py": ("experts", EXPERTS),
    "parallel/experts.py": ("experts", EXPERTS),
    "parallel/routing.py": ("experts", EXPERTS),
    "parallel/tensor.py": ("kv_heads", HEADS),
    "parallel/tensor_inference.py": ("heads kv_heads", HEADS),
    "planner/conflicts.py": ("experts", EXPERTS),
    "planner/deployment_space.py": ("experts", EXPERTS),
    "planner/devices.py": ("heads", HEADS),
    "planner/expert_moves.py": ("expert_groups experts groups_per_token", EXPERTS),
    "planner/expert_reasons.py": ("experts", EXPERTS),
    "planner/finalists.py": ("experts", EXPERTS),
    "planner/largest.py": ("experts ffn_hidden heads kv_heads kv_rank", SIZED),
    "planner/reasons.py": ("experts heads", SHOWN),
    "planner/sample_choice.py": ("kv_heads", HEADS),
    "planner/sample_plan.py": ("kv_heads", HEADS),
    "planner/sample_plans.py": ("experts", EXPERTS),
    "planner/slot_offloads.py": ("experts", EXPERTS),
    "planner/software_plan.py": ("experts", EXPERTS),
    "planner/space.py": ("experts heads kv_heads", HEADS),
    "serve/cached_attention.py": ("rotary score_cap", "the rotary tables and the cap of a group of layers"),
    "serve/formats.py": ("heads", HEADS),
    "serve/head_slices.py": ("kv_heads", HEADS),
    "serve/kv_cache.py": ("kv_heads", HEADS),
    "simulator/copied_experts.py": ("experts experts_per_token", EXPERTS),
    "simulator/expert_placement_costs.py": ("expert_hidden head_dim heads kv_heads", PRICED),
    "training/evaluate.py": ("kv_heads", HEADS),
    "training/expert_decisions.py": ("experts", EXPERTS),
    "training/session.py": ("kv_heads", HEADS),
}
"""By file the fields that it reads, and why that is right. A change may shorten this list."""


def read() -> dict[str, set[str]]:
    """Fields of bodies that each file outside of `HOME` reads of a model's or a block's description."""
    found = defaultdict(set)
    for path in files():
        name = path.relative_to(SOURCE)
        for node in ast.walk(parsed(path)) if name.parts[0] not in HOME else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value).rpartition(".")[2].lstrip("_")
                of_model = owner in ("spec", "model") and node.attr in KEYS
                of_body = owner in ("mixer", "rotary") and node.attr in OWN
                if of_model or of_body:
                    found[str(name)].add(node.attr)
    return found


def test_facts_of_a_layer_are_read_in_the_listed_places_only() -> None:
    found, listed = read(), {name: set(keys.split()) for name, (keys, _) in PLACES.items()}
    new = {name: keys - listed.get(name, set()) for name, keys in found.items() if keys - listed.get(name, set())}
    assert not new, f"ask the block's description or a property of ModelSpec instead: {new}"
    gone = {name: keys - found.get(name, set()) for name, keys in listed.items() if keys - found.get(name, set())}
    assert not gone, f"no longer read, so remove them from the list: {gone}"
