"""Hugging Face folders both ways, with transformers as the judge; and folders that are damaged, foreign or hostile."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.checkpoint.models.hf import export_hf, import_hf
from meshwright.data.text_format import derive
from meshwright.kernels.rope import rotary_tables
from meshwright.spec.errors import BadInput, Damaged, OutOfResources
from meshwright.spec.layout import shard_rows
from meshwright.spec.model import RopeScaling, parameters
from tests.models.tiny import GPT2, LLAMA, MIXTRAL, PARALLEL, QWEN2, QWEN3, QWEN3_MOE, SCALED, built, some_tokens

LLAMA3 = replace(LLAMA, rope_scaling=RopeScaling(factor=8.0, original_max_seq_len=64))
SPECS = {
    "llama": LLAMA,
    "llama3 scaling": LLAMA3,
    "llama tied, biased, scaled": SCALED,
    "qwen2 tied": QWEN2,
    "qwen2 sliding": replace(QWEN2, tied=False, sliding_window=37),
    "qwen3 tied": QWEN3,
    "qwen3 sliding": replace(QWEN3, tied=False, sliding_window=37),
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied=False),
    "mixtral": MIXTRAL,
    "qwen3 moe": QWEN3_MOE,
}
SEQ = 256


@pytest.fixture(scope="module", autouse=True)
def quiet_transformers():
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def export(model, folder, **options):
    weights = dict(model.named_parameters())
    export_hf(
        folder, model.spec, weights.__getitem__, **{"tokenizer": None, "run_note": "", "dtype": "fp32", **options}
    )


def loaded_by_transformers(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def filled_from(reader, spec, dtype=torch.float32):
    model = built(spec, dtype=dtype)
    with torch.no_grad():
        for parameter in parameters(spec):
            model.get_parameter(parameter.name).copy_(reader.read(parameter))
    return model


class Rotary(torch.nn.Module):
    """Our tables, checked against transformers' in fp32 elsewhere, in the fp64 that theirs never compute."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec

    def forward(self, x, position_ids, **kwargs):
        spec = self.spec
        tables = rotary_tables(position_ids, spec.head_dim, spec.rope_theta, spec.rope_scaling, torch.float64)
        return tuple(torch.cat((t, t), dim=-1)[:, :, 0] for t in tables)


@torch.no_grad()
def their_float64_logits(theirs, spec, tokens, monkeypatch):
    """transformers fixes fp32 for norms, softmax and rotary tables, whatever the model's dtype: lift that."""
    theirs = theirs.double()
    theirs.config._experts_implementation = "eager"  # theirs of stacked experts takes no fp64
    if spec.positions == "rope":
        theirs.model.rotary_emb = Rotary(spec)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "float32", torch.float64)
        patched.setattr(torch, "float", torch.float64)
        patched.setattr(torch.Tensor, "float", torch.Tensor.double)
        return theirs(tokens).logits


@pytest.mark.parametrize("model_name", list(SPECS))
def test_ours_exported_gives_the_same_logits_in_transformers(model_name, tmp_path, monkeypatch):
    spec = SPECS[model_name]
    tokens = some_tokens(spec, seq=SEQ)
    export(built(spec, dtype=torch.float32), tmp_path / "out")
    theirs, reader = loaded_by_transformers(tmp_path / "out"), import_hf(tmp_path / "out")[1]
    with torch.no_grad():
        assert (theirs(tokens).logits - filled_from(reader, spec)(tokens)).abs().max() < 1e-4
        exact = filled_from(reader, spec, torch.float64)(tokens)
    assert exact.dtype == torch.float64
    assert (their_float64_logits(theirs, spec, tokens, monkeypatch) - exact).abs().max() < 1e-11


def their_config(model_name):
    import transformers as t

    small = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "initializer_range": 0.1,
    }
    gated = {**small, "intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 300}
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "gpt2": lambda: t.GPT2Config(n_positions=300, **small),
        "llama": lambda: t.LlamaConfig(**gated),
        "llama biased": lambda: t.LlamaConfig(attention_bias=True, mlp_bias=True, **gated),
        "llama3": lambda: t.LlamaConfig(
            rope_parameters={**llama3, "original_max_position_embeddings": 50}, tie_word_embeddings=True, **gated
        ),
        "qwen3": lambda: t.Qwen3Config(head_dim=20, **gated),
        "qwen3 sliding": lambda: t.Qwen3Config(
            head_dim=20, use_sliding_window=True, sliding_window=33, max_window_layers=0, **gated
        ),
        "mixtral": lambda: t.MixtralConfig(num_local_experts=5, **gated),
        "qwen3 moe": lambda: t.Qwen3MoeConfig(
            num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0], **gated
        ),
    }[model_name]()


@pytest.mark.parametrize(
    "model_name", ["gpt2", "llama", "llama biased", "llama3", "qwen3", "qwen3 sliding", "mixtral", "qwen3 moe"]
)
def test_theirs_imported_gives_the_same_logits(model_name, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(their_config(model_name), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    spec, reader = import_hf(tmp_path)
    assert len(set(reader.files.values())) > 1
    tokens = some_tokens(spec, seq=SEQ)
    with torch.no_grad():
        assert (theirs(tokens).logits - filled_from(reader, spec)(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("spec", [LLAMA, GPT2, MIXTRAL], ids=["llama", "gpt2", "mixtral"])
def test_read_rows_equal_the_rows_of_the_full_tensor(spec, tmp_path):
    model = built(spec, dtype=torch.float32)
    export(model, tmp_path / "out", shard_bytes=40_000)
    _, reader = import_hf(tmp_path / "out")
    for parameter in parameters(spec):
        weight = model.get_parameter(parameter.name)
        for rank in range(3):
            rows = shard_rows(parameter.shape[0], 3, rank)
            assert torch.equal(reader.read_rows(parameter, rows.start, rows.stop), weight[rows.start : rows.stop])
        assert reader.read_rows(parameter, 5, 5).shape == (0, *parameter.shape[1:])


def test_shards_and_index_agree_with_each_other_and_with_one_file(tmp_path):
    model = built(LLAMA, dtype=torch.float32)
    export(model, tmp_path / "many", shard_bytes=50_000)
    export(model, tmp_path / "one")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    from_one_file, from_shards = load_file(tmp_path / "one" / "model.safetensors"), {}
    for file in files:
        shard = load_file(tmp_path / "many" / file)
        assert all(index["weight_map"][name] == file for name in shard)
        assert sum(t.nbytes for t in shard.values()) <= 50_000 or len(shard) == 1
        from_shards.update(shard)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in from_one_file.values())
    assert from_shards.keys() == from_one_file.keys() == index["weight_map"].keys()
    assert all(torch.equal(from_shards[name], from_one_file[name]) for name in from_one_file)
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}


def test_pairs_in_any_order_and_bfloat16(tmp_path):
    model = built(LLAMA, dtype=torch.float32)
    pairs = list(model.named_parameters())[::-1]
    export_hf(tmp_path / "out", LLAMA, iter(pairs), tokenizer=None, run_note="", dtype="bf16")
    _, reader = import_hf(tmp_path / "out")
    for parameter in parameters(LLAMA):
        assert torch.equal(reader.read(parameter), model.get_parameter(parameter.name).bfloat16())
    assert loaded_by_transformers(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["def answer(self):\n    return 'words and words'\n"] * 8, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("spec", [LLAMA, QWEN3, GPT2], ids=["llama", "qwen3", "gpt2"])
def test_the_whole_folder_loads(spec, tokenizer, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    spec = replace(spec, vocab_size=384)
    export(
        built(spec, dtype=torch.float32),
        tmp_path / "out",
        tokenizer=tokenizer,
        text=derive(tokenizer.parent, Tokenizer.from_file(str(tokenizer)), eos="<|end|>"),
        run_note="Trained on *words*.",
    )
    text = "def  words(x):\n\treturn é 'x'"
    exported, original = AutoTokenizer.from_pretrained(tmp_path / "out"), Tokenizer.from_file(str(tokenizer))
    assert exported(text)["input_ids"] == original.encode(text).ids
    assert exported.decode(original.encode(text).ids) == text
    assert exported.eos_token == "<|end|>"
    assert exported.eos_token_id == original.token_to_id("<|end|>")
    assert exported.model_max_length == spec.max_seq_len
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == exported.eos_token_id
    assert loaded_by_transformers(tmp_path / "out").config.eos_token_id == exported.eos_token_id
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Trained on *words*." in card
    assert "library_name: transformers" in card


def test_a_tokenizer_of_another_model_is_refused(tokenizer, tmp_path):
    with pytest.raises(BadInput, match=r"tokens, but model\.vocab_size is 131"):
        export(built(LLAMA), tmp_path / "out", tokenizer=tokenizer)
    model = built(replace(LLAMA, vocab_size=384))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(BadInput, match=r"broken\.json: not a tokenizer\.json"):
        export(model, tmp_path / "out", tokenizer=tmp_path / "broken.json")


def test_export_into_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    export(built(LLAMA), tmp_path / "out")
    with pytest.raises(BadInput, match="already there and not empty"):
        export(built(LLAMA), tmp_path / "out")
    with pytest.raises(BadInput, match="already there"):
        export(built(LLAMA), tmp_path / "out" / "config.json")


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "twice", "variant", "disk"])
def test_a_failed_export_leaves_nothing(fault, tmp_path, monkeypatch):
    weights = dict(built(LLAMA).named_parameters())
    pairs = list(weights.items())
    spec = PARALLEL if fault == "variant" else LLAMA
    if fault == "missing":
        pairs.pop(4)
    elif fault == "unknown":
        pairs.append(("head.bias", torch.zeros(3)))
    elif fault == "shape":
        pairs[0] = (pairs[0][0], pairs[0][1][:-1])
    elif fault == "twice":
        pairs.append(pairs[0])
    elif fault == "disk":
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    expected = {"missing": Damaged, "disk": OutOfResources}.get(fault, BadInput)
    with pytest.raises(expected):
        export_hf(tmp_path / "out", spec, pairs, tokenizer=None, run_note="")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path):
    export(built(LLAMA, dtype=torch.float32), tmp_path / "out", shard_bytes=50_000)
    return tmp_path / "out"


def second_file(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def rewrite(folder, change):
    """Put all tensors into one file after `change`."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named_with_its_nearest(folder):
    rewrite(folder, lambda t: t.update({"model.norms.weight": t.pop("model.norm.weight")}))
    with pytest.raises(Damaged, match=r"no tensor model\.norm\.weight.*nearest: model\.norms\.weight"):
        import_hf(folder)


def test_an_unexpected_tensor_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(BadInput, match=r"q_norm\.weight has no place in this llama model"):
        import_hf(folder)


def change_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("stored", ["equal", "other values", "another shape"])
def test_a_head_beside_a_tied_embedding_must_be_its_copy(folder, stored):
    def add_head(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        if stored == "other values":
            head[-1, -1] += 1
        tensors["lm_head.weight"] = head[:-1].clone() if stored == "another shape" else head

    rewrite(folder, add_head)
    change_config(folder, tie_word_embeddings=True)
    if stored == "equal":
        assert import_hf(folder)[0].tied
        return
    with pytest.raises(
        BadInput, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings"
    ):
        import_hf(folder)


def test_a_wrong_shape_is_named(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(Damaged, match=r"model\.norm\.weight: expected shape \(64,\).*got \(65,\)"):
        import_hf(folder)


def test_integers_are_no_weights(folder):
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(BadInput, match=r"model\.norm\.weight: expected one of F64, F32, F16, BF16, got I8"):
        import_hf(folder)


def test_leftovers_of_old_folders_are_passed_over(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert import_hf(folder)[0] == LLAMA


def test_gpt2_without_prefix_and_with_masks_is_read(tmp_path):
    model = built(GPT2, dtype=torch.float32)
    export(model, tmp_path / "out", shard_bytes=50_000)

    def as_openai(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()

    rewrite(tmp_path / "out", as_openai)
    _, reader = import_hf(tmp_path / "out")
    for parameter in parameters(GPT2):
        assert torch.equal(reader.read(parameter), model.get_parameter(parameter.name))


@pytest.mark.parametrize(
    "file", ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors", "a\\b.safetensors", "x.bin", 7]
)
def test_an_index_cannot_point_outside_the_folder(folder, file):
    index = folder / "model.safetensors.index.json"
    (folder.parent / "stolen.safetensors").write_bytes(second_file(folder).read_bytes())
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"model\.norm\.weight: expected the plain name"):
        import_hf(folder)


def test_an_absent_shard_is_named(folder):
    path = second_file(folder)
    path.unlink()
    with pytest.raises(Damaged, match=f"{path.name} is not there"):
        import_hf(folder)


@pytest.mark.parametrize("bytes_left", [4, 200, -1])
def test_a_truncated_shard_is_named(folder, bytes_left):
    path = second_file(folder)
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(Damaged, match=f"{path.name}: .*cannot be read"):
        import_hf(folder)


def test_a_shard_without_permission_is_named(folder, monkeypatch):
    path = second_file(folder)
    monkeypatch.setattr("os.access", lambda file, mode: Path(file).name != path.name)
    with pytest.raises(BadInput, match=f"{path.name}: permission denied"):
        import_hf(folder)


def test_pickled_weights_are_refused_without_reading_them(folder, monkeypatch):
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    monkeypatch.setattr("pickle.load", None)
    monkeypatch.setattr("pickle.loads", None)
    with pytest.raises(BadInput, match=r"pytorch_model\.bin is pickle"):
        import_hf(folder)


def test_dropout_in_a_foreign_config_is_noted(tmp_path):
    export(built(GPT2), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "attn_pdrop": 0.1}))
    assert "attn_pdrop 0.1 is not used" in import_hf(tmp_path / "out")[1].notes[0]
