"""Keys of config.json for models with experts, and names of the experts' weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.families.format import ConfigKeys, HFConfig, Key
from meshwright.spec.errors import BadInput
from meshwright.spec.model import ModelSpec

REQUIRED = ("experts", "experts_per_token", "expert_hidden")
"""ModelSpec fields that a run with experts must give."""
MODULES = {
    "moe.router": ("mlp.gate",),
    "moe.experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    "moe.experts.down": ("mlp.experts.{expert}.down_proj",),
}
"""Names that most folders use for the weights of experts and of the router."""
STACKED_MODULES = {f"moe.experts.{ours}": (f"mlp.experts.{ours}_proj",) for ours in ("gate_up", "down")}
"""Names of experts in folders that stack the experts of a layer (gpt-oss, Qwen3-VL-MoE). These weights are transposed."""
SHARED_MODULES = {
    "moe.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "moe.shared.down": ("mlp.shared_experts.down_proj",),
}
"""Names that most folders use for shared experts."""


def without_dense(modules: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's modules without those of a dense feed-forward network."""
    return {ours: theirs for ours, theirs in modules.items() if not ours.startswith("mlp.")}


def keys(experts: Key, per_token: int | None, width: Key, **further: Key) -> ConfigKeys:
    """Return the keys of a class with experts.

    - `experts`: the key for the number of experts.
    - `per_token`: default number of experts of a token.
    - `width`: the key for the hidden size of one expert.
    - `further`: further keys, by ModelSpec field.
    """
    fields = {"experts": experts, "experts_per_token": Key("num_experts_per_tok", per_token), "expert_hidden": width}
    return ConfigKeys({**fields, **further})


def read(config: HFConfig, keys: ConfigKeys, balance: str = "router_aux_loss_coef") -> dict[str, Any]:
    """Return the ModelSpec fields of these keys. `balance` is the key for the weight of the balance loss, which is not used."""
    config.note_unused("Meshwright weighs the experts' balance loss by train.balance_loss", balance)
    return keys.read(config)


def write(spec: ModelSpec, keys: ConfigKeys, folder: str) -> dict[str, Any]:
    """Return the keys with their values. Raises BadInput for a model without experts, which a folder of this kind cannot hold.

    `folder` is the kind of folder in messages, such as "Mixtral".
    """
    if not spec.experts:
        raise BadInput(f"model.experts: a {folder} folder needs experts, got 0")
    return {**keys.write(spec), "output_router_logits": False}


def one_for_all_layers(config: HFConfig, layers: int, *names: str) -> HFConfig:
    """Replace lists by numbers: if a key has a list with the same number for each layer, the result has that number.

    Raises BadInput if the numbers differ.
    """
    values = dict(config.values)
    for name in names:
        listed = config.get(name)
        if isinstance(listed, list):
            if len(listed) < layers or len(set(listed)) != 1:
                raise config.error(name, listed, f"a number, or a list of {layers} equal ones")
            values[name] = listed[0]
    return replace(config, values=values)


def read_shared(
    config: HFConfig, width: int, count: int = 1, key: str = "n_shared_experts", least: int = 1
) -> dict[str, Any]:
    """Return `shared_expert_hidden`: a layer has one shared expert, as wide as all shared experts of the folder together.

    `width` is the hidden size of one expert, `count` the default number of the class.
    """
    return {"shared_expert_hidden": width * config.integer(key, default=count, least=least)}


def write_shared(spec: ModelSpec, folder: str, key: str = "n_shared_experts", least: int = 1) -> dict[str, Any]:
    """Return the number of shared experts. Raises BadInput if the width is not a multiple of an expert's, or if there are too few."""
    width = max(1, spec.expert_hidden)
    if spec.shared_expert_hidden < least or spec.shared_expert_hidden % width:
        raise BadInput(
            f"model.shared_expert_hidden: a {folder} folder needs a multiple of expert_hidden ({spec.expert_hidden}), "
            f"got {spec.shared_expert_hidden}"
        )
    return {key: spec.shared_expert_hidden // width}


def read_dense_layers(config: HFConfig, layers: int) -> int:
    """Return the number of first layers that have no experts. Raises BadInput if layers after them have none either."""
    step = config.integer("decoder_sparse_step", default=1)
    only = config.get("mlp_only_layers") or []
    dense = [layer for layer in range(layers) if layer in only or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        key = "decoder_sparse_step" if step > 1 else "mlp_only_layers"
        expected = f"{1 if step > 1 else 'the first layers'}: in this decoder dense layers come first"
        raise config.error(key, config.get(key), expected)
    return len(dense)


def write_dense_layers(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that `read_dense_layers` reads."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(range(spec.first_dense_layers))}


PREDICTIONS = {"prediction_depth": Key("num_nextn_predict_layers", 0, least=0)}
"""The key for the number of modules that predict further tokens."""
ROUTING = {
    "routing_scale": Key("routed_scaling_factor", 1.0),
    "normalised_routing": Key("norm_topk_prob", True),
    "expert_groups": Key("n_group", 1),
    "groups_per_token": Key("topk_group", 1),
}
"""Keys of DeepSeek-V3's routing, with the defaults of GLM-4.5."""


def routed(*, normalised: bool, dense: int) -> ConfigKeys:
    """Return the keys of DeepSeek-V3's experts in a model with ordinary attention.

    `normalised` and `dense` are defaults of the class: whether the weights of a token's experts are normalised, and the
    number of dense layers.
    """
    return keys(
        Key("n_routed_experts", 128, "num_local_experts"),
        8,
        Key("moe_intermediate_size", 1408),
        **{**ROUTING, "normalised_routing": Key("norm_topk_prob", normalised)},
        first_dense_layers=Key("first_k_dense_replace", dense, least=0),
    )


def read_routed(config: HFConfig, keys: ConfigKeys) -> dict[str, Any]:
    """Return the ModelSpec fields of the keys of `routed`."""
    fields = read(config, keys)
    return {**fields, **read_shared(config, fields["expert_hidden"])}


def write_routed(spec: ModelSpec, keys: ConfigKeys, folder: str) -> dict[str, Any]:
    """Return the keys of `routed` with their values. Raises BadInput if a folder of this kind cannot hold the model's experts."""
    return {**write(spec, keys, folder), **write_shared(spec, folder)}
