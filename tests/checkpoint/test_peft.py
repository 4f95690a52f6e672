"""Files of peft: read and written by both programs, with equal tensors and logits; merged models; what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.checkpoint.models.adapters import base_digest
from meshwright.checkpoint.models.hf import export_hf, import_hf
from meshwright.checkpoint.models.peft import CONFIG, WEIGHTS, read_peft, write_peft
from meshwright.checkpoint.models.stored_model import open_model
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.model import ModelSpec, parameters, without_adapter
from tests.adapted import adapter_of
from tests.checkpoint.crash import intercept_calls
from tests.models.test_adapter import built, tokens_of
from tests.models.tiny import GPT2, GPT_OSS, LLAMA, QWEN3_MOE

KINDS = ("lora", "rslora", "dora")


def exported(folder: Path, spec: ModelSpec) -> tuple[Path, Path, Decoder]:
    """Folders of a base and of its adapters, and the model of both, in fp32."""
    model, base, adapters = built(spec, draw=True).float(), folder / "base", folder / "adapters"
    export_hf(base, without_adapter(spec), model.get_parameter, tokenizer=None, run_note="", dtype="fp32")
    _, weights = import_hf(base)
    digest = base_digest(spec, weights.read_rows)
    write_peft(adapters, spec, lambda name: model.get_parameter(name).detach(), base_name=str(base), base=digest)
    return base, adapters, model


@torch.no_grad()
def logits(folder: Path, adapter: Path | None, tokens: torch.Tensor) -> torch.Tensor:
    with open_model(folder, adapter=adapter) as stored:
        model = Decoder(stored.spec, reference=True)
        stored.copy_to(model)
    return model(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_here_is_read_here(tmp_path: Path, kind: str) -> None:
    spec = adapter_of(LLAMA, rank=3, alpha=5.0, kind=kind)
    base, adapters, model = exported(tmp_path, spec)
    tokens = tokens_of(spec)
    with torch.no_grad():
        torch.testing.assert_close(logits(base, adapters, tokens), model(tokens), rtol=1e-4, atol=1e-5)
        assert (logits(base, None, tokens) - model(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_peft_reads_and_writes_the_same(tmp_path: Path, spec: ModelSpec, kind: str) -> None:
    """peft computes our logits from our files, and writes tensors equal byte for byte, which are read here again."""
    peft = pytest.importorskip("peft")
    import transformers

    spec = adapter_of(spec, rank=3, alpha=5.0, kind=kind)
    base, adapters, model = exported(tmp_path, spec)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, str(adapters)).eval()
    tokens = tokens_of(spec)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=2e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, written = load_file(adapters / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS)
    assert ours.keys() == written.keys() and all(torch.equal(ours[name], written[name]) for name in ours)
    torch.testing.assert_close(logits(base, tmp_path / "theirs", tokens), model(tokens).detach(), rtol=1e-4, atol=2e-5)


def test_adapters_of_all_experts_are_written_and_read(tmp_path: Path) -> None:
    spec = adapter_of(QWEN3_MOE, rank=8, experts=True)
    base, adapters, model = exported(tmp_path, spec)
    assert "base_model.model.model.layers.1.mlp.experts.5.down_proj.lora_B.weight" in load_file(adapters / WEIGHTS)
    tokens = tokens_of(spec)
    with torch.no_grad():
        torch.testing.assert_close(logits(base, adapters, tokens), model(tokens), rtol=1e-3, atol=1e-4)
    stacked = adapter_of(GPT_OSS, rank=8, experts=True)
    with pytest.raises(BadInput, match="a gpt_oss folder stacks its experts"):
        write_peft(tmp_path / "none", stacked, built(stacked).get_parameter, base_name="", base=None)


def test_an_export_that_fails_leaves_no_folder_and_can_be_repeated(tmp_path: Path) -> None:
    spec = adapter_of(LLAMA)
    read = built(spec).get_parameter

    def fail(call: int, *_: object) -> None:
        raise OSError(28, "No space left on device")

    with intercept_calls(fail, ("fsync",)), pytest.raises(OSError, match="No space left"):
        write_peft(tmp_path / "adapters", spec, lambda name: read(name).detach(), base_name="", base=None)
    assert list(tmp_path.iterdir()) == []
    write_peft(tmp_path / "adapters", spec, lambda name: read(name).detach(), base_name="", base=None)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == {CONFIG, WEIGHTS}


def rewritten(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A copy of an adapter's folder with changed keys and tensors, without the digest of a base."""
    copy = folder.parent / "changed"
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | changes
    (copy / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(load_file(folder / WEIGHTS) | (tensors or {}), copy / WEIGHTS, metadata={"format": "pt"})
    return copy


def test_patterns_of_rank_and_alpha_and_whole_weights(tmp_path: Path) -> None:
    spec = adapter_of(LLAMA, rank=3, alpha=6.0, targets=("q_proj", "down_proj"))
    base, adapters, _ = exported(tmp_path, spec)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_"
    generator = torch.Generator().manual_seed(3)
    changed = {
        f"{name}A.weight": torch.randn(2, 96, generator=generator),
        f"{name}B.weight": torch.randn(64, 2, generator=generator),
        "base_model.model.lm_head.weight": torch.randn(131, 64, generator=generator),
    }
    folder = rewritten(
        adapters,
        changed,
        rank_pattern={r"layers\.1\.mlp\.down_proj": 2},
        alpha_pattern={r"layers\.1\.mlp\.down_proj": 8},
        modules_to_save=["lm_head"],
    )
    with open_model(base) as stored, open_model(base, adapter=folder) as tuned:
        specs = {parameter.name: parameter for parameter in parameters(LLAMA)}
        before, after = (
            (of.read_rows(specs["layers.1.mlp.down.weight"], 0, 64), of.read_rows(specs["head.weight"], 0, 131))
            for of in (stored, tuned)
        )
    expected = before[0] + 8 / 2 * changed[f"{name}B.weight"] @ changed[f"{name}A.weight"]
    torch.testing.assert_close(after[0], expected)
    assert torch.equal(after[1], changed["base_model.model.lm_head.weight"])


def test_adapters_of_single_experts_are_read(tmp_path: Path) -> None:
    spec = adapter_of(QWEN3_MOE, rank=2, targets=("q_proj",))
    base, adapters, _ = exported(tmp_path, spec)
    name = "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_"
    tensors = {f"{name}A.weight": torch.randn(2, 64), f"{name}B.weight": torch.randn(24, 2)}
    specs = {parameter.name: parameter for parameter in parameters(QWEN3_MOE)}
    with open_model(base) as stored, open_model(base, adapter=rewritten(adapters, tensors)) as tuned:
        before, after = (of.read_rows(specs["layers.1.moe.experts.gate_up"], 3, 6) for of in (stored, tuned))
    delta = 16.0 * tensors[f"{name}B.weight"] @ tensors[f"{name}A.weight"]
    torch.testing.assert_close(after[1, 24:], before[1, 24:] + delta)  # expert 4, behind the gate's rows
    assert torch.equal(after[0], before[0]) and torch.equal(after[1, :24], before[1, :24])


def test_what_is_refused_and_said(tmp_path: Path) -> None:
    spec = adapter_of(LLAMA, rank=3)
    _, adapters, _ = exported(tmp_path, spec)
    assert (
        read_peft(rewritten(adapters, lora_dropout=0.1), spec)
        .notes[0]
        .endswith("lora_dropout 0.1 is not used: adapters are applied without dropout")
    )
    refused = {
        "use_qalora: expected a key that this program reads": {"use_qalora": True},
        "moe_lora: expected .*got 3": {"moe_lora": 3},
        "bias: expected 'none'": {"bias": "all"},
        "peft_type: expected 'LORA', got 'IA3'": {"peft_type": "IA3"},
        "r: expected a positive whole number, got 0": {"r": 0},
        r"r: expected a positive whole number, got 8\.5": {"r": 8.5},
        "r: expected a positive whole number, got True": {"r": True},
        "lora_alpha: expected a positive number, got True": {"lora_alpha": True},
        r"rank_pattern\.q_proj: expected a positive whole number, got 2\.5": {"rank_pattern": {"q_proj": 2.5}},
        "moe_lora: expected .*got 'x'": {"moe_lora": "x"},
        "rank 3, and adapter_config.json says 4": {"r": 4},
        "use_dora is True": {"use_dora": True},
        "rank_pattern: expected regular expressions": {"rank_pattern": ["q_proj"]},
        r"rank_pattern\.q_proj: expected a positive whole number, got 'two'": {"rank_pattern": {"q_proj": "two"}},
        r"alpha_pattern: expected a regular expression.*got \(": {"alpha_pattern": {"(": 2}},
    }
    for message, changes in refused.items():
        with pytest.raises((BadInput, Damaged), match=message):
            read_peft(rewritten(adapters, **changes), spec)
    for empty in (None, False, 0, "", [], {}):
        read_peft(rewritten(adapters, some_later_key=empty), spec)
    read_peft(rewritten(adapters, r=3.0), spec)
    wrong = {"base_model.model.model.layers.0.self_attn.w_proj.lora_A.weight": torch.zeros(3, 64)}
    with pytest.raises(BadInput, match=r"self_attn\.w_proj is no linear layer.*nearest: .*_proj"):
        read_peft(rewritten(adapters, wrong), spec)
    (tmp_path / "dora").mkdir()
    _, dora, _ = exported(tmp_path / "dora", adapter_of(LLAMA, rank=3, kind="dora"))
    lengths = {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(1)}
    with pytest.raises(Damaged, match=r"lora_magnitude_vector has shape \(1,\), expected \(64,\)"):
        read_peft(rewritten(dora, lengths), spec)


def test_another_base_is_refused(tmp_path: Path) -> None:
    _, adapters, _ = exported(tmp_path / "one", adapter_of(LLAMA, rank=3))
    other = Decoder(replace(LLAMA), reference=True)
    export_hf(tmp_path / "other", LLAMA, other.get_parameter, tokenizer=None, run_note="", dtype="fp32")
    with (
        pytest.raises(BadInput, match="was trained beside the weights with digest .*give the base"),
        open_model(tmp_path / "other", adapter=adapters),
    ):
        pass
