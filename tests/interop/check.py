"""Exported folders of every family in an older transformers than that of the tests: `make test-interop`.

PYTHONPATH=FOLDER python -m tests.interop.check     # FOLDER: the packages of requirements.txt; all others are the project's
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.test_hf import SPECS, export
from tests.models.tiny import (
    DEEPSEEK_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DENSE,
    GEMMA,
    GEMMA2,
    GLM4_MOE,
    GPT_OSS,
    LLAMA,
    MINIMAX_M2,
    QWEN2,
    QWEN2_MOE,
    RECOMBINED,
    SMOLLM3,
    built,
    some_tokens,
)

EXPORTED = {
    **SPECS,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "smollm3": SMOLLM3,
    **DENSE,
    "mistral": replace(LLAMA, family="mistral", sliding_window=37),
    "seed oss": replace(QWEN2, family="seed_oss"),
    "olmo2": replace(DENSE["olmo3"], family="olmo2", sliding_window=None, blocks={}, pattern=()),
    "ernie4.5": replace(LLAMA, family="ernie4_5", rope_pairs="neighbours", bias=True),
    "gpt-oss": GPT_OSS,
    "qwen2 moe": QWEN2_MOE,
    "glm4 moe": GLM4_MOE,
    "minimax_m2": MINIMAX_M2,
    **RECOMBINED,
    "deepseek v2": DEEPSEEK_V2,
    "deepseek v2 lite": DEEPSEEK_LITE,
    "deepseek v3": DEEPSEEK_V3,
    "kimi k2": replace(DEEPSEEK_V3, family="kimi_k2", expert_groups=1, groups_per_token=1),
}
NEWER = {"minimax_m2", "ministral3", "glm4_moe_lite"}
"""Families that this version does not have."""
VERSION = "4.57."
SEQ = 64
BOUND = 1e-4
"""Largest difference of two logits in fp32."""


@torch.no_grad()
def largest_difference(name: str, folder: Path) -> float:
    """The largest difference between our logits and those of transformers for the exported folder of a small model."""
    from transformers import AutoModelForCausalLM

    model = built(EXPORTED[name], dtype=torch.float32)
    export(model, folder)
    if model.spec.family == "kimi_k2":  # which transformers knows as DeepSeek-V3
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"kimi_k2"', '"deepseek_v3"'))
    loader: Any = AutoModelForCausalLM
    theirs, report = loader.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if name == "deepseek v2":
        # transformers 4.57 leaves YaRN's factor of attention scores out of DeepSeek-V2, though not of V3; 5 has both.
        for layer in theirs.model.layers:
            layer.self_attn.scaling *= (1 + 0.07 * math.log(8)) ** 2
    assert not report["missing_keys"] and not report["unexpected_keys"], f"{name}: {report}"
    tokens = some_tokens(EXPORTED[name], seq=SEQ)
    return (theirs.eval()(tokens).logits - model(tokens)).abs().max().item()


def main() -> None:
    import transformers

    assert transformers.__version__.startswith(VERSION), f"expected {VERSION}*, found {transformers.__version__}"
    transformers.utils.logging.set_verbosity_error()
    wrong = []
    for name in [name for name, spec in EXPORTED.items() if spec.family not in NEWER]:
        with tempfile.TemporaryDirectory() as folder:
            difference = largest_difference(name, Path(folder) / "model")
        print(f"{name}: {difference:.1e}", flush=True)
        if not difference < BOUND:
            wrong.append(name)
    assert not wrong, f"logits differ: {', '.join(wrong)}"


if __name__ == "__main__":
    main()
