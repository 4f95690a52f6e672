"""Every family against transformers: logits, gradients and folders of random small models, and facts of released ones.

A family's file in `cases` has:

- `config`, which draws keys of a small model's config.json;
- `PARAMETERS`, the published numbers of parameters of its presets;
- `RELEASED`, the config.json of a released model, by preset;
- `ORACLE`, if any, the type of the class that transformers has for a type that it does not know;
- `WRONG`, mistakes that raise no error: each gives ModelSpec fields with which the model computes
  something else, or none where a drawn model lacks what it is about;
- `INJECTED`, if any, mistakes that no field can say: each changes the code or the family with a MonkeyPatch;
- `CHANGED`, if any, the keys that an export writes otherwise;
- `IN_MEMORY`, if any, a part of module names that transformers replaces when it loads a folder, and with what.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint.models.hf import export_hf, from_stacked, import_hf
from meshwright.families.folder import from_hf_config, hf_tensors, to_hf_config
from meshwright.families.registry import FAMILIES, MODEL_PRESETS
from meshwright.models.decoder import Decoder
from meshwright.spec.errors import BadInput
from meshwright.spec.fields import from_plain
from meshwright.spec.model import ModelSpec, parameter_count, parameters
from tests.models.tiny import built
from tests.slow import quick_first

CASES = {name: import_module(f"tests.families.cases.{name}") for name in FAMILIES}
DRAWN = 8
"""Random small models of a family; `make test` has one of them."""
DRAWS = [case for name in CASES for case in quick_first(1, ((name, seed) for seed in range(DRAWN)), unpack=True)]
SEQ = 40
UNWRITTEN = {"_name_or_path", "architectures", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Keys that do not describe the model, or that the tokenizer decides."""


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def their_config(family: str, keys: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(getattr(CASES[family], "ORACLE", family), **keys)


def save(theirs: Any, folder: Path, family: str) -> None:
    """Write a model of transformers as a folder of the family."""
    theirs.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": family}))


def keys_read(folder: Path, family: str) -> dict[str, Any]:
    """All keys that transformers' class has after it reads a folder's config.json."""
    keys = json.loads((folder / "config.json").read_text())
    del keys["model_type"]
    return their_config(family, keys).to_dict()


def their_model(family: str, seed: int) -> Any:
    """A small random model of transformers, in which norms, biases and choice biases differ from their initial values."""
    from transformers import AutoModelForCausalLM

    config = their_config(family, CASES[family].config(random.Random(seed)))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias") and tensor.is_floating_point():
                tensor.normal_(std=0.2)
            elif name.endswith("sinks"):
                tensor.normal_()
            elif tensor.dim() == 1 and name.endswith("weight"):
                tensor.add_(0.2 * torch.randn_like(tensor))
    return model.eval()


def imported(folder: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    """The model in a folder."""
    spec, reader = import_hf(folder)
    model = built(spec, dtype=dtype)
    with torch.no_grad():
        for parameter in parameters(spec):
            model.get_parameter(parameter.name).copy_(reader.read(parameter))
    return model


@torch.no_grad()
def mistaken(ours: Decoder, spec: ModelSpec) -> Decoder:
    """Another model with the same weights, as far as both have them."""
    weights, wrong = dict(ours.named_parameters()), built(spec, vary=False)
    for name, parameter in wrong.named_parameters():
        if name in weights:
            parameter.copy_(weights[name][: len(parameter)])
    return wrong.requires_grad_(False)


def in_float64(theirs: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' loss and logits, with gradients; it fixes fp32 for norms, softmax, routers and rotary tables: lift that."""
    theirs, default = theirs.double(), torch.get_default_dtype()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "float32", torch.float64)
        patched.setattr(torch, "float", torch.float64)
        patched.setattr(torch, "complex64", torch.complex128)
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        if hasattr(theirs.model if hasattr(theirs, "model") else theirs, "rotary_emb"):
            theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        for module in theirs.modules():
            if hasattr(module, "scalar_embed_scale"):
                module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        torch.set_default_dtype(torch.float64)  # that of quotients of integers
        try:
            answer = theirs(tokens, labels=tokens)
            answer.loss.backward()
        finally:
            torch.set_default_dtype(default)
    return answer


def their_gradient(ours: Decoder, name: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Our parameter's gradient as transformers computes it; in memory it stacks experts as we do."""
    parts = hf_tensors(ours.spec)[name]
    renamed = getattr(CASES[ours.spec.family], "IN_MEMORY", ("", ""))
    gradients = {key.replace(*renamed) if renamed[0] else key: gradient for key, gradient in gradients.items()}
    if parts[0].name not in gradients:
        layer, attribute = FAMILIES[ours.spec.family].layer.format(layer=name.split(".")[1]), name.rpartition(".")[2]
        (stacked,) = [key for key in gradients if key.startswith(layer) and f".experts.{attribute}" in key]
        return gradients[stacked]
    if parts[0].stacked:
        return from_stacked(parts[0], gradients[parts[0].name]).view_as(ours.get_parameter(name))
    found = [gradients[part.name].t() if part.transposed else gradients[part.name] for part in parts]
    return torch.cat(found)


@pytest.mark.parametrize(("family", "seed"), DRAWS)
def test_logits_and_every_gradient_equal_transformers(
    family: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = their_model(family, seed)
    save(theirs, tmp_path, family)
    ours = imported(tmp_path)
    tokens = torch.randint(0, ours.spec.vocab_size, (2, SEQ))
    answer = in_float64(theirs, tokens, monkeypatch)
    assert (ours(tokens) - answer.logits).abs().max() <= 1e-10
    for mistake, fields in CASES[family].WRONG.items():
        if not (wrong_fields := fields(ours.spec)):
            continue
        wrong = mistaken(ours, replace(ours.spec, **wrong_fields))
        assert (wrong(tokens) - answer.logits).abs().max() > 1e-6, mistake
    targets = tokens.roll(-1, 1).index_fill(1, torch.tensor([SEQ - 1]), -1)
    (ours(tokens, targets=targets) / (2 * (SEQ - 1))).backward()
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            exact = their_gradient(ours, name, gradients)
            assert (parameter.grad - exact).abs().max() <= 1e-8 * exact.abs().max(), name
            assert exact.abs().max() > 0, name


@pytest.mark.parametrize(
    ("family", "mistake"), [(name, mistake) for name in CASES for mistake in getattr(CASES[name], "INJECTED", {})]
)
def test_mistakes_in_the_code_are_found(
    family: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = their_model(family, 0)
    save(theirs, tmp_path, family)
    tokens = torch.randint(0, theirs.config.vocab_size, (2, SEQ))
    answer = in_float64(theirs, tokens, monkeypatch)
    assert (imported(tmp_path)(tokens) - answer.logits).abs().max() <= 1e-10
    CASES[family].INJECTED[mistake](monkeypatch)
    assert (imported(tmp_path)(tokens) - answer.logits).abs().max() > 1e-6


@pytest.mark.parametrize(("family", "seed"), DRAWS)
def test_a_folder_read_and_written_again_is_the_same(family: str, seed: int, tmp_path: Path) -> None:
    save(their_model(family, seed), tmp_path / "theirs", family)
    ours = imported(tmp_path / "theirs", torch.float32)
    weights = dict(ours.named_parameters())
    export_hf(tmp_path / "ours", ours.spec, weights.__getitem__, tokenizer=None, run_note="", dtype="fp32")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    configs = [keys_read(tmp_path / side, family) for side in ("theirs", "ours")]
    unequal = {key for key in configs[0].keys() | configs[1].keys() if configs[0].get(key) != configs[1].get(key)}
    unexpected = unequal - UNWRITTEN - getattr(CASES[family], "CHANGED", set())
    assert not unexpected, [(config.get(key), key) for key in unexpected for config in configs]


@pytest.mark.parametrize("family", CASES)
def test_all_keys_of_the_class_are_known_and_others_are_refused(family: str) -> None:
    drawn = their_config(family, CASES[family].config(random.Random(0))).to_dict()
    config = {**json.loads(json.dumps(drawn)), "model_type": family}
    fields, _ = from_hf_config(config)
    written = to_hf_config(from_plain(ModelSpec, fields))
    with pytest.raises(BadInput, match=r"some/config\.json: attn_cap: expected a key that this family reads, got 30.0"):
        from_hf_config({**written, "attn_cap": 30.0}, "some/config.json")


@pytest.mark.parametrize("family", CASES)
def test_each_mistake_changes_some_of_the_drawn_models(family: str) -> None:
    specs = []
    for seed in range(DRAWN):
        drawn = their_config(family, CASES[family].config(random.Random(seed))).to_dict()
        fields, _ = from_hf_config({**json.loads(json.dumps(drawn)), "model_type": family})
        specs.append(from_plain(ModelSpec, fields))
    assert CASES[family].WRONG
    for mistake, fields_of in CASES[family].WRONG.items():
        assert any(fields_of(spec) for spec in specs), mistake


@pytest.mark.parametrize("family", CASES)
def test_released_models_have_the_published_parameters_and_keys(family: str) -> None:
    case = CASES[family]
    for name, count in case.PARAMETERS.items():
        assert parameter_count(from_plain(ModelSpec, MODEL_PRESETS[name])) == count, name
    for name, config in case.RELEASED.items():
        fields, _ = from_hf_config(config)
        assert from_plain(ModelSpec, fields) == from_plain(ModelSpec, MODEL_PRESETS[name])
