"""Wrong descriptions of models: keys of a run file, dimensions, config.json of a folder, and axes that cannot divide a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.config.load import load_run
from meshwright.families.folder import from_hf_config, to_hf_config
from meshwright.spec.dimension_checks import check_dimensions
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.model import ModelSpec
from tests.models.tiny import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT2,
    LLAMA,
    MIXTRAL,
    PARALLEL,
    QWEN3,
    QWEN3_MOE,
    SCALED,
    SLIDING,
)

PRESETS = ("llama3-8b", "gpt3-13b", "qwen3-30b-a3b", "deepseek-v3")
KEYS = (
    "model.layers=0",
    "model.layers=1001",
    "model.hidden=-1",
    "model.heads=0",
    "model.kv_heads=3",
    "model.kv_heads=0",
    "model.head_dim=0",
    "model.ffn_hidden=0",
    "model.vocab_size=-1",
    "model.max_seq_len=0",
    "model.positions=alibi",
    "model.rope_theta=0",
    "model.norm=rms",
    "model.norm_eps=0",
    "model.mlp=relu",
    "model.bias=yes-please",
    "model.sliding_window=0",
    "model.experts=-1",
    "model.experts_per_token=999",
    "model.expert_groups=7",
    "model.groups_per_token=99",
    "model.router=topk",
    "model.routing_scale=0",
    "model.kv_rank=-4",
    "model.q_rank=8",
    "model.rope_head_dim=7",
    "model.value_head_dim=500",
    "model.prediction_depth=17",
    "model.init_std=0",
    "model.family=llama9",
    "model.hiden=4096",
    "model.rope_scaling.factor=0.5",
    "model.yarn.factor=0.5",
    "model.first_dense_layers=-1",
    "model.head_dim=127",
)
AXES = (
    "plan.tensor=3",
    "plan.tensor=16",
    "plan.context_ulysses=3",
    "plan.context_ulysses=16",
    "plan.context_ring=3",
    "plan.pipeline=7",
    "plan.expert=3",
    "plan.expert=16",
    "train.seq_len=4097 plan.context_ring=2",
    "train.seq_len=999999",
)
CLUSTER = "cluster.gpu=H100 cluster.nodes=3 cluster.gpus_per_node=16 train.seq_len=2048 train.global_batch=48"
DIMENSIONS: tuple[tuple[ModelSpec, dict[str, Any]], ...] = (
    (LLAMA, {"vocab_size": 0}),
    (LLAMA, {"kv_heads": 3}),
    (LLAMA, {"head_dim": 15}),
    (LLAMA, {"layers": 0}),
    (LLAMA, {"q_rank": 4}),
    (LLAMA, {"rope_head_dim": 4, "value_head_dim": 4}),
    (LLAMA, {"hidden": 10**8, "ffn_hidden": 10**8}),
    (SCALED, {"rope_scaling": replace(SCALED.rope_scaling, high_freq_factor=0.5)}),
    (MIXTRAL, {"experts_per_token": 9}),
    (MIXTRAL, {"experts_per_token": 0}),
    (MIXTRAL, {"expert_hidden": 0}),
    (MIXTRAL, {"expert_groups": 2}),
    (MIXTRAL, {"experts": 10**6}),
    (DEEPSEEK_V2, {"rope_head_dim": 16}),
    (DEEPSEEK_V2, {"rope_head_dim": 3}),
    (DEEPSEEK_V2, {"value_head_dim": 0}),
    (DEEPSEEK_V2, {"value_head_dim": 17}),
    (DEEPSEEK_V2, {"kv_heads": 2}),
    (DEEPSEEK_V2, {"qk_norm": True, "bias": True, "parallel_block": True}),
    (DEEPSEEK_V2, {"positions": "learned"}),
    (DEEPSEEK_V2, {"groups_per_token": 5}),
    (DEEPSEEK_V2, {"groups_per_token": 1}),
    (DEEPSEEK_V3, {"expert_groups": 8}),
    (DEEPSEEK_V3, {"norm_eps": 0.0}),
)
FOLDERS: tuple[tuple[ModelSpec, dict[str, Any]], ...] = (
    (LLAMA, {"model_type": "llama4"}),
    (LLAMA, {"model_type": "gemma3_text"}),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}),
    (LLAMA, {"hidden_act": "gelu"}),
    (LLAMA, {"mlp_bias": True}),
    (LLAMA, {"num_hidden_layers": 0}),
    (LLAMA, {"num_hidden_layers": None}),
    (LLAMA, {"hidden_size": "64"}),
    (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4}}),
    (LLAMA, {"rope_parameters": {"full_attention": {}}}),
    (LLAMA, {"partial_rotary_factor": 0.5}),
    (LLAMA, {"rope_theta": 9.0}),
    (LLAMA, {"num_key_value_heads": 3}),
    (LLAMA, {"quantization_config": {"bits": 4}}),
    (QWEN3, {"attention_bias": True}),
    (QWEN3, {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}),
    (QWEN3, {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
    (GPT2, {"activation_function": "relu"}),
    (GPT2, {"n_head": 5}),
    (MIXTRAL, {"router_jitter_noise": 0.1}),
    (MIXTRAL, {"num_experts_per_tok": 9}),
    (QWEN3_MOE, {"decoder_sparse_step": 2}),
    (QWEN3_MOE, {"mlp_only_layers": [1]}),
    (DEEPSEEK_V2, {"norm_topk_prob": True}),
    (DEEPSEEK_V2, {"topk_group": 9}),
    (DEEPSEEK_V3, {"rope_interleave": False}),
    (DEEPSEEK_V3, {"v_head_dim": 40}),
)
EXPORTS: tuple[tuple[ModelSpec, dict[str, Any]], ...] = (
    (PARALLEL, {}),
    (SLIDING, {}),
    (LLAMA, {"qk_norm": True}),
    (LLAMA, {"norm": "layernorm"}),
    (LLAMA, {"mlp": "gelu"}),
    (LLAMA, {"hidden": 66}),
    (LLAMA, {"experts": 4, "experts_per_token": 1, "expert_hidden": 8}),
    (QWEN3, {"bias": True}),
    (GPT2, {"kv_heads": 2}),
    (MIXTRAL, {"first_dense_layers": 1}),
    (MIXTRAL, {"normalised_routing": False}),
    (QWEN3_MOE, {"shared_expert_hidden": 8}),
    (DEEPSEEK_V2, {"router": "sigmoid"}),
    (DEEPSEEK_V2, {"shared_expert_hidden": 0}),
)


def _load(overrides: str) -> None:
    load_run(None, overrides.split())


def _change(check: Callable[[ModelSpec], Any], spec: ModelSpec, changes: dict[str, Any]) -> None:
    check(replace(spec, **changes))


def _read(spec: ModelSpec, changes: dict[str, Any]) -> None:
    from_hf_config({**to_hf_config(spec), **changes}, "some/config.json")


def _cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for preset in PRESETS:
        for key in (*KEYS, *AXES) if preset in ("llama3-8b", "deepseek-v3") else AXES:
            cases[f"{preset} {key}"] = partial(_load, f"model={preset} {CLUSTER} {key}")
    for name, check, given in (
        ("dimensions", check_dimensions, DIMENSIONS),
        ("export", to_hf_config, EXPORTS),
    ):
        for spec, changes in given:
            cases[f"{name} {spec.family} {changes}"] = partial(_change, check, spec, changes)
    for spec, changes in FOLDERS:
        cases[f"folder {spec.family} {changes}"] = partial(_read, spec, changes)
    return cases


WRONG = _cases()


def message_of(name: str) -> str:
    """The message of a wrong input; empty where it is accepted."""
    try:
        WRONG[name]()
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""
