"""Small files with one byte changed are read as before or refused with a documented code: none ends as an internal error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.format.verify import verify as verify_checkpoint
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.write.attempt import Provenance, SaveAttempt, new_attempt
from meshwright.config.load import load_run
from meshwright.data.chat import read_chat_files
from meshwright.data.manifest import verify
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.source import open_data
from meshwright.data.vocabulary import read_vocabulary
from meshwright.durable.lease import read_lease, take_lease
from meshwright.families.folder import folder_fields
from meshwright.server.model_files import read_model_files
from meshwright.spec.job import DataSpec
from tests.data.chats import CHATML, CHATS, marked, write_chats, write_tokenizer
from tests.flips import PLACES, Case, assert_no_internal_error

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 500,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
    "num_nextn_predict_layers": 1,
}


def read_samples(out: Path, packing: str = "stream") -> None:
    spec = DataSpec(mix={str(out): 1.0}, document_mask=True, packing=packing)  # type: ignore[arg-type]
    source = open_data(spec, seq_len=16 if out.name == "texts" else 256, seed=1, vocab_size=600)
    for index in range(2):
        source.samples([index])
        source.describe(index)
    source.begin_step([0])


def hugging_face(folder: Path) -> list[Case]:
    write_tokenizer(folder, marked(CHATML))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2], "temperature": 0.5, "top_k": 20}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "model_max_length": 1' + "0" * 30 + "}")

    def read() -> None:
        folder_fields(folder)
        read_model_files(folder)
        read_vocabulary(folder)
        read_chat_files(folder, None)

    return [(file, read) for file in sorted(folder.iterdir()) if file.is_file()]


def corpus(folder: Path) -> list[Case]:
    model = write_tokenizer(folder / "model", marked(CHATML))
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": f"text {n} " * (n + 1)}) + "\n" for n in range(12)))
    write_chats(folder / "c.jsonl", CHATS)
    texts, chats = folder / "texts", folder / "chats"
    prepare([str(folder / "a.jsonl")], str(model), texts)
    prepare([str(folder / "c.jsonl")], str(model), chats, chat=ChatRequest())
    cases: list[Case] = []
    for out in (texts, chats):
        cases += [
            (file, lambda out=out: (read_samples(out), verify(out)))
            for file in sorted(out.iterdir())
            if file.suffix in (".json", ".jsonl", ".idx", ".mask", ".weights") and file.name != "tokenizer.json"
        ]
    return [*cases, (texts / "shard-00000.idx", lambda: read_samples(texts, "none"))]


def run_folder(folder: Path) -> list[Case]:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    lease = take_lease(folder)
    attempt = SaveAttempt(checkpoints, 1, new_attempt(lease), lease)
    attempt.create()
    attempt.commit({}, {}, encode_plain({"step": 1, "samples": 4}, {"config.yaml": "name: a\n"}), Provenance(1, "any"))
    cases: list[Case] = [
        (file, lambda: (verify_checkpoint(attempt.target), CheckpointStore(checkpoints, lease=lease).load_newest({})))
        for file in sorted(attempt.target.iterdir())
    ]
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "model": "llama-nano",
                "name": "a",
                "train": {"steps": 4, "seq_len": 64, "global_batch": 4},
                "cluster": {"gpu": "cpu"},
            }
        )
    )
    return [
        *cases,
        (folder / "lease.json", lambda: read_lease(folder)),
        (folder / "run.yaml", lambda: load_run(folder / "run.yaml", [])),
    ]


MAKERS = {"hugging_face": hugging_face, "corpus": corpus, "run_folder": run_folder}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.timeout(900)
def test_a_changed_byte_is_no_internal_error(tmp_path: Path, make: str, places: int) -> None:
    assert_no_internal_error(MAKERS[make](tmp_path / "made"), places)
