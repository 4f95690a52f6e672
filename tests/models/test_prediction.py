"""Modules that predict further tokens: transformers' losses and gradients in float64, documents, folders, counts of V3."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.models.hf import export_hf, import_hf
from meshwright.checkpoint.models.initial import check_initial
from meshwright.checkpoint.models.stored_model import open_model
from meshwright.config.presets import MODEL_PRESETS
from meshwright.families.folder import folder_spec
from meshwright.models.prediction import further_tokens
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.fields import from_plain
from meshwright.spec.model import (
    ModelSpec,
    active_parameter_count,
    flops_per_token,
    parameter_count,
    parameters,
    prediction_parameter_count,
)
from tests.models.test_deepseek import SMALL, as_ours, imported
from tests.models.tiny import DEEPSEEK_V3, GPT2, LLAMA, QWEN3, built, some_tokens

DEPTH, SEQ = 2, 30
OUTSIDE = {"token_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "post_norm"}


def their_models() -> tuple[Any, Any]:
    """transformers' DeepSeek-V3 and its modules for further tokens, with random weights."""
    import transformers as t
    from transformers.modeling_layers import MtpModel

    config = t.DeepseekV3Config(q_lora_rank=28, num_mtp_layers=DEPTH, n_group=4, topk_group=2, **SMALL)
    torch.manual_seed(0)
    main = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    further = MtpModel(main, DEPTH)
    for name, tensor in further.layers.named_parameters():  # transformers leaves some of them uninitialised
        torch.nn.init.normal_(tensor, float(name.endswith("norm.weight")), std=0.2)
    for name, tensor in [*main.named_buffers(), *further.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.3)
    for layer in further.layers:
        layer.mtp_block.self_attn.config._attn_implementation = "eager"
        layer.mtp_block.mlp.experts.config._experts_implementation = "eager"
    return main, further


def save_published(folder: Path, main: Any, further: Any) -> None:
    """Write both as DeepSeek publishes them: further layers, with copies of embedding and head."""
    main.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for depth, layer in enumerate(further.layers):
        at = f"model.layers.{SMALL['num_hidden_layers'] + depth}."
        tensors[at + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[at + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        for name in ("enorm", "hnorm", "eh_proj"):
            tensors[f"{at}{name}.weight"] = getattr(layer, name).weight.detach().clone()
        tensors[at + "shared_head.norm.weight"] = layer.post_norm.weight.detach().clone()
        for name, value in layer.mtp_block.state_dict().items():
            if name.startswith("mlp.experts."):
                stem = name.rpartition(".")[0]
                for expert, matrix in enumerate(value):
                    parts = {"gate": matrix[:24], "up": matrix[24:]} if "gate_up" in name else {"down": matrix}
                    for part, rows in parts.items():
                        tensors[f"{at}{stem}.{expert}.{part}_proj.weight"] = rows.clone()
            else:
                tensors[at + name] = value.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_losses_and_every_gradient_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, further = their_models()
    save_published(tmp_path, main, further)
    ours = imported(tmp_path)
    assert ours.spec.prediction_depth == DEPTH
    tokens = some_tokens(ours.spec, seq=SEQ)
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    targets[0, 4:9] = -1  # not trained on
    main, further = main.double(), further.double()
    with monkeypatch.context() as patched:  # transformers fixes fp32 for norms, routers and rotary tables
        patched.setattr(torch, "float32", torch.float64)
        patched.setattr(torch, "float", torch.float64)
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        main.model.rotary_emb = further.rotary_emb = type(main.model.rotary_emb)(main.config)
        hidden = main(tokens, output_hidden_states=True).hidden_states[-1]
        their_next = cross_entropies(main.lm_head(hidden), targets, 0)
        their_further = 0.0
        for depth in range(DEPTH):
            shifted = tokens.roll(-depth - 1, 1)
            positions = torch.arange(SEQ)[None] + depth + 1
            hidden = further.forward_layer(depth, hidden, positions, None, input_ids=shifted)
            their_further = their_further + cross_entropies(main.lm_head(hidden), targets, depth + 1)
        (their_next + 0.7 * their_further).backward()
    losses = ours.losses(tokens, targets)
    (losses.tokens + 0.7 * losses.further).backward()
    assert torch.allclose(losses.tokens, their_next, rtol=1e-10) and torch.allclose(
        losses.further, their_further, rtol=1e-10
    )
    assert torch.equal(losses.tokens, ours(tokens, targets=targets))
    gradients = {name: weight.grad for name, weight in main.named_parameters()}
    layers, count = dict(enumerate(further.layers)), SMALL["num_hidden_layers"]
    for depth, layer in layers.items():
        of_block = layer.mtp_block.named_parameters()
        gradients |= {f"model.layers.{count + depth}.{name}": weight.grad for name, weight in of_block}
    for name, weight in ours.named_parameters():
        if not weight.requires_grad:
            continue
        _, depth, part, *_ = (*name.split("."), "", "")
        if name.startswith("predictions.") and part in OUTSIDE:
            exact = getattr(layers[int(depth)], OUTSIDE[part]).weight.grad
        else:
            renamed = (
                name.replace(f"predictions.{depth}.block", f"layers.{count + int(depth or 0)}")
                if "block" in name
                else name
            )
            exact = as_ours(renamed, gradients, "q_b_proj")
        assert (weight.grad - exact).norm() <= 1e-9 * exact.norm(), name


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor, shift: int) -> torch.Tensor:
    """Sum over all positions whose target `shift` positions later is trained on."""
    log_probabilities, (rows, seq) = logits.log_softmax(-1), targets.shape
    return -sum(
        log_probabilities[row, position, targets[row, position + shift]]
        for row in range(rows)
        for position in range(seq - shift)
        if targets[row, position + shift] >= 0
    )


@pytest.mark.parametrize("spec", [LLAMA, GPT2, QWEN3, DEEPSEEK_V3], ids=["llama", "gpt2", "qwen3", "v3"])
def test_packed_documents_have_the_losses_of_single_sequences(spec: ModelSpec) -> None:
    """Also the family's own block, norms and tied head; nothing is predicted across the end of a document."""
    lengths = (1, 9, 2, 14, 4)
    model, tokens = built(replace(spec, prediction_depth=DEPTH)), some_tokens(spec, batch=1, seq=sum(lengths))
    parts = tokens[0].split(lengths)
    targets = torch.cat([F.pad(part[1:], (0, 1), value=-1) for part in parts])[None]
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model.losses(tokens, targets, positions=positions, documents=documents)
    single = [model.losses(part[None], F.pad(part[1:], (0, 1), value=-1)[None]) for part in parts]
    assert torch.allclose(packed.further, sum(losses.further for losses in single), rtol=1e-10)
    assert torch.allclose(packed.tokens, sum(losses.tokens for losses in single), rtol=1e-10)
    assert packed.further > 20


def test_further_tokens_stay_in_the_document() -> None:
    tokens, targets = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[6, 7, 8, -1, 4]])
    free, masked = (
        further_tokens(tokens, targets, documents, 2) for documents in (None, torch.tensor([[0, 0, 0, 1, 1]]))
    )
    assert free.targets[0].T.tolist() == [[7, 8, -1, 4, -1], [8, -1, 4, -1, -1]]
    assert masked.targets[0].T.tolist() == [[7, 8, -1, 4, -1], [8, -1, -1, -1, -1]]
    assert free.inputs[0, :4, 0].tolist() == [6, 7, 8, 9] and free.inputs[0, :3, 1].tolist() == [7, 8, 9]


def test_folders_hold_the_modules_as_further_layers(tmp_path: Path) -> None:
    spec, folder = replace(DEEPSEEK_V3, prediction_depth=DEPTH), tmp_path / "out"
    ours = built(spec, dtype=torch.float32)
    export_hf(folder, spec, dict(ours.named_parameters()).__getitem__, tokenizer=None, run_note="", dtype="fp32")
    tensors = load_file(folder / "model.safetensors")
    further = {name.split(".", 3)[3] for name in tensors if name.startswith("model.layers.3.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "mlp.gate.weight"} < further
    for copy, original in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
        assert torch.equal(tensors[f"model.layers.2.{copy}.weight"], tensors[f"{original}.weight"])
    again = imported(folder, torch.float32)
    assert again.spec == spec
    for (name, before), (_, after) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(before, after), name
    with open_model(folder) as stored:  # inference leaves them out
        assert stored.spec == replace(spec, prediction_depth=0) and len(list(stored.tensors())) == len(
            parameters(stored.spec)
        )
    for depth in (DEPTH, 1, 0):  # a run may begin with fewer modules, not with more
        check_initial(replace(spec, prediction_depth=depth), f"hf:{folder}")
    with pytest.raises(BadInput, match=r"predictions\.2\.token_norm\.weight is missing there"):
        check_initial(replace(spec, prediction_depth=3), f"hf:{folder}")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Damaged, match="no tensor model.layers.3.eh_proj.weight"):
        import_hf(folder)
    main = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("model.layers.2", "model.layers.3"))
    }
    save_file(main, folder / "model.safetensors", metadata={"format": "pt"})  # as transformers writes it
    without, reader = import_hf(folder)
    assert without.prediction_depth == folder_spec(folder)["prediction_depth"] == 0
    assert any("num_nextn_predict_layers 2 is not used" in note for note in reader.notes)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 2


def test_folders_of_other_families_cannot_hold_them(tmp_path: Path) -> None:
    spec = replace(LLAMA, prediction_depth=1)
    weights = dict(built(spec).named_parameters()).__getitem__
    with pytest.raises(BadInput, match=r"model.prediction_depth.*got 1; Meshwright's own checkpoints can"):
        export_hf(tmp_path / "out", spec, weights, tokenizer=None, run_note="")


def test_counts_of_deepseek_v3_equal_the_published_ones() -> None:
    """671B and 37B without the module; it has 11.5B of its own, 14B with its copies of embedding and head (README_WEIGHTS.md)."""
    v3 = from_plain(ModelSpec, {**MODEL_PRESETS["deepseek-v3"], "rope_theta": 10000.0})
    with_module = replace(v3, prediction_depth=1)
    hidden, heads, table = 7168, 128, 129280 * 7168
    attention = hidden * (1536 + 512 + 64) + 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * hidden + 1536 + 512
    expert = 3 * hidden * 2048
    own = attention + 256 * expert + expert + 256 * hidden + 256 + 2 * hidden + 2 * hidden * hidden + 3 * hidden
    assert prediction_parameter_count(with_module) == parameter_count(with_module) - parameter_count(v3) == own
    assert round(own / 1e9, 1) == 11.6 and round((own + 2 * table) / 1e9) == 13
    assert round((parameter_count(v3) + own + 2 * table) / 1e9) == 684
    per_token = attention - 2048 + 9 * expert + 256 * hidden + 2 * hidden * hidden + table
    scores = heads * (192 + 128)
    for causal, share in ((False, 1.0), (True, 0.5)):
        added = flops_per_token(with_module, 4096, causal=causal) - flops_per_token(v3, 4096, causal=causal)
        assert added == 6 * per_token + 6 * scores * 4096 * share
    assert round((active_parameter_count(with_module) - active_parameter_count(v3) + 2 * table) / 1e9, 1) == 2.5
