"""Chat data: which tokens are trained on, with transformers as the judge, and what is stored and read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from meshwright.cli import data as data_command
from meshwright.data import shards
from meshwright.data.chat_template import copy_chat_files
from meshwright.data.indexed import IndexedFile
from meshwright.data.loader import Windows
from meshwright.data.manifest import Manifest, open_directory, verify
from meshwright.data.prepare import prepare
from meshwright.data.request import ChatRequest
from meshwright.data.show import show_step
from meshwright.data.source import open_data
from meshwright.data.token_weights import WeightFile, encode_weights, weight_path
from meshwright.spec.errors import BadInput, Damaged
from meshwright.spec.job import DataSpec
from tests.data.chats import (
    CHATML,
    CHATS,
    FORGETTING,
    TEMPLATES,
    TOOL_CALL,
    TOOLS,
    WITHOUT_HEADER,
    byte_level,
    marked,
    plain,
    sentence_piece,
    turns,
    write_chats,
    write_tokenizer,
)
from tests.data.test_prepare import Killed, contents

RUNNER = CliRunner()


def documents(folder: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and weights of every stored document."""
    stored = []
    for shard in open_directory(folder).shards:
        for span in shard.file.document_spans(0, shard.file.tokens):
            assert shard.weights is not None
            stored.append(
                (shard.file.read(span.start, span.stop).tolist(), shard.weights.read(span.start, span.stop).tolist())
            )
    return stored


def prepared_chats(tmp_path: Path, template: str | None, chats: list[Any], **options: Any) -> Path:
    tokenizer = options.pop("tokenizer", None)
    folder = write_tokenizer(tmp_path / "model", template, tokenizer)
    roles = options.pop("roles", ("assistant",))
    file = write_chats(tmp_path / "chats.jsonl", chats)
    options = {"on_bad": "refuse", "chat": ChatRequest(roles), **options}
    prepare([str(file)], str(folder), tmp_path / "out", **options)
    return tmp_path / "out"


def judged(folder: Path, template: str, messages: Any, tools: Any = None) -> tuple[list[int], list[bool]]:
    """Tokens and mask by transformers, for a template with generation blocks."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_text())
    theirs: Any = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=config["bos_token"], eos_token=config["eos_token"]
    )
    answer = theirs.apply_chat_template(
        messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return answer["input_ids"], [bool(bit) for bit in answer["assistant_masks"]]


@pytest.mark.parametrize("form", [plain, marked])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path, name: str, form: Any) -> None:
    template = TEMPLATES[name]
    stored = documents(prepared_chats(tmp_path, form(template), CHATS[:3]))
    assert stored == [judged(tmp_path / "model", marked(template), chat) for chat in CHATS[:3]]
    assert all(any(mask) and not all(mask) for _, mask in stored)


@pytest.mark.parametrize("form", [plain, marked])
def test_tokenizers_that_change_the_beginning_of_a_text(tmp_path: Path, form: Any) -> None:
    template, chats = TEMPLATES["instruct"], CHATS[:1]
    stored = documents(prepared_chats(tmp_path, form(template), chats, tokenizer=sentence_piece()))
    assert stored == [judged(tmp_path / "model", marked(template), chat) for chat in chats]


@pytest.mark.parametrize("form", [plain, marked])
def test_tools_and_calls_of_them(tmp_path: Path, form: Any) -> None:
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "3."}]},
    ]
    out = prepared_chats(tmp_path, form(CHATML), [{"id": "sum", "messages": messages, "tools": TOOLS}])
    messages[3]["content"] = "It is 3."
    assert documents(out) == [judged(tmp_path / "model", marked(CHATML), messages, TOOLS)]
    text = byte_level().decode(trained_ids(*documents(out)[0]), skip_special_tokens=False)
    assert text == f"<tool_call>{json.dumps(TOOL_CALL['function'], ensure_ascii=False)}<|im_end|>It is 3.<|im_end|>"


def trained_ids(tokens: list[int], mask: list[bool]) -> list[int]:
    return [token for token, trained in zip(tokens, mask, strict=True) if trained]


@pytest.mark.parametrize("form", [plain, marked])
def test_a_token_across_the_header_is_divided(tmp_path: Path, form: Any) -> None:
    """As in serving, where the prompt with the header is encoded before the answer."""
    tokenizer = byte_level(merges_newlines=True)
    header, answer = "<|im_start|>assistant\n", "\n\nC\n\n<|im_end|>"
    assert tokenizer.encode(header + answer).ids != tokenizer.encode(header).ids + tokenizer.encode(answer).ids
    (stored,) = documents(prepared_chats(tmp_path, form(CHATML), CHATS[3:], tokenizer=tokenizer))
    assert trained_ids(*stored) == tokenizer.encode(answer).ids
    first = stored[1].index(True)
    assert stored[0][:first] == tokenizer.encode(f"<|im_start|>user\nA\n\nB<|im_end|>\n{header}").ids


@pytest.mark.parametrize("form", [plain, marked])
def test_other_roles(tmp_path: Path, form: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *turns("Why?", "So.")]
    out = prepared_chats(tmp_path, form(CHATML), [chat], roles=("assistant", "user"))
    text = byte_level().decode(trained_ids(*documents(out)[0]), skip_special_tokens=False)
    assert text == "Why?<|im_end|>So.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (FORGETTING, "messages[1]: the template does not write its content once and as it is"),
        (WITHOUT_HEADER, "messages[1]: add_generation_prompt does not add the header"),
        (CHATML.replace("assistant\n' }}", "model\n' }}"), "does not write what precedes the answer"),
        (CHATML.replace("message.content or ''", "message.content[:4]"), "messages[1] is written otherwise"),
    ],
    ids=["forgets", "no header", "another header", "cuts contents"],
)
def test_templates_without_certain_masks_are_refused(tmp_path: Path, template: str, words: str) -> None:
    chats = [turns("a", "b"), turns("first", "second", "third", "fourth")]
    with pytest.raises(BadInput) as error:
        prepared_chats(tmp_path, plain(template), chats, on_bad="skip")
    assert words in str(error.value) and f"{tmp_path}/chats.jsonl:" in str(error.value)
    assert not [path for path in contents(tmp_path / "out") if path.endswith(".bin")]


def test_a_forgetting_template_is_exact_with_generation_blocks(tmp_path: Path) -> None:
    chat = turns("first", "second", "third", "fourth")
    (stored,) = documents(prepared_chats(tmp_path, marked(FORGETTING), [chat]))
    text = byte_level().decode(trained_ids(*stored), skip_special_tokens=False)
    assert text == "(older)<|im_end|>fourth<|im_end|>"


BAD_LINES = [
    ("{", "not JSON"),
    ('{"message": []}', "nearest: 'message'"),
    ('{"messages": "Hi"}', "messages: expected a list of messages"),
    ('{"messages": [{"content": "Hi"}]}', "messages[0]: expected an object with a role"),
    ('{"messages": [{"role": "user", "content": 7}]}', "messages[0].content: expected text"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "messages[0].content: expected text"),
    ('{"messages": [{"role": "user", "content": "Hi"}]}', "nothing to train on: no text of role assistant"),
    ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "half of a surrogate pair"),
    ('{"messages": [{"role": "user", "content": "refuse"}]}', "refuses the messages: never"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "tools": {}}', None),
    ('{"messages": [{"role": "assistant", "content": "a"}], "tools": {"a": 1}}', "tools: expected a list"),
]


def test_bad_lines_are_named_by_file_and_line(tmp_path: Path) -> None:
    refusing = "{% if messages[0].content == 'refuse' %}{{ raise_exception('never') }}{% endif %}"
    folder = write_tokenizer(tmp_path / "model", refusing + marked(CHATML))
    file = write_chats(tmp_path / "chats.jsonl", CHATS)
    with file.open("a") as lines:
        lines.writelines(line + "\n" for line, _ in BAD_LINES)
    expected = [(number, words) for number, (_, words) in enumerate(BAD_LINES, len(CHATS) + 1) if words]
    result = prepare([str(file)], str(folder), tmp_path / "out", chat=ChatRequest())
    assert result.manifests["train"].documents == len(CHATS) + 1
    for bad, (number, words) in zip(result.left_out.bad.first, expected, strict=True):
        assert bad.startswith(f"{file}:{number}: ") and words in bad
    with pytest.raises(BadInput, match=f"{len(expected)} bad documents:"):
        prepare([str(file)], str(folder), tmp_path / "none", chat=ChatRequest(), on_bad="refuse")


def test_what_a_request_cannot_be(tmp_path: Path) -> None:
    file = str(write_chats(tmp_path / "chats.jsonl", CHATS))
    folder, bare = write_tokenizer(tmp_path / "model", marked(CHATML)), write_tokenizer(tmp_path / "bare", None)
    for inputs, tokenizer, chat, words in [
        ([file], "train:300", ChatRequest(), "chats need the folder of a model"),
        ([file], str(bare), ChatRequest(), "has no chat template"),
        ([file], str(folder), ChatRequest(("",)), "expected roles with commas"),
        ([str(folder / "chat_template.jinja")], str(folder), ChatRequest(), "chats are read from .jsonl"),
        ([file], str(folder), ChatRequest(template=tmp_path / "absent"), "cannot be read"),
    ]:
        with pytest.raises(BadInput, match=words):
            prepare(inputs, tokenizer, tmp_path / "out", chat=chat)
    prepare([file], str(folder), tmp_path / "out", chat=ChatRequest())
    with pytest.raises(BadInput, match="train_roles"):
        prepare([file], str(folder), tmp_path / "out", chat=ChatRequest(("user",)))
    with pytest.raises(BadInput, match="different command"):
        prepare([file], str(folder), tmp_path / "out", text_key="messages")


def test_a_killed_preparation_continues_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = write_tokenizer(tmp_path / "model", plain(CHATML)), write_chats(tmp_path / "c.jsonl", CHATS * 10)
    arguments: dict[str, Any] = {"shard_tokens": 400, "held_out": 0.2, "chat": ChatRequest()}
    prepare([str(file)], str(folder), tmp_path / "whole", workers=2, **arguments)
    finish, count = shards.SplitWriter.finish_shard, iter(range(100))

    def killed(self: shards.SplitWriter) -> None:
        if next(count) == 3:
            raise Killed
        finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(shards.SplitWriter, "finish_shard", killed)
        with pytest.raises(Killed):
            prepare([str(file)], str(folder), tmp_path / "killed", workers=1, **arguments)
    prepare([str(file)], str(folder), tmp_path / "killed", workers=1, **arguments)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert "train/chat_template.jinja" in contents(tmp_path / "whole")
    assert prepare([str(file)], str(folder), tmp_path / "whole", **arguments).reused


def test_masks_belong_to_the_digest_and_are_verified(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, marked(CHATML), CHATS)
    manifest = json.loads((out / "manifest.json").read_text())
    assert Manifest.read(out).request["chat"]["train_roles"] == ["assistant"]
    before = open_directory(out).content_digest
    (shard,) = manifest["shards"]
    path = out / "shard-00000.mask"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    (fault,) = verify(out)
    assert "shard-00000.mask: expected digest" in fault
    shard["digest"]["mask"] = "0" * 32
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert open_directory(out).content_digest != before
    path.write_bytes(content[:-1])
    with pytest.raises(Damaged, match=r"shard-00000.mask: expected \d+ bytes"):
        open_directory(out)
    path.unlink()
    with pytest.raises(Damaged, match=r"shard-00000.mask: expected \d+ bytes .* found no file"):
        open_directory(out)


def test_a_mask_is_read_from_any_token_to_any_other(tmp_path: Path) -> None:
    mask = np.random.default_rng(0).random(53) < 0.5
    kind, content = encode_weights([mask[:20], mask[20:21], mask[21:]])
    weight_path(tmp_path / "shard", kind).write_bytes(content)
    file = WeightFile(tmp_path / "shard", 53, kind)
    for start in range(54):
        for stop in range(start, 54):
            assert file.read(start, stop).tolist() == mask[start:stop].tolist()


def test_show_displays_the_mask(tmp_path: Path) -> None:
    folder, file = write_tokenizer(tmp_path / "model", plain(CHATML)), write_chats(tmp_path / "chats.jsonl", CHATS)
    command = ["prepare", str(file), "--tokenizer", str(folder), "--chat", "--out", str(tmp_path / "out")]
    answer = RUNNER.invoke(data_command.app, command)
    assert answer.exit_code == 0, answer.output
    show = ["show", str(tmp_path / "out"), "--step", "1", "--seq-len", "36", "--global-batch", "12", "--text"]
    shown = json.loads(RUNNER.invoke(data_command.app, [*show, "--json"]).output)
    stored = [list(zip(*document, strict=True)) for document in documents(tmp_path / "out")]
    tokenizer: Tokenizer = byte_level()
    long = [document for document in stored if len(document) > 37]
    left_out = [document for document in long if not any(bit for _, bit in document[:37])]
    lost = sum(len(document) - (0 if document in left_out else 37) for document in long)
    packing = shown["packing"][str(tmp_path / "out")]
    assert 0.5 < packing.pop("fill") < 1
    assert packing == {
        "conversations": len(CHATS) - len(left_out),
        "sequences": 3,
        "truncated": len(long) - len(left_out),
        "left_out": len(left_out),
        "lost_tokens": lost,
        "what": "conversations",
    }
    assert len(long) > len(left_out) > 0
    for sample in shown["samples"]:
        part = [pair for text in sample["documents"] for pair in stored[text["id"] - 1][text["start"] : text["end"]]]
        assert sample["tokens"] == len(part) <= 36
        in_ranges = {token for start, stop in sample["trained"] for token in range(start, stop)}
        assert in_ranges == {number for number, (_, bit) in enumerate(part) if bit}
        for trained in (True, False):
            words = "".join(piece["text"] for piece in sample["parts"] if piece["trained"] == trained)
            ids = [token for token, bit in part if bit == trained]
            if "�" not in sample["text"]:
                assert words == tokenizer.decode(ids, skip_special_tokens=False)
    assert any(sample["trained"] for sample in shown["samples"])
    lines = RUNNER.invoke(data_command.app, show).output
    assert "tokens are trained on, between « and »" in lines and "<|im_end|>»" in lines
    assert "1 more are left out, as" in lines and f"{lost:,} tokens are not read" in lines


def test_show_says_which_token_is_predicted_at_the_end_of_a_full_sequence(tmp_path: Path) -> None:
    out = prepared_chats(tmp_path, plain(CHATML), CHATS[:1])
    ((_tokens, trained),) = documents(out)
    end = max(number for number, weight in enumerate(trained) if weight) + 1
    for seq_len, predicted in ((end - 1, "<|im_end|>"), (end, None), (end + 9, None)):
        source = open_data(DataSpec(mix={str(out): 1.0}), seq_len=seq_len, seed=0)
        (sample,) = show_step(source, 1, 1, text=True)["samples"]
        assert sample.get("predicted") == predicted
        assert sample["text"].endswith("<|im_end|>") is (seq_len == end)
    command = ["show", str(out), "--step", "1", "--seq-len", str(end - 1), "--global-batch", "1", "--text"]
    lines = RUNNER.invoke(data_command.app, command).output
    assert lines.endswith("  the sequence ends here; the next token is trained on too: «<|im_end|>»\n")


def test_chats_and_texts_in_one_mixture(tmp_path: Path) -> None:
    out, seq = prepared_chats(tmp_path, marked(CHATML), CHATS * 2), 40
    text = tmp_path / "text.txt"
    text.write_text("A text without any chat. " * 40)
    prepare([str(text)], str(tmp_path / "model"), tmp_path / "text")
    source = open_data(DataSpec(mix={str(out): 0.5, str(tmp_path / "text"): 0.5}), seq_len=seq, seed=0)
    assert source.tokenizer_file == out / "tokenizer.json"
    shares = {}
    for index in range(24):
        name = source.describe(index)["source"]
        targets = source.samples([index]).targets
        shares.setdefault(name, []).append(float((targets >= 0).mean()))
        assert ("trained" in source.describe(index)) == (name == str(out))
    assert set(shares[str(tmp_path / "text")]) == {1.0} and min(shares[str(out)]) < 1
    assert IndexedFile(out / "shard-00000").tokens == source.sources[str(out)].tokens


def trained_text(tmp_path: Path, template: str, lines: list[Any], **options: Any) -> str:
    """The text that is trained on of the only chat."""
    (stored,) = documents(prepared_chats(tmp_path, template, lines, **options))
    return byte_level().decode(trained_ids(*stored), skip_special_tokens=False)


@pytest.mark.parametrize("form", [plain, marked])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}])
def test_answers_of_weight_0_are_not_trained_on(tmp_path: Path, form: Any, mark: dict[str, Any]) -> None:
    first, second = turns("a", "first", "b", "second")[::2], turns("a", "first", "b", "second")[1::2]
    chat = [first[0], {**second[0], **mark}, first[1], {**second[1], "weight": 1, "train": True}]
    assert trained_text(tmp_path, form(CHATML), [chat]) == "second<|im_end|>"
    template = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert "weight" not in template
    assert (
        documents(tmp_path / "out")[0][0]
        == judged(tmp_path / "model", marked(CHATML), turns("a", "first", "b", "second"))[0]
    )


def test_a_weight_finds_its_message_where_an_answer_has_several_blocks(tmp_path: Path) -> None:
    blocks = CHATML.replace("BEGIN{{- message.content or '' }}", "BEGIN{{- message.content or '' }}ENDBEGIN")
    chat = turns("a", "first", "b", "second")
    chat[1]["weight"] = 0
    assert trained_text(tmp_path, marked(blocks), [chat]) == "second<|im_end|>"


@pytest.mark.parametrize("form", [plain, marked])
def test_weights_of_messages_and_chats_multiply(tmp_path: Path, form: Any) -> None:
    """They are stored for each token, as float32; a shard of weights 0 and 1 alone keeps its mask."""
    chat = turns("a", "first", "b", "second", "c", "third")
    chat[1]["weight"], chat[3]["train"], chat[5]["weight"] = 0.3, False, 2
    lines = [{"messages": chat, "weight": 0.5}, {"messages": turns("d", "fourth"), "weight": None}]
    out = prepared_chats(tmp_path, form(CHATML), lines)
    decode = byte_level().decode
    found: list[dict[float, str]] = []
    for tokens, weights in documents(out):
        by_weight: dict[float, list[int]] = {}
        for token, weight in zip(tokens, weights, strict=True):
            by_weight.setdefault(weight, []).append(token)
        texts = {weight: decode(ids, skip_special_tokens=False) for weight, ids in by_weight.items() if weight}
        found.append(texts)
    end = "<|im_end|>"
    assert found == [{float(np.float32(0.15)): f"first{end}", 1.0: f"third{end}"}, {1.0: f"fourth{end}"}]
    assert not (out / "shard-00000.mask").exists() and not verify(out)
    assert Manifest.read(out).masked


def test_batches_of_weights(tmp_path: Path) -> None:
    """Each target has the weight of its token; those of text beside it have 1, and what fills a window 0."""
    chat = turns("a", "first", "b", "second")
    chat[3]["weight"] = 0.5
    out, seq = prepared_chats(tmp_path, marked(CHATML), [chat, *CHATS]), 120
    text = tmp_path / "text.txt"
    text.write_text("A text without any chat. " * 40)
    prepare([str(text)], str(tmp_path / "model"), tmp_path / "text")
    source = open_data(DataSpec(mix={str(out): 0.5, str(tmp_path / "text"): 0.5}), seq_len=seq, seed=0)
    seen = set()
    for index in range(24):
        batch = source.samples([index])
        assert batch.weights is not None and batch.weights.dtype == np.float32 and batch.weights.shape == (1, seq)
        assert ((batch.weights != 0) == (batch.targets >= 0)).all()
        described = source.describe(index)
        if described["source"] == str(out):
            stated = np.zeros(seq + 1)
            for (start, stop), weight in zip(described["trained"], described["weights"], strict=True):
                stated[start:stop] = weight
            assert (batch.weights[0, : described["tokens"] - 1] == stated[1 : described["tokens"]]).all()
        seen |= {*batch.weights.ravel().tolist()}
    assert seen == {0.0, 0.5, 1.0}
    (micro,) = Windows(source, global_batch=8, data_rank=0, data_ranks=1, micro_batch=8).read(0).micro_batches
    assert micro.weights is not None and micro.valid_tokens == int(micro.weights.count_nonzero())
    assert micro.weights.tolist() == source.samples(range(8)).weights.tolist()
    shown = show_step(source, 1, 8, text=True)
    assert {
        part["weight"] for sample in shown["samples"] for part in sample.get("parts", ()) if part["trained"]
    } <= seen
    # Masks alone give batches without weights, as before.
    bits = prepared_chats(tmp_path / "bits", marked(CHATML), CHATS)
    assert open_data(DataSpec(mix={str(bits): 1.0}), seq_len=seq, seed=0).samples([0]).weights is None


def test_a_span_of_answers_of_several_weights_is_refused(tmp_path: Path) -> None:
    one = "{%generation%}{%for m in messages%}{{m.content}}<|im_end|>{%endfor%}{%endgeneration%}"
    chat = turns("a", "first", "b", "second")
    chat[1]["weight"] = 0.5
    with pytest.raises(
        BadInput, match="answers of different weights in one generation block|does not show which tokens"
    ):
        prepared_chats(tmp_path, one, [chat])


def test_weights_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", marked(CHATML))
    for message, words in [
        (
            {"weight": -0.5},
            r"messages\[1\].weight: expected no negative weight, got -0.5; data cannot train a model away",
        ),
        ({"weight": 1e9}, r"messages\[1\].weight: expected 0, or a number from 1e-06 to 1,000,000, got 1000000000.0"),
        ({"weight": float("nan")}, r"messages\[1\].weight: expected 0, or a number from 1e-06 to 1,000,000, got NaN"),
        ({"weight": "1"}, r"messages\[1\].weight: expected 0, or a number from 1e-06 to 1,000,000, got \"1\""),
        ({"weight": True}, r"messages\[1\].weight: expected 0, or a number from 1e-06 to 1,000,000, got true"),
        ({"train": 1}, r"messages\[1\].train: expected true or false, got 1"),
        ({"train": True, "weight": 0}, r"messages\[1\]: weight and train contradict each other"),
        ({"wieght": 0}, r"messages\[1\].wieght: unknown key \(nearest: 'weight'\); known: role, content, name"),
        ({"reasoning": "hm"}, r"messages\[1\].reasoning: unknown key; known: role"),
    ]:
        chat = turns("a", "b")
        chat[1].update(message)
        file = write_chats(tmp_path / "chats.jsonl", [chat])
        with pytest.raises(BadInput, match=words):
            prepare([str(file)], str(folder), tmp_path / "out", chat=ChatRequest(), on_bad="refuse")
    user = turns("a", "b")
    user[0]["weight"] = 1
    for line, words in [
        ({"messages": user}, "to train on role user, name it in --train-roles"),
        (
            {"messages": turns("a", "b"), "tool": TOOLS},
            r"tool: unknown key \(nearest: 'tools'\); a chat has 'messages'",
        ),
        ({"messages": turns("a", "b"), "functions": TOOLS}, "functions: unknown key; a chat has"),
        ({"messages": turns("a", "b"), "weight": -1}, r": weight: expected no negative weight, got -1; data cannot"),
        ({"messages": turns("a", "b"), "weight": 0}, r"nothing to train on: the weight of each is 0"),
    ]:
        file = write_chats(tmp_path / "chats.jsonl", [line])
        with pytest.raises(BadInput, match=words):
            prepare([str(file)], str(folder), tmp_path / "out", chat=ChatRequest(), on_bad="refuse")


def test_a_key_that_the_template_reads_is_no_unknown_one(tmp_path: Path) -> None:
    template = marked(CHATML).replace("{{- message.content or '' }}", "{{- message.thought ~ message.content }}")
    chat = turns("a", "b")
    chat[1]["thought"] = "Hm. "
    assert trained_text(tmp_path, template, [chat]) == "Hm. b<|im_end|>"


def test_calls_and_tools_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", marked(TEMPLATES["headers"]))
    calls = [*turns("a"), {"role": "assistant", "content": "b", "tool_calls": [TOOL_CALL]}]
    for line, words in [
        ({"messages": calls}, r"messages\[1\].tool_calls: the chat template of .* does not write them"),
        ({"messages": turns("a", "b"), "tools": TOOLS}, "tools: the chat template of .* does not write them"),
    ]:
        file = write_chats(tmp_path / "chats.jsonl", [line])
        with pytest.raises(BadInput, match=words):
            prepare([str(file)], str(folder), tmp_path / "out", chat=ChatRequest(), on_bad="refuse")


@pytest.mark.parametrize("where", ["configuration", "folder"])
def test_chats_with_tools_take_the_template_for_them(tmp_path: Path, where: str) -> None:
    tools_template = marked(CHATML.replace("<|im_start|>system", "<|im_start|>tools"))
    folder = write_tokenizer(tmp_path / "model", None)
    if where == "folder":
        (folder / "chat_template.jinja").write_text(marked(TEMPLATES["headers"]))
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools_template)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        templates = {"default": marked(TEMPLATES["headers"]), "tool_use": tools_template}
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    file = write_chats(tmp_path / "chats.jsonl", [{"messages": turns("a", "b"), "tools": TOOLS}, turns("c", "d")])
    prepare([str(file)], str(folder), tmp_path / "out", chat=ChatRequest(), on_bad="refuse")
    texts = [byte_level().decode(tokens, skip_special_tokens=False) for tokens, _ in documents(tmp_path / "out")]
    assert texts[0].startswith("<|im_start|>tools\n[") and texts[1].startswith("<s><|header|>user")
    copy_chat_files(tmp_path / "out", tmp_path / "model2")
    assert (tmp_path / "model2" / "additional_chat_templates" / "tool_use.jinja").read_text() == tools_template
    assert verify(tmp_path / "out") == []


def test_a_null_content_is_no_text(tmp_path: Path) -> None:
    printing = marked(CHATML).replace(
        "{{- message.content or '' }}", "{{- message.content }}{{- 'a' ~ message.content }}"
    )
    testing = "{%- if message.content is none and message.content == none %}{{- 'called' }}{%- endif %}"
    chat = [*turns("a"), {"role": "assistant", "content": None, "name": None, "tool_calls": [TOOL_CALL]}]
    text = trained_text(tmp_path, printing.replace("{{- 'a' ~", testing + "{{- 'a' ~"), [chat])
    assert text.startswith("calleda<tool_call>") and "None" not in text


def test_chats_in_parquet_and_arrays(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    folder = write_tokenizer(tmp_path / "model", marked(CHATML))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = [*turns("1 + 2?"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    lines = [{"messages": turns("a", "b"), "tools": ""}, {"messages": called, "tools": json.dumps(TOOLS)}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**line, "score": 1.5} for line in lines]), tmp_path / "c.parquet"
    )
    (tmp_path / "c.json").write_text(json.dumps([{**line, "tools": line["tools"] and TOOLS} for line in lines]))
    stored = []
    for name in ("c.parquet", "c.json"):
        prepare([str(tmp_path / name)], str(folder), tmp_path / f"out-{name}", chat=ChatRequest(), on_bad="refuse")
        stored.append(documents(tmp_path / f"out-{name}"))
    assert stored[0] == stored[1] and len(stored[0]) == 2
    assert "tool_call" in byte_level().decode(stored[0][1][0], skip_special_tokens=False)


def test_other_files_beside_chats_are_counted(tmp_path: Path) -> None:
    folder, chats = write_tokenizer(tmp_path / "model", marked(CHATML)), tmp_path / "chats"
    chats.mkdir()
    write_chats(chats / "chats.jsonl", CHATS)
    (chats / "README.md").write_text("Chats")
    result = prepare([str(chats)], str(folder), tmp_path / "out", chat=ChatRequest())
    assert result.manifests["train"].not_read == {"format not read": {"files": 1, "bytes": 5}}
