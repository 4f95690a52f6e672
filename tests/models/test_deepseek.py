"""DeepSeek-V2 and V3: loss and every gradient of transformers in float64, folders, fp8 weights, and the routers' groups."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.models.hf import export_hf, import_hf
from meshwright.spec.errors import Damaged
from meshwright.spec.model import parameters
from tests.models.tiny import DEEPSEEK_LITE, DEEPSEEK_V2, DEEPSEEK_V3, built, some_tokens

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 20.0,
    "beta_slow": 1.0,
}


def their_model(name: str) -> Any:
    import transformers as t

    grouped = {"n_group": 4, "topk_group": 2}
    config = {
        "v2": lambda: t.DeepseekV2Config(
            q_lora_rank=28,
            topk_method="group_limited_greedy",
            routed_scaling_factor=3.0,
            n_shared_experts=2,
            rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
            **grouped,
            **SMALL,
        ),
        "v2 lite": lambda: t.DeepseekV2Config(q_lora_rank=None, rope_parameters={**YARN, "mscale": 0.9}, **SMALL),
        "v3": lambda: t.DeepseekV3Config(
            q_lora_rank=28,
            num_mtp_layers=0,
            rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
            **grouped,
            **SMALL,
        ),
        "v3 plain": lambda: t.DeepseekV3Config(
            q_lora_rank=None, norm_topk_prob=False, num_mtp_layers=0, **grouped, **SMALL
        ),
    }[name]()
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for parameter_name, buffer in model.named_buffers():
        if parameter_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)  # larger than most differences of scores
    return model


def imported(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Our model with the weights of a folder."""
    spec, reader = import_hf(folder)
    ours = built(spec, dtype=dtype)
    with torch.no_grad():
        for parameter in parameters(spec):
            ours.get_parameter(parameter.name).copy_(reader.read(parameter))
    return ours


def as_ours(name: str, theirs: dict[str, torch.Tensor], queries: str) -> torch.Tensor:
    """The weight or gradient of transformers for our parameter; it stacks experts in memory too."""
    ends = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in ends:
        return theirs[ends[name]]
    _, layer, part = name.split(".", 2)
    attention, mlp, shared = "self_attn.", "mlp.", "mlp.shared_experts."
    names = {
        "attention_norm": ["input_layernorm"],
        "mlp_norm": ["post_attention_layernorm"],
        "attention.out": [attention + "o_proj"],
        "attention.down": [attention + "q_a_proj", attention + "kv_a_proj_with_mqa"],
        "attention.q": [attention + queries],
        "attention.kv_down": [attention + "kv_a_proj_with_mqa"],
        "attention.kv_up": [attention + "kv_b_proj"],
        "attention.q_norm": [attention + "q_a_layernorm"],
        "attention.kv_norm": [attention + "kv_a_layernorm"],
        "mlp.gate_up": [mlp + "gate_proj", mlp + "up_proj"],
        "mlp.down": [mlp + "down_proj"],
        "moe.router": [mlp + "gate"],
        "moe.shared.gate_up": [shared + "gate_proj", shared + "up_proj"],
        "moe.shared.down": [shared + "down_proj"],
    }
    experts = {"moe.experts.gate_up": "mlp.experts.gate_up_proj", "moe.experts.down": "mlp.experts.down_proj"}
    at = f"model.layers.{layer}."
    if part in experts:
        return theirs[at + experts[part]]
    return torch.cat([theirs[f"{at}{module}.weight"] for module in names[part.removesuffix(".weight")]])


@pytest.mark.parametrize("name", ["v2", "v2 lite", "v3", "v3 plain"])
def test_loss_and_every_gradient_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path)
    ours = imported(tmp_path)
    tokens = some_tokens(ours.spec, batch=2, seq=60)
    theirs = theirs.double()
    with monkeypatch.context() as patched:  # transformers fixes fp32 for norms, routers, rotary tables and the loss
        patched.setattr(torch, "float32", torch.float64)
        patched.setattr(torch, "float", torch.float64)
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        if name.startswith("v2"):  # its complex tables are built from fp32 ones
            patched.setattr(torch, "complex64", torch.complex128)
        answer = theirs(tokens, labels=tokens)
        answer.loss.backward()
    loss = ours(tokens, targets=tokens.roll(-1, 1).index_fill(1, torch.tensor([59]), -1)) / 118
    loss.backward()
    assert torch.allclose(loss, answer.loss, rtol=1e-10)
    assert torch.allclose(ours(tokens), answer.logits, rtol=0, atol=1e-10)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    queries = "q_b_proj" if ours.spec.q_rank else "q_proj"
    for key, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None and parameter.abs().max() > 0.1, key
            continue
        exact = as_ours(key, gradients, queries)
        assert (parameter.grad - exact).norm() <= 1e-9 * exact.norm(), key


@pytest.mark.parametrize("spec", [DEEPSEEK_V2, DEEPSEEK_LITE, DEEPSEEK_V3], ids=["v2", "lite", "v3"])
def test_an_exported_folder_gives_the_same_logits_in_transformers(spec: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, tokens = built(spec, dtype=torch.float32), some_tokens(spec, seq=200)
    export_hf(
        tmp_path / "out", spec, dict(ours.named_parameters()).__getitem__, tokenizer=None, run_note="", dtype="fp32"
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() < 1e-4
    again = imported(tmp_path / "out", torch.float32)
    assert again.spec == spec
    for (name, before), (_, after) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(before, after), name


def test_a_bf16_folder_keeps_the_biases_of_the_choice_in_fp32(tmp_path: Path) -> None:
    ours = built(DEEPSEEK_V3, dtype=torch.float32)
    export_hf(tmp_path / "out", DEEPSEEK_V3, dict(ours.named_parameters()).__getitem__, tokenizer=None, run_note="")
    again = imported(tmp_path / "out", torch.float32)
    assert torch.equal(again.layers["1"].moe.choice_bias, ours.layers["1"].moe.choice_bias)
    assert not torch.equal(again.head.weight, ours.head.weight)


def test_fp8_weights_are_read_times_the_scales_of_their_blocks(tmp_path: Path) -> None:
    """The released folder of V3: fp8 weights with scales, also in the layer that predicts a further token."""
    wide = replace(DEEPSEEK_V3, hidden=192, ffn_hidden=200, prediction_depth=1)
    ours, folder = built(wide, dtype=torch.float32), tmp_path / "out"
    export_hf(folder, wide, dict(ours.named_parameters()).__getitem__, tokenizer=None, run_note="", dtype="fp32")
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) * 0.01 + 0.001
        tensors[name] = (tensors[name] / 0.01).clamp(-400, 400).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
        spread = torch.stack(
            [torch.stack([scales[row // 128, column // 128] for column in range(columns)]) for row in range(rows)]
        )
        expected[name] = tensors[name].float() * spread
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    spec, reader = import_hf(folder)
    assert spec == wide
    project = next(parameter for parameter in parameters(spec) if parameter.name == "predictions.0.project.weight")
    assert torch.equal(reader.read(project), expected["model.layers.2.eh_proj.weight"])
    parameter = next(parameter for parameter in parameters(spec) if parameter.name == "layers.0.mlp.gate_up.weight")
    whole = torch.cat([expected[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(reader.read(parameter), whole)
    assert torch.equal(reader.read_rows(parameter, 131, 263), whole[131:263])
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        Damaged, match=r"no tensor model\.layers\.0\.mlp\.up_proj\.weight_scale_inv, which the scheme fp8 in"
    ):
        import_hf(folder)
