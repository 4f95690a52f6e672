"""Conversion from and to config.json, its errors, and that none of it needs torch."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright.config.presets import MODEL_PRESETS
from meshwright.families.folder import (
    export_obstacle,
    folder_spec,
    from_hf_config,
    hf_tensors,
    to_hf_config,
)
from meshwright.families.missing import LACKS, lacks
from meshwright.families.registry import FAMILIES
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, parameters
from tests.models.tiny import (
    DEEPSEEK_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DENSE,
    GPT2,
    LLAMA,
    MIXTRAL,
    PARALLEL,
    QWEN3,
    QWEN3_MOE,
    SCALED,
    SLIDING,
)

DEEPSEEK = (DEEPSEEK_V2, DEEPSEEK_LITE, DEEPSEEK_V3)


def read(config):
    fields, _ = from_hf_config(config)
    return from_plain(ModelSpec, fields)


@pytest.mark.parametrize("name", list(MODEL_PRESETS))
def test_every_preset_survives_the_round_trip(name):
    spec = from_plain(ModelSpec, {**MODEL_PRESETS[name], "vocab_size": MODEL_PRESETS[name]["vocab_size"] or 4096})
    assert read(json.loads(json.dumps(to_hf_config(spec)))) == spec


def test_config_has_the_keys_of_transformers_4_and_5():
    config = to_hf_config(SCALED, dtype="bf16", special_ids={"eos_token_id": 7})
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == SCALED.rope_theta
    assert config["rope_scaling"]["rope_type"] == config["rope_parameters"]["rope_type"] == "llama3"
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["eos_token_id"] == 7


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("spec", [LLAMA, SCALED, QWEN3])
def test_either_form_of_rope_alone_is_enough(spec):
    config = to_hf_config(spec)
    assert read(without(config, "rope_parameters", "dtype")) == spec
    assert read(without(config, "rope_theta", "rope_scaling", "torch_dtype")) == spec


def test_the_oldest_rope_scaling_format_is_read_with_the_default_base():
    config = without(to_hf_config(LLAMA), "rope_parameters", "rope_theta")
    assert read(config).rope_theta == 10000.0
    assert read({**config, "rope_scaling": {"type": "default"}}).rope_scaling is None


def test_the_original_gpt2_config_is_read():
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
    }
    fields, notes = from_hf_config(config, "gpt2/config.json")
    assert from_plain(ModelSpec, fields) == from_plain(ModelSpec, MODEL_PRESETS["gpt2-124m"])
    assert len(notes) == 3
    assert "gpt2/config.json: attn_pdrop 0.1 is not used" in notes[0]


@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        (LLAMA, {"model_type": "llama4"}, ["model_type", "'llama4'", "attention in chunks, and experts"]),
        (LLAMA, {"model_type": "deepseek_v32"}, ["sparse attention, in which an indexer"]),
        (LLAMA, {"model_type": "llamma"}, ["model_type", "'llamma'", "nearest: llama"]),
        (LLAMA, {"model_type": None}, ["model_type", "None"]),
        (LLAMA, {"architectures": ["LlamaForTokenClassification"]}, ["architectures", "LlamaForToken"]),
        (LLAMA, {"mlp_bias": True}, ["mlp_bias", "True", "attention_bias"]),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        (LLAMA, {"num_hidden_layers": 0}, ["num_hidden_layers", "positive integer", "0"]),
        (LLAMA, {"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
        (LLAMA, {"hidden_size": "64"}, ["hidden_size", "'64'"]),
        (LLAMA, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, ["rope_parameters: factor", "missing"]),
        (
            SCALED,
            {"rope_scaling": {"rope_type": "llama3", "factor": 9.0}},
            ["rope_scaling: factor", "got 9.0"],
        ),
        (LLAMA, {"rope_theta": 9.0}, ["rope_theta", "got 9.0", "10000.0, as rope_parameters: rope_theta says"]),
        (DEEPSEEK_V3, {"rope_theta": 9.0}, ["rope_theta", "got 9.0", "as rope_parameters: rope_theta says"]),
        (DEEPSEEK_V2, {"rope_scaling": {"type": "default"}}, ["rope_scaling: rope_type", "'default'", "'yarn'"]),
        (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, ["rope_scaling: type", "'dynamic'"]),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, ["rope_parameters: factor", "missing"]),
        (LLAMA, {"rope_parameters": {"full_attention": {}}}, ["rope_parameters", "one mapping for all layers"]),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (LLAMA, {"num_key_value_heads": 3}, ["kv_heads", "divisor of heads (4)"]),
        (LLAMA, {"quantization_config": {"bits": 4}}, ["quantization_config", "unquantized"]),
        (QWEN3, {"attention_bias": True}, ["attention_bias", "True"]),
        (
            QWEN3,
            {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None},
            ["max_window_layers", "all layers"],
        ),
        (
            QWEN3,
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "sliding_attention"],
        ),
        (GPT2, {"activation_function": "relu"}, ["activation_function", "'relu'", "'gelu_new'"]),
        (GPT2, {"scale_attn_weights": False}, ["scale_attn_weights", "False"]),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        (GPT2, {"add_cross_attention": True}, ["add_cross_attention"]),
        (GPT2, {"n_head": 5}, ["n_head", "5", "divisor of n_embd (64)"]),
        (MIXTRAL, {"router_jitter_noise": 0.1}, ["router_jitter_noise", "0.1"]),
        (MIXTRAL, {"num_experts_per_tok": 9}, ["experts_per_token", "9", "1 to experts (5)", "nearest: 5"]),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, ["mlp_only_layers", "[1]", "dense layers come first"]),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, ["norm_topk_prob", "True"]),
        (DEEPSEEK_V2, {"topk_group": 9}, ["groups_per_token", "9", "expert_groups (4)"]),
        (DEEPSEEK_V3, {"rope_interleave": False}, ["rope_interleave", "False"]),
        (DEEPSEEK_V3, {"n_group": 8}, ["expert_groups", "8", "at least 2"]),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 5}, ["rope_head_dim", "5", "even"]),
        (DEEPSEEK_V3, {"v_head_dim": 40}, ["value_head_dim", "40", "head_dim (16)"]),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            ["quantization_config: weight_block_size", "[128, 128]", "[128]"],
        ),
        (
            DENSE["glm4"],
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            ["partial_rotary_factor", "1.5", "most 1"],
        ),
        (DENSE["glm4"], {"partial_rotary_factor": -0.5}, ["partial_rotary_factor", "-0.5", "positive"]),
        (DENSE["granite"], {"logits_scaling": 0}, ["logits_scaling", "got 0", "positive"]),
        (DENSE["granite"], {"mlp_bias": True}, ["mlp_bias", "True", "attention_bias"]),
        (DENSE["ministral3"], {"rope_parameters": None, "rope_scaling": None}, ["rope_type", "'default'", "'yarn'"]),
        (
            DENSE["ministral3"],
            {"rope_scaling": None, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            ["rope_parameters: llama_4_scaling_beta", "missing"],
        ),
        (DENSE["olmo3"], {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        (DENSE["olmo3"], {"layer_types": ["full_attention"]}, ["layer_types", "a list of 3 times"]),
        (
            DENSE["phi3"],
            {"rope_scaling": {"long_factor": 2}},
            ["rope_scaling: long_factor", "got 2"],
        ),
        (
            DENSE["phi3"],
            {
                "rope_scaling": None,
                "rope_parameters": {"type": "longrope", "short_factor": [1], "long_factor": [1, -2]},
            },
            ["rope_parameters: long_factor", "[1, -2]", "positive numbers"],
        ),
        (
            DENSE["phi3"],
            {"rope_scaling": None, "rope_parameters": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
            ["longrope.short_factor is 1 numbers", "expected 6 positive numbers"],
        ),
        (
            DENSE["phi3"],
            {"rope_scaling": None, "rope_parameters": {"type": "linear"}},
            ["rope_parameters: type", "linear"],
        ),
    ],
)
def test_unsupported_features_raise_errors_that_name_key_and_value(spec, change, words):
    with pytest.raises(BadInput) as caught:
        from_hf_config({**to_hf_config(spec), **change}, "some/config.json")
    assert all(word in str(caught.value) for word in ["some/config.json", *words])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (PARALLEL, "parallel_block"),
        (SLIDING, "sliding_window"),
        (replace(LLAMA, qk_norm=True), "qk_norm"),
        (replace(LLAMA, norm="layernorm"), "norm"),
        (replace(LLAMA, mlp="gelu"), "mlp"),
        (replace(LLAMA, positions="learned"), "positions"),
        (replace(LLAMA, hidden=66), "heads"),
        (replace(QWEN3, bias=True), "bias"),
        (replace(QWEN3, qk_norm=False), "qk_norm"),
        (replace(GPT2, bias=False), "bias"),
        (replace(GPT2, kv_heads=2), "kv_heads"),
        (replace(GPT2, head_dim=8), "head_dim"),
        (replace(LLAMA, experts=4), "experts"),
        (replace(MIXTRAL, experts=0), "experts"),
        (replace(MIXTRAL, first_dense_layers=1), "first_dense_layers"),
        (replace(MIXTRAL, normalised_routing=False), "normalised_routing"),
        (replace(QWEN3_MOE, shared_expert_hidden=8), "shared_expert_hidden"),
        (replace(DEEPSEEK_V2, shared_expert_hidden=0), "shared_expert_hidden"),
        (replace(DEEPSEEK_V2, router="sigmoid"), "router"),
        (replace(DEEPSEEK_V3, family="qwen3_moe", qk_norm=True, shared_expert_hidden=0), "router"),
    ],
)
def test_errors_name_the_field_that_a_folder_cannot_express(spec, field):
    with pytest.raises(BadInput, match=f"model.{field}: "):
        to_hf_config(spec)


@pytest.mark.parametrize(
    ("spec", "able"),
    [
        (replace(LLAMA, qk_norm=True), "qwen3"),
        (replace(LLAMA, qk_norm=True, sliding_window=8), "qwen3"),
        (replace(LLAMA, experts=4, experts_per_token=2, expert_hidden=8), "mixtral"),
        (replace(LLAMA, experts=4, experts_per_token=2, expert_hidden=8, qk_norm=True), "qwen3_moe"),
        (replace(MIXTRAL, experts=0, sliding_window=None), "llama"),
        (replace(QWEN3, bias=True), None),
    ],
)
def test_an_export_error_names_the_families_that_can_hold_the_model(spec, able):
    obstacle = export_obstacle(spec)
    assert obstacle
    named = re.search(r"\(model\.family: (.*) can\)$", obstacle)
    assert able in named[1].split(" or ") if named else able is None
    with pytest.raises(BadInput, match=re.escape(obstacle)):
        to_hf_config(spec)
    if able:
        assert read(to_hf_config(replace(spec, family=able))).family == able


def test_no_family_is_listed_as_missing() -> None:
    assert not LACKS.keys() & FAMILIES.keys()
    assert lacks("llama4_text") == lacks("llama4") and lacks("llama") is None


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_a_family_s_folder_can_hold_a_model_of_the_family(family):
    """With the dimensions that a run must give, and the family's own values."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn_hidden": 256, "vocab_size": 97}
    required = {
        "experts": 4,
        "experts_per_token": 2,
        "expert_hidden": 32,
        "kv_rank": 16,
        "rope_head_dim": 8,
        "value_head_dim": 12,
        "shared_expert_hidden": 32,
    }
    given = {key: value for key, value in required.items() if key in family.required}
    spec = from_plain(
        ModelSpec, {"family": family.model_type, **sizes, **given, **family.values, **family.by_width(64)}
    )
    assert export_obstacle(spec) is None


@pytest.mark.parametrize("spec", [LLAMA, QWEN3, GPT2, replace(GPT2, tied=False), SCALED, MIXTRAL, QWEN3_MOE, *DEEPSEEK])
def test_folder_tensors_cover_every_parameter_once(spec):
    tensors = hf_tensors(spec)
    assert list(tensors) == [parameter.name for parameter in parameters(spec)]
    names = [part.name for parts in tensors.values() for part in parts]
    assert len(set(names)) == len(names)
    for parameter in parameters(spec):
        parts = tensors[parameter.name]
        assert [part.first_row for part in parts] == [sum(p.row_count for p in parts[:i]) for i in range(len(parts))]
        assert sum(part.row_count for part in parts) == math.prod(parameter.shape[:-1] or parameter.shape)


def test_a_folder_without_a_usable_config_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"config\.json: no such file"):
        folder_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Damaged, match=r"config\.json: not JSON"):
        folder_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Damaged, match="JSON object"):
        folder_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(LLAMA)))
    assert from_plain(ModelSpec, folder_spec(tmp_path)) == LLAMA


def test_families_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import meshwright.families.folder"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
