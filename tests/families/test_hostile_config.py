"""A config.json of others has bounds by key and as a whole: it is refused at once, with its file and key."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.families.folder import folder_fields
from meshwright.spec.errors import BadInput, Damaged

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2}


def read(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    started = time.process_time()
    try:
        folder_fields(folder)
    finally:
        assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "num_hidden_layers": 10**9}, r"layers is 1000000000: expected integer \(≥ 1, ≤ 1000\)"),
        (
            {**LLAMA, "max_position_embeddings": 2**70},
            "max_position_embeddings: expected a positive integer of at most 1,000,000,000",
        ),
        (
            {**LLAMA, "num_attention_heads": 10**9, "num_key_value_heads": 7, "head_dim": 2},
            "kv_heads is 7: expected a divisor",
        ),
        ({**LLAMA, "rms_norm_eps": 1e300}, "rms_norm_eps: expected a positive number, got 1e[+]300"),
        ({**LLAMA, "hidden_size": "9" * 10**6}, r"hidden_size: expected a positive integer .*, got '9{96}\.\.\.$"),
        ({**LLAMA, "vocab_size": 10**9, "hidden_size": 10**9, "head_dim": 2}, r"parameters: expected at most 1e\+15"),
        ({**MIXTRAL, "num_local_experts": 10**9}, "experts is 1000000000: expected at most 1,000,000 in all 2 layers"),
        (
            {
                **LLAMA,
                "rope_scaling": {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": 1, "high_freq_factor": 4},
            },
            r"rope_scaling.factor is 0.5: expected number \(≥ 1\)",
        ),
    ],
)
def test_numbers_have_bounds(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    read(tmp_path, json.dumps(LLAMA))
    with pytest.raises(BadInput, match=words):
        read(tmp_path, json.dumps(config))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("NaN", "NaN is no number of JSON"),
        ("-Infinity", "-Infinity is no number"),
        ("1e999", "the number 1e999 is too large"),
        ("1" * 5000, "a number of 5,000 digits; expected at most 300"),
        ("[" * 100 + "]" * 100, "nested more than 64 levels deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 64 levels deep"),
        ('"\\ud800"', "half of a surrogate pair"),
        ("", "not JSON"),
    ],
)
def test_a_document_has_bounds(tmp_path: Path, value: str, words: str) -> None:
    with pytest.raises(Damaged, match=rf"config\.json: .*{words}.*copy the file again"):
        read(tmp_path, json.dumps(LLAMA)[:-1] + f', "rms_norm_eps": {value}}}')


def test_what_tokenizers_write_is_read(tmp_path: Path) -> None:
    """Most tokenizer_config.json files have this number, the nearest integer to 1e30."""
    read(
        tmp_path,
        json.dumps(
            {**LLAMA, "model_max_length": int(1e30), "task_specific_params": [[[[[[1]]]]]], "prefix": "[{" * 200}
        ),
    )
