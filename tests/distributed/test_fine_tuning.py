"""The way of the page on fine-tuning with a tiny model: pretrained, SFT, adapters on top, merged, generated from."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.models.convert import export_adapter, export_checkpoint, merge_adapter
from meshwright.cli.generate import sample
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from tests.data.chats import turns, write_chats
from tests.distributed.pool import Pool
from tests.distributed.test_training import tiny, trained
from tests.training.tiny import ranks

__all__ = ["tiny"]

TEMPLATE = """{%for m in messages%}{{m.role}}: {%if m.role=='assistant'%}\
{%generation%}{{m.content}}<|endoftext|>{%endgeneration%}
{%else%}{{m.content}}; {%endif%}{%endfor%}{%if add_generation_prompt%}assistant: {%endif%}"""
SHORT = ["train.steps=50", "train.warmup_steps=5", "train.seq_len=32", "train.global_batch=8", "model.max_seq_len=32"]
WIDE = ["model.hidden=32", "model.ffn_hidden=64", "model.max_seq_len=32", "model.heads=4", "model.head_dim=8"]


def prepared_answers(folder: Path, base: Path, answers: dict[str, str]) -> Path:
    file = write_chats(folder.with_suffix(".jsonl"), [turns(*pair) for pair in answers.items()] * 16)
    prepare([str(file)], str(base), folder, chat=ChatRequest(), held_out=0.1)
    return folder


def answer(folder: Path, question: str, adapter: Path | None = None) -> str:
    (result,) = sample(folder, [question], tokens=8, temperature=0.0, top_k=0, seed=0, adapter=adapter, chat=True)
    return result["text"].strip()


def test_pretrained_tuned_adapted_merged_and_asked(pool: Pool, tiny: Path, tmp_path: Path) -> None:
    """Each stage learns answers that the one before does not give."""
    trained(pool, tiny, tmp_path, *ranks(1), *WIDE, "name=base")
    base, tuned, adapter, merged = (tmp_path / name for name in ("base-hf", "tuned-hf", "adapter", "merged"))
    export_checkpoint(tmp_path / "base", base, dtype="fp32")
    (base / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    first = prepared_answers(tmp_path / "first", base, {"fox": "jumps", "dog": "lazy"})
    data, folder = f"data.mix={first}", f"model.init=hf:{base}"
    (seen,) = trained(
        pool, tiny, tmp_path, *ranks(1), *WIDE, *SHORT, data, folder, "name=sft", "train.learning_rate=3e-2"
    )
    assert seen.validations[-1][1].loss < 0.1 < seen.losses[0]
    export_checkpoint(tmp_path / "sft", tuned, dtype="fp32")
    assert (
        (answer(tuned, "fox"), answer(tuned, "dog")) == ("jumps", "lazy") != (answer(base, "fox"), answer(base, "dog"))
    )

    second = prepared_answers(tmp_path / "second", tuned, {"fox": "lazy", "dog": "jumps"})
    lora = "model.adapter={rank: 8, alpha: 16, targets: [all-linear]}"
    data, folder = f"data.mix={second}", f"model.init=hf:{tuned}"
    trained(pool, tiny, tmp_path, *ranks(1), *WIDE, *SHORT, data, folder, lora, "name=lora", "train.learning_rate=5e-2")
    export_adapter(tmp_path / "lora", adapter)
    merge_adapter(tuned, adapter, merged, dtype="fp32")
    for folder_of_weights, beside in ((merged, None), (tuned, adapter), (tmp_path / "lora", None)):
        assert answer(folder_of_weights, "fox", beside) == "lazy", folder_of_weights
        assert answer(folder_of_weights, "dog", beside) == "jumps", folder_of_weights
