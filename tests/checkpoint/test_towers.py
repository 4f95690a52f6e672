"""The text part of models that also read images: read, trained, written again with what is beside it, against transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from meshwright.checkpoint.models.convert import export_checkpoint, import_checkpoint, merge_adapter
from meshwright.checkpoint.models.hf import import_hf
from meshwright.checkpoint.models.single_device import load_model
from meshwright.checkpoint.models.towers import copy_towers, read_towers
from meshwright.checkpoint.store import CheckpointStore
from meshwright.cli.checkpoint import app
from meshwright.data.tokenizer import train_tokenizer
from meshwright.families.folder import folder_spec, to_whole_config
from meshwright.server.model_files import read_model_files
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.model import parameters
from tests.checkpoint.crash import count, intercept_calls
from tests.checkpoint.towers import FAMILIES, edit_config, renamed, stored, tiny
from tests.families.test_families import quiet_transformers, save, their_model  # noqa: F401
from tests.serve.helpers import engine_of, texts
from tests.slow import quick_first
from tests.training.tiny import RUN_FILE, make_tiny, prepared

TOKENS = torch.randint(3, 299, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def ours_of(folder: Path) -> torch.Tensor:
    return load_model(folder, torch.device("cpu"), torch.float32)(TOKENS)


@torch.no_grad()
def theirs_of(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


def run_of(folder: Path, source: Path, seed: int = 3) -> Path:
    """A run that began with a folder, with a checkpoint of other weights."""
    import_checkpoint(source, folder)
    chance, (spec, _) = torch.Generator().manual_seed(seed), import_hf(source)
    weights = {f"model.{each.name}": 0.3 * torch.randn(each.shape, generator=chance) for each in parameters(spec)}
    config = (folder / "checkpoints" / "step-00000000" / "config.yaml").read_text()
    config = config.replace("init_std: 0.15", "init_std: 0.02")  # runs from a folder have their own
    CheckpointStore(folder / "checkpoints").save(9, weights, {"step": 9}, {"config.yaml": config})
    return folder


@pytest.mark.parametrize("model_type", quick_first(9, FAMILIES))
def test_the_text_part_computes_as_transformers_and_is_written_back_whole(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    theirs = tiny(model_type, tmp_path / "whole")
    spec, reader = import_hf(tmp_path / "whole")
    assert spec.family == FAMILIES[model_type]
    assert f"only the text model is used; {len(reader.others)} other tensors (" in reader.notes[-1] and reader.others
    assert (ours_of(tmp_path / "whole") - theirs_of(theirs)).abs().max() < 1e-5
    run = run_of(tmp_path / "run", tmp_path / "whole")
    export_checkpoint(run, tmp_path / "out", dtype="fp32")
    before, after = stored(tmp_path / "whole"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name in reader.others:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]), name
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == len(before) - len(reader.others)
    loader: Any = AutoModelForImageTextToText
    again, loading = loader.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.float32)
    assert type(again) is type(theirs) and not any(loading.values())
    assert (theirs_of(again.eval()) - ours_of(run)).abs().max() < 1e-5
    assert folder_spec(tmp_path / "out") == folder_spec(tmp_path / "whole")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Gemma 3 as transformers saves it, with a tokenizer and settings of images."""
    folder = tmp_path_factory.mktemp("towers") / "gemma"
    tiny("gemma3", folder)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["def f(x):\n    return x\n" * 20], 290))
    (folder / "preprocessor_config.json").write_text('{"do_resize": true}')
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    return folder


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


NAMES = {
    "as Gemma 3 was released": [("vision_tower.", "vision_tower.vision_model.")],
    "as transformers names modules": [("language_model.model.", "model.language_model."), ("", "model.")],
    "as SmolVLM was released": [("language_model.model.", "model.text_model."), ("", "model.")],
    "as Qwen2-VL was released": [("language_model.model.", "model."), ("", "visual.")],
}


@pytest.mark.parametrize("names", NAMES)
def test_tensors_are_found_under_each_of_the_released_names_and_written_under_them(
    names: str, gemma: Path, tmp_path: Path
) -> None:
    folder = copied(gemma, tmp_path / "folder")
    renamed(folder, *NAMES[names])
    assert torch.equal(ours_of(folder), ours_of(gemma))
    export_checkpoint(run_of(tmp_path / "run", folder), tmp_path / "out", dtype="fp32")
    assert stored(tmp_path / "out").keys() == stored(folder).keys()


@pytest.mark.parametrize("width", [8, 16])
def test_experts_as_qwen3_vl_was_released_are_read_and_written(width: int, tmp_path: Path) -> None:
    """Their matrices are (in, out); transformers 5 writes them the other way. A matrix may be square, which does not say."""
    theirs = tiny("qwen3_vl_moe", tmp_path / "saved", moe_intermediate_size=width)
    released = copied(tmp_path / "saved", tmp_path / "released")
    tensors = stored(released)
    experts = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    tensors |= {name: tensors[name].mT.contiguous() for name in experts}
    save_file(tensors, released / "model.safetensors", metadata={"format": "pt"})
    assert len(experts) == 2 and (ours_of(released) - theirs_of(theirs)).abs().max() < 1e-5
    for source in ("saved", "released"):
        export_checkpoint(
            run_of(tmp_path / f"{source} run", tmp_path / source), tmp_path / source / "out", dtype="fp32"
        )
    found, expected = stored(tmp_path / "released" / "out"), stored(tmp_path / "saved" / "out")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.mT if name in experts else tensor, expected[name]), name


def test_stacked_experts_whose_shapes_cannot_be_read_are_reported(tmp_path: Path) -> None:
    tiny("qwen3_vl_moe", tmp_path)
    tensors = stored(tmp_path)
    del tensors["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        Damaged, match=r"the shape of model\.language_model\.layers\.1\.mlp\.experts\.gate_up_proj cannot be"
    ):
        import_hf(tmp_path)


def test_the_text_part_of_kimi_k25_is_a_kimi_k2(tmp_path: Path) -> None:
    """As released: transformers saves this type under names that nobody else reads."""
    whole, text = tmp_path / "whole", tmp_path / "text"
    theirs = their_model("kimi_k2", 0).float()
    save(theirs, text, "kimi_k2")
    copied(text, whole)
    renamed(whole, ("", "language_model."))
    tower = {"vision_tower.patch_embed.proj.weight": torch.randn(4, 3)}
    save_file({**stored(whole), **tower}, whole / "model.safetensors", metadata={"format": "pt"})

    def nest(config: dict[str, Any]) -> None:
        config["text_config"] = {key: config.pop(key) for key in [*config] if key != "transformers_version"}
        config |= {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "vision_config": {}}

    edit_config(whole, nest)
    assert import_hf(whole)[0] == import_hf(text)[0]
    tokens = TOKENS % import_hf(text)[0].vocab_size
    with torch.no_grad():
        ours = load_model(whole, torch.device("cpu"), torch.float32)(tokens)
        assert (ours - theirs(tokens).logits).abs().max() < 1e-4
    export_checkpoint(run_of(tmp_path / "run", whole), tmp_path / "out", dtype="fp32")
    assert stored(tmp_path / "out").keys() == stored(whole).keys()
    assert folder_spec(tmp_path / "out") == folder_spec(whole)


def test_the_released_flat_config_of_qwen2_vl_is_read_and_written(tmp_path: Path) -> None:
    theirs = tiny("qwen2_5_vl", tmp_path / "whole")
    nested = folder_spec(tmp_path / "whole")

    def flatten(config: dict[str, Any]) -> None:
        config.update({key: value for key, value in config.pop("text_config").items() if key != "model_type"})
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope["rope_theta"]
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]

    edit_config(tmp_path / "whole", flatten)
    assert folder_spec(tmp_path / "whole") == nested
    assert (ours_of(tmp_path / "whole") - theirs_of(theirs)).abs().max() < 1e-5
    export_checkpoint(run_of(tmp_path / "run", tmp_path / "whole"), tmp_path / "out", dtype="fp32")
    before, after = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("whole", "out"))
    assert {key for key in after if after[key] != before.get(key)} <= {"bos_token_id", "eos_token_id", "pad_token_id"}


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "own"])
def test_a_head_that_differs_is_the_head_whatever_config_json_says(head: str, said: bool, tmp_path: Path) -> None:
    tiny("mistral3", tmp_path / "whole")
    edit_config(tmp_path / "whole", lambda config: config.update(tie_word_embeddings=said))
    if head != "absent":
        tensors = stored(tmp_path / "whole")
        embedding = tensors["language_model.model.embed_tokens.weight"]
        tensors["language_model.lm_head.weight"] = embedding.clone() if head == "equal" else embedding + 1
        save_file(tensors, tmp_path / "whole" / "model.safetensors")
    tied = head == "absent" or (head == "equal" and said)
    assert import_hf(tmp_path / "whole")[0].tied == folder_spec(tmp_path / "whole")["tied"] == tied


def test_a_run_keeps_the_towers_and_gives_them_to_the_next(gemma: Path, tmp_path: Path) -> None:
    from meshwright.data.prepare import prepare

    make_tiny(tmp_path / "tiny")
    prepare([str(tmp_path / "tiny" / "source")], str(gemma), tmp_path / "corpus")
    file = tmp_path / "run.yaml"
    file.write_text(RUN_FILE.format(data=tmp_path / "corpus"))
    alone = ["cluster.gpus_per_node=1"]
    alone += dimensions(gemma)
    first = prepared(file, tmp_path / "runs", *alone, f"model.init=hf:{gemma}").folder
    kept = read_towers(first)
    assert kept is not None and set(kept.entries) == set(import_hf(gemma)[1].others)
    assert json.loads((first / "towers" / "preprocessor_config.json").read_text()) == {"do_resize": True}
    prepared(file, tmp_path / "runs", *alone, f"model.init=hf:{gemma}")  # again, as after an interruption
    import_checkpoint(gemma, tmp_path / "base")
    second = prepared(
        file, tmp_path / "runs", *alone, f"model.init=checkpoint:{tmp_path / 'base'}", "name=second"
    ).folder
    again = read_towers(second)
    assert again is not None and set(again.entries) == set(kept.entries)


def test_an_import_that_fails_anywhere_can_be_repeated_and_is_whole_then(gemma: Path, tmp_path: Path) -> None:
    """At any flush of the disk: nothing is left, or a checkpoint with its towers, tokenizer and chat template."""
    whole = import_into(tmp_path / "whole", gemma)
    flushes = count(lambda: import_checkpoint(gemma, tmp_path / "counted"), ("fsync",))
    for k in range(len(flushes)):

        def fail(call: int, *_: object, k: int = k) -> None:
            if call == k:
                raise OSError(28, "No space left on device")

        out = tmp_path / str(k)
        with intercept_calls(fail, ("fsync",)), pytest.raises(OSError, match="No space left"):
            import_checkpoint(gemma, out)
        if not (out / "checkpoints" / "step-00000000").exists():
            assert [path.name for path in out.iterdir()] == ["checkpoints"] and not any((out / "checkpoints").iterdir())
            import_checkpoint(gemma, out)
        assert names_in(out) == whole


def import_into(out: Path, source: Path) -> set[str]:
    import_checkpoint(source, out)
    return names_in(out)


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_towers_that_cannot_be_copied_leave_no_folder(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_checkpoint(gemma, tmp_path / "base")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "run").mkdir()
    for name in ("link", "fsync"):
        with monkeypatch.context() as full:
            full.setattr(os, name, fail)
            full.setattr(shutil, "copy2", fail)
            with pytest.raises(OSError, match="No space left"):
                copy_towers(tmp_path / "base", tmp_path / "run")
        assert [path.name for path in (tmp_path / "run").iterdir() if path.name.endswith(".partial")] == []


def dimensions(folder: Path) -> list[str]:
    """Overrides with the dimensions of a folder, which a run from a checkpoint gives."""
    return [f"model.{key}={json.dumps(value)}" for key, value in folder_spec(folder).items() if value is not None]


def test_the_command_writes_the_whole_model_or_the_text_model(gemma: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    imported = call("from-hf", gemma, tmp_path / "base")
    assert imported.exit_code == 0
    assert (
        "only the text model is used; 50 other tensors (2 of multi_modal_projector, 48 of vision_tower)"
        in imported.stderr
    )
    assert call("to-hf", tmp_path / "base", tmp_path / "whole", "--dtype", "fp32").exit_code == 0
    before, after = stored(gemma), stored(tmp_path / "whole")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name in ("preprocessor_config.json", "chat_template.json"):
        assert (tmp_path / "whole" / name).read_text() == (gemma / name).read_text()
    assert "AutoModelForImageTextToText" in (tmp_path / "whole" / "README.md").read_text()
    assert call("to-hf", tmp_path / "base", tmp_path / "text", "--text-only", "--dtype", "fp32").exit_code == 0
    loader: Any = AutoModelForCausalLM
    text, loading = loader.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert type(text).__name__ == "Gemma3ForCausalLM" and not any(loading.values())
    assert (theirs_of(text) - ours_of(gemma)).abs().max() < 1e-5
    assert call("from-hf", gemma, tmp_path / "bare", "--text-only").exit_code == 0
    assert read_towers(tmp_path / "bare") is None and not (tmp_path / "bare" / "towers").exists()


def test_adapters_are_merged_into_a_folder_of_the_whole_model(gemma: Path, tmp_path: Path) -> None:
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    low = {f"{layer}.lora_A.weight": torch.ones(2, 16), f"{layer}.lora_B.weight": torch.zeros(16, 2)}
    save_file(low, adapter / "adapter_model.safetensors")
    merge_adapter(gemma, adapter, tmp_path / "merged", dtype="fp32")
    before, after = stored(gemma), stored(tmp_path / "merged")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_engine_generates_from_such_a_folder_and_knows_its_ends_and_template(gemma: Path) -> None:
    prompt = TOKENS[0, :9].tolist()
    model = load_model(gemma, torch.device("cpu"), torch.float32)
    new = texts(engine_of(model, context=24), [prompt], new_tokens=8)[0]
    for position, token in enumerate(new):
        logits = model(torch.tensor([prompt + new[:position]]))
        assert logits[0, -1].argmax() == token
    files = read_model_files(gemma)
    assert files.chat_template == "{{ messages[0].content }}" and 2 in files.stop_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config["text_config"].update(model_type="llama4_text"),
            r"config\.json: text_config: model_type: 'llama4_text' has attention in chunks, and experts whose .*, which",
        ),
        (
            lambda config: config.update(architectures=["Gemma3ForCausalLM"]),
            r"architectures: expected one class that ends in ForConditionalGeneration, .* got \['Gemma3ForCausalLM'\]",
        ),
        (
            lambda config: config["text_config"].update(hidden_activation="relu"),
            r"config\.json: text_config: hidden_activation: expected 'gelu_pytorch_tanh', got 'relu'",
        ),
        (
            lambda config: config.update(quantization_config={"quant_method": "aqlm"}),
            r"quantization_config: quant_method: expected one of fp8, .*, or unquantized weights, got 'aqlm'",
        ),
    ],
    ids=["unknown text model", "class of a text model", "key of the text model", "quantised"],
)
def test_a_config_that_cannot_be_used_is_refused(change: Any, message: str, gemma: Path, tmp_path: Path) -> None:
    folder = copied(gemma, tmp_path / "folder")
    edit_config(folder, change)
    with pytest.raises(BadInput, match=message):
        import_hf(folder)


def test_an_export_of_a_quantised_folder_does_not_say_that_it_is_quantised(gemma: Path, tmp_path: Path) -> None:
    folder = copied(gemma, tmp_path / "folder")
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    edit_config(folder, lambda config: config.update(quantization_config=fp8))
    spec, _ = import_hf(folder)
    written = to_whole_config(json.loads((folder / "config.json").read_text()), spec)
    assert "quantization_config" not in written and "quantization_config" not in written["text_config"]


def test_tensors_that_do_not_fit_are_refused(gemma: Path, tmp_path: Path) -> None:
    for name, pair, message in (
        (
            "none",
            ("language_model.", "text."),
            "no text part among the tensors: expected language_model.model.embed_tokens",
        ),
        (
            "further",
            ("multi_modal_projector.mm_input_projection_weight", "language_model.model.layers.0.extra.weight"),
            r"tensor language_model.model.layers.0.extra.weight has no place in this gemma3_text model",
        ),
        (
            "missing",
            ("language_model.model.norm.", "other."),
            "no tensor language_model.model.norm.weight, which config",
        ),
    ):
        folder = copied(gemma, tmp_path / name)
        renamed(folder, pair)
        with pytest.raises((BadInput, Damaged), match=message):
            import_hf(folder)


def test_exports_without_what_they_need_are_refused_before_anything_is_written(gemma: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", gemma)
    config = run / "checkpoints" / "step-00000009" / "config.yaml"
    longer = copied(run, tmp_path / "longer")
    (longer / "towers" / "towers.safetensors").unlink()
    result = call("to-hf", longer, tmp_path / "out")
    assert isinstance(result.exception, Damaged) and "towers.safetensors: no such file" in str(result.exception)
    bare = copied(gemma, tmp_path / "bare")
    tensors = {name: tensor for name, tensor in stored(bare).items() if name.startswith("language_model.")}
    save_file(tensors, bare / "model.safetensors")
    assert import_hf(bare)[1].notes[-1].startswith("no tensors beside the text model")
    result = call("to-hf", run_of(tmp_path / "bare-run", bare), tmp_path / "out")
    assert isinstance(result.exception, BadInput) and "add --text-only" in str(result.exception)
    other = copied(run, tmp_path / "other")
    edit_config(other / "towers", lambda values: values["text_config"].update(sliding_window=9))
    result = call("to-hf", other, tmp_path / "out")
    assert isinstance(result.exception, BadInput)
    assert (
        "model.sliding_window: the folder that the run began with has a text part with 9, got 7; add --text-only"
        in str(result.exception)
    )
    assert config.exists() and not (tmp_path / "out").exists()


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in arguments])
