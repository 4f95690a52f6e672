"""Keys that clients send: what a request becomes, defaults of the model, and grammars by vLLM's keys."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from meshwright.server.bad_words import word_tokens
from meshwright.server.errors import RequestError
from meshwright.server.model_files import ModelFiles, read_model_files
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.server.text_request import CheckedTextRequest
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import ServeSpec
from tests.server.chat_templates import QWEN3
from tests.server.helpers import JSON, NAME, SIZES, Answer, RunningServer, byte_tokenizer, call, running_server

ASK = {"messages": [{"role": "user", "content": "a"}]}
SPEC = ServeSpec(**SIZES)
needs_grammar = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")


@pytest.fixture(scope="module")
def files(folder: Path) -> ModelFiles:
    return read_model_files(folder)


@pytest.fixture(scope="module")
def reader(files: ModelFiles) -> RequestReader:
    return reader_of(files)


def reader_of(files: ModelFiles, spec: ServeSpec = SPEC) -> RequestReader:
    return RequestReader(spec, NAME, files, chat_template(spec, files), SIZES["context"], 257)


def completion(reader: RequestReader, **keys: Any) -> CheckedTextRequest:
    return reader.completion(json.dumps({"prompt": "def", **keys}).encode())


def chat(reader: RequestReader, **keys: Any) -> CheckedTextRequest:
    return reader.chat(json.dumps({**ASK, **keys}).encode())


def text_of(reader: RequestReader, **keys: Any) -> str:
    (prompt,) = chat(reader, **keys).prompts
    return byte_tokenizer().decode(list(prompt))


def post(server: RunningServer, path: str = "/v1/completions", **body: Any) -> Answer:
    return server.run(call(server.app, "POST", path, json.dumps(body).encode(), JSON))


def texts(server: RunningServer, **body: Any) -> list[str]:
    answer = post(server, **{"prompt": "def", **body})
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in json.loads(answer.body)["choices"]]


LANGCHAIN = {
    "model": NAME,
    "prompt": ["a"] * 20,
    "temperature": 0.7,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "n": 1,
    "best_of": 1,
    "max_tokens": 256,
    "logit_bias": {},
    "seed": None,
    "logprobs": None,
}
GUIDELLM = {
    "model": NAME,
    "prompt": "a",
    "stream": True,
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "stop": None,
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
VLLM = {
    "prompt": "a",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "return_token_ids": False,
    "min_p": 0,
    "repetition_penalty": 1.0,
    "guided_decoding_backend": "xgrammar",
    "structured_outputs": None,
    "logprobs": False,
    "store": False,
}


@pytest.mark.parametrize("body", [LANGCHAIN, GUIDELLM, VLLM], ids=["langchain", "guidellm", "vllm"])
def test_payloads_of_clients_are_answered(server: RunningServer, body: dict[str, Any]) -> None:
    answer = post(server, **body)
    assert answer.status == 200, answer.body
    if body is LANGCHAIN:
        assert len(json.loads(answer.body)["choices"]) == 20


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("modalities", ["text"], ["text", "audio"]),
        ("verbosity", "medium", "high"),
        ("reasoning_effort", "medium", "high"),
        ("function_call", "none", "auto"),
        ("echo", False, True),
        ("add_special_tokens", False, True),
        ("use_beam_search", False, True),
        ("made_up", None, 1),
    ],
)
def test_other_keys_have_their_default_only(reader: RequestReader, key: str, default: object, other: object) -> None:
    chat(reader, **{key: default})
    chat(reader, **{key: None})
    with pytest.raises(RequestError) as raised:
        chat(reader, **{key: other})
    assert (raised.value.status, raised.value.param) == (400, key)


def test_new_tokens_are_cut_to_the_context(server: RunningServer, reader: RequestReader, files: ModelFiles) -> None:
    for most in (192, 10**9, 2**63 - 1):
        answer = json.loads(post(server, prompt="def", max_tokens=most, ignore_eos=True, logit_bias={"0": -100}).body)
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 189
    assert completion(reader).new_tokens == 16 and chat(reader).new_tokens == SIZES["context"]
    few = reader_of(files, replace(SPEC, max_new_tokens=8))
    assert completion(few).new_tokens == chat(few).new_tokens == 8  # the server's limit holds for the default too
    with pytest.raises(RequestError, match="from 1 to 8"):
        completion(few, max_tokens=9)


def test_fields_of_the_engine(reader: RequestReader) -> None:
    request = completion(
        reader, priority=-3, cache_salt="mine", min_tokens=4, allowed_token_ids=[5, 6], bad_words=["ab"]
    )
    assert (request.priority, request.salt) == (3, "mine")  # the engine takes the larger number first
    sampling = request.sampling
    assert (sampling["min_tokens"], sampling["allowed_token_ids"]) == (4, [5, 6])
    a, b, space = (byte_tokenizer().encode(text).ids[0] for text in ("a", "b", " "))
    assert sampling["bad_words"] == [[a, b]] and [space, a, b] not in sampling["bad_words"]
    plain = completion(reader).sampling
    assert not {"min_tokens", "allowed_token_ids", "bad_words"} & {*plain}
    assert "min_tokens" not in completion(reader, min_tokens=4, ignore_eos=True).sampling  # nothing could end it sooner


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"priority": 2**31}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [257]}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"bad_words": ["x" * 200]}, "bad_words"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
    ],
)
def test_mistakes_are_named(reader: RequestReader, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        completion(reader, **keys)
    assert (raised.value.status, raised.value.param) == (400, param)


def sentence_pieces() -> Tokenizer:
    """A tokenizer in the form of Llama 2's: each text begins with a space."""
    words = ["<unk>", "\u2581", "\n", "b", "a", "d", "ba", "bad", "\u2581bad"]
    merges = [("b", "a"), ("ba", "d"), ("\u2581", "bad")]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)])
    return tokenizer


def words_with_spaces() -> Tokenizer:
    """A tokenizer in the form of GPT-2's: a word's token has the space before it."""
    words = ["\u0120", "\u010a", "b", "a", "d", "ba", "bad", "\u0120bad"]
    merges = [("b", "a"), ("ba", "d"), ("\u0120", "bad")]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [(sentence_pieces(), {("\u2581bad",), ("bad",)}), (words_with_spaces(), {("bad",), ("\u0120bad",)})],
)
def test_bad_words_begin_texts_lines_and_follow_spaces(tokenizer: Tokenizer, expected: set[tuple[str, ...]]) -> None:
    for word in ("bad", " bad"):
        found = word_tokens(tokenizer, [word])
        assert {tuple(tokenizer.id_to_token(id) for id in ids) for ids in found} == expected


def test_excluded_tokens_are_not_in_the_text(server: RunningServer) -> None:
    request = {"max_tokens": 40, "temperature": 3, "seed": 1, "n": 4, "ignore_eos": True}
    a, b = (byte_tokenizer().encode(text).ids[0] for text in "ab")
    allowed = texts(server, **request, allowed_token_ids=[a, b])
    assert all({*text} <= {"a", "b"} for text in allowed) and any("ab" in text for text in allowed)
    without = texts(server, **request, allowed_token_ids=[a, b], bad_words=["ab"])
    assert not any("ab" in text for text in without) and len("".join(without)) == 160


def test_a_text_has_at_least_min_tokens(server: RunningServer) -> None:
    request = {"max_tokens": 9, "logit_bias": {"0": 100}, "temperature": 0}
    assert texts(server, **request) == [""]
    answer = json.loads(post(server, prompt="def", **request, min_tokens=5).body)
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "stop"


CHOICES = ["a.b", "(x|y)*", "[^z]", "\\d+ $", 'say "hi"', "new\nline\ttab", "é → 🦙", "a{2}#&-~ /", "null"]


@needs_grammar
@pytest.mark.parametrize("form", ["guided_choice", "structured_outputs"])
def test_choices_are_taken_literally(server: RunningServer, form: str) -> None:
    for seed, chosen in enumerate(CHOICES):
        value = [chosen] if form == "guided_choice" else {"choice": [chosen]}
        assert texts(server, **{form: value}, max_tokens=60, temperature=5, seed=seed) == [chosen]
    several = texts(server, guided_choice=CHOICES, max_tokens=60, temperature=5, seed=3, n=8)
    assert {*several} <= {*CHOICES} and len({*several}) > 1


@needs_grammar
@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({"guided_regex": "[0-9]{3}-x"}, lambda text: len(text) == 5 and text[:3].isdecimal() and text[3:] == "-x"),
        ({"structured_outputs": {"regex": "(yes|no)!"}}, lambda text: text in ("yes!", "no!")),
        ({"guided_grammar": 'start: "on" | "off"'}, lambda text: text in ("on", "off")),
        ({"structured_outputs": {"grammar": 'start: "on" | "off"'}}, lambda text: text in ("on", "off")),
        ({"guided_json": {"enum": [17]}}, lambda text: json.loads(text) == 17),
        ({"guided_json": '{"enum": [17]}'}, lambda text: json.loads(text) == 17),
        (
            {"structured_outputs": {"json": {"const": "x"}, "disable_fallback": False}},
            lambda text: json.loads(text) == "x",
        ),
    ],
)
def test_grammars_of_vllms_keys_are_followed(server: RunningServer, keys: dict[str, Any], accepted: Any) -> None:
    for text in texts(server, **keys, max_tokens=60, temperature=5, seed=2, n=3):
        assert accepted(text), text


@needs_grammar
def test_a_grammar_that_is_wrong_names_its_key(server: RunningServer) -> None:
    for keys, param in (
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "no grammar"}}, "structured_outputs"),
    ):
        answer = post(server, prompt="a", **keys)
        assert (answer.status, json.loads(answer.body)["error"]["param"]) == (422, param)


def test_the_answer_goes_on_with_the_last_message(reader: RequestReader, server: RunningServer) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "Hel"}]
    continued = {"messages": messages, "continue_final_message": True}
    assert (
        text_of(reader, **continued)
        == text_of(reader, **continued, add_generation_prompt=False)
        == "user: a\nassistant: Hel"
    )
    with pytest.raises(RequestError) as raised:
        chat(reader, **continued, add_generation_prompt=True)
    assert raised.value.param == "continue_final_message"
    answer = json.loads(post(server, "/tokenize", **continued).body)
    assert byte_tokenizer().decode(answer["tokens"]) == "user: a\nassistant: Hel"


def test_variables_reach_the_template(files: ModelFiles) -> None:
    reader = reader_of(replace(files, chat_template=QWEN3))
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    assert text_of(reader, **quiet).endswith("<think>\n\n</think>\n\n") and "think" not in text_of(reader)
    asked = reader.tokenize(json.dumps({**ASK, **quiet}).encode())
    assert byte_tokenizer().decode(json.loads(asked)["tokens"]) == text_of(reader, **quiet)
    closed = "<think>\n\n</think>\n\n"
    limited = {"response_format": {"type": "json_object"}}
    for keys, ends in [
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        (limited, True),
        ({**limited, "reasoning_effort": "high"}, False),
        ({**limited, "chat_template_kwargs": {"enable_thinking": True}}, False),
    ]:
        assert text_of(reader, **keys).endswith(closed) is ends, keys
    effort = reader_of(replace(files, chat_template="{{ reasoning_effort | default('none') }}"))
    assert [text_of(effort, **keys) for keys in ({}, {"reasoning_effort": "high"})] == ["none", "high"]


GENERATION = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "do_sample": False,
    "max_new_tokens": 5,
    "repetition_penalty": 1.0,
}


@pytest.fixture
def tuned(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder's files with sampling values."""
    for file in folder.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    yield tmp_path


def test_sampling_values_of_the_model_are_defaults(tuned: Path) -> None:
    files = read_model_files(tuned)
    assert files.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    reader, free = reader_of(files), reader_of(read_model_files(tuned, defaults=False))
    assert {key: completion(reader).sampling[key] for key in files.sampling} == files.sampling
    assert not {*files.sampling} & {*completion(free).sampling}
    given = completion(reader, temperature=1.0, top_k=-1, top_p=None).sampling
    assert "temperature" not in given and "top_k" not in given and given["top_p"] == 0.95


def test_the_list_of_models_shows_the_defaults(tuned: Path) -> None:
    for setting, shown in (("auto", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}), ("none", {})):
        with running_server(tuned, generation_config=setting) as server:
            answer = json.loads(server.run(call(server.app, "GET", "/v1/models")).body)
            assert answer["data"][0]["default_sampling"] == shown


def test_the_list_of_models_has_names_of_checkpoints_and_no_paths(tuned: Path) -> None:
    with running_server(tuned) as server:
        damaged = [{"path": "/secret/runs/a/checkpoints/step-00000009", "reason": "weights: missing"}]
        server.api.client.weights = {
            "checkpoint": "/secret/runs/a/checkpoints/step-00000006",
            "damaged_checkpoints": damaged,
        }
        (model,) = json.loads(server.run(call(server.app, "GET", "/v1/models")).body)["data"]
    assert model["checkpoint"] == "step-00000006"
    assert model["damaged_checkpoints"] == [{"checkpoint": "step-00000009", "reason": "weights: missing"}]


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 500), ("temperature", "x"), ("top_p", -1), ("top_k", 1.5), ("min_p", True), ("top_k", -2)],
)
def test_a_default_out_of_range_is_refused_at_start(tuned: Path, key: str, value: object) -> None:
    (tuned / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(BadInput, match=rf"generation_config\.json: {key}: expected"):
        read_model_files(tuned)
    assert read_model_files(tuned, defaults=False).sampling == {}
    (tuned / "generation_config.json").write_text(json.dumps({"top_k": -1, "temperature": None}))
    assert read_model_files(tuned).sampling == {}
