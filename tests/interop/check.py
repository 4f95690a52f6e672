"""Exported folders of every family in an older transformers than that of the tests: `make test-interop`.

PYTHONPATH=FOLDER python -m tests.interop.check     # FOLDER: the packages of requirements.txt; all others are the project's
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.test_hf import SPECS, export
from tests.models.tiny import built, some_tokens

VERSION = "4.57."
SEQ = 64
BOUND = 1e-4
"""Largest difference of two logits in fp32."""


@torch.no_grad()
def largest_difference(name: str, folder: Path) -> float:
    """The largest difference between our logits and those of transformers for the exported folder of a small model."""
    from transformers import AutoModelForCausalLM

    model = built(SPECS[name], dtype=torch.float32)
    export(model, folder)
    loader: Any = AutoModelForCausalLM
    theirs, report = loader.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], f"{name}: {report}"
    tokens = some_tokens(SPECS[name], seq=SEQ)
    return (theirs.eval()(tokens).logits - model(tokens)).abs().max().item()


def main() -> None:
    import transformers

    assert transformers.__version__.startswith(VERSION), f"expected {VERSION}*, found {transformers.__version__}"
    transformers.utils.logging.set_verbosity_error()
    wrong = []
    for name in SPECS:
        with tempfile.TemporaryDirectory() as folder:
            difference = largest_difference(name, Path(folder) / "model")
        print(f"{name}: {difference:.1e}", flush=True)
        if not difference < BOUND:
            wrong.append(name)
    assert not wrong, f"logits differ: {', '.join(wrong)}"


if __name__ == "__main__":
    main()
