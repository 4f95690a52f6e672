"""Scores of given texts over HTTP: `echo` with `logprobs`, and `prompt_logprobs`, equal transformers' in fp32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from meshwright.data.token_bytes import TokenBytes
from meshwright.serve.prompt_logprobs import PromptLogprobs
from meshwright.server import prompt_output, text_request
from tests.server.helpers import END, JSON, RunningServer, byte_tokenizer, call, running_server

transformers = pytest.importorskip("transformers")
TEXT = "def é(x): return 🙂 # the same, the same"
TOKENIZER = byte_tokenizer()
IDS = TOKENIZER.encode(TEXT).ids


def post(server: RunningServer, path: str = "/v1/completions", **body: Any) -> Any:
    answer = server.run(call(server.app, "POST", path, json.dumps(body).encode(), JSON))
    return (answer.status, json.loads(answer.body))


def choices(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    status, answer = post(server, temperature=0, **body)
    assert status == 200, answer
    return answer["choices"]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    """transformers' log probabilities `(tokens - 1, vocab)` of the tokens behind the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def scores(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)

    return scores


def check_echo(choice: dict[str, Any], ids: Sequence[int], rows: torch.Tensor, most: int) -> None:
    """The entries of a prompt are those of the oracle, and the value of a greedy token has the same bits in both lists."""
    logprobs = {key: values[: len(ids)] for key, values in choice["logprobs"].items()}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for value, top, id, row in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], ids[1:], rows, strict=True
    ):
        assert value == pytest.approx(float(row[id]), abs=1e-4)
        assert list(top.values()) == pytest.approx(row.topk(most).values.tolist(), abs=1e-4)
        if most:
            assert (value == max(top.values())) == (int(row.argmax()) == id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    server: RunningServer, oracle: Any, prompt: Any, stream: bool
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 4}
    (choice,) = choices(server, **body)
    if stream:
        raw = json.dumps({**body, "temperature": 0, "stream": True}).encode()
        lines = server.run(call(server.app, "POST", "/v1/completions", raw, JSON)).body.decode().split("\n\n")
        parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert "".join(part["text"] for part in parts) == choice["text"]
        lists = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        joined = {key: [entry for of_part in lists for entry in of_part[key]] for key in choice["logprobs"]}
        assert joined == choice["logprobs"]
    logprobs = choice["logprobs"]
    new = choice["text"].removeprefix(TEXT)
    assert "".join(logprobs["tokens"]) == choice["text"] == TEXT + new
    assert {len(values) for values in logprobs.values()} == {len(IDS) + 4}
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:index])) for index in range(len(IDS) + 4)]
    check_echo(choice, IDS, oracle(IDS), 3)


def test_an_answer_may_be_about_the_prompt_alone(server: RunningServer, oracle: Any) -> None:
    prompts = [IDS, IDS[:1], IDS[3:20], IDS]
    status, answer = post(server, prompt=prompts, echo=True, logprobs=1, max_tokens=0, n=2)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 0
    assert [choice["index"] for choice in answer["choices"]] == [*range(8)]
    for choice in answer["choices"]:
        ids = prompts[choice["index"] // 2]
        assert choice["text"] == TOKENIZER.decode(ids) and choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        check_echo(choice, ids, oracle([*ids, 1])[: len(ids) - 1], 1)
    (choice,) = choices(server, prompt=TEXT, echo=True, max_tokens=0)
    assert choice["text"] == TEXT and choice["logprobs"] is None


def test_a_new_token_that_ends_texts_has_an_entry(server: RunningServer) -> None:
    """lm-eval leaves the last entry out: without one for the end of text it would leave out a token of the answer."""
    body = {"prompt": IDS, "echo": True, "logprobs": 1, "logit_bias": {"0": 100}}
    (choice,) = choices(server, **body, max_tokens=1)
    assert len(choice["logprobs"]["tokens"]) == len(IDS) + 1
    (choice,) = choices(server, **body, max_tokens=2)
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["tokens"]) == len(IDS)


def test_prompts_are_listed_as_vllm_does(server: RunningServer, oracle: Any) -> None:
    found = choices(server, prompt=[IDS, IDS[:1]], prompt_logprobs=2, max_tokens=2, logprobs=None)
    assert found[1]["prompt_logprobs"] == [None]
    messages = [{"role": "user", "content": "Hi"}]
    status, chat = post(server, "/v1/chat/completions", messages=messages, prompt_logprobs=0, max_tokens=2)
    assert status == 200, chat
    _, rendered = post(server, "/tokenize", messages=messages)
    for ids, listed, most in ((IDS, found[0]["prompt_logprobs"], 2), (rendered["tokens"], chat["prompt_logprobs"], 0)):
        assert listed[0] is None and len(listed) == len(ids)
        for id, entries, row in zip(ids[1:], listed[1:], oracle(ids), strict=True):
            likeliest = row.topk(most).indices.tolist()
            assert list(map(int, entries)) == list(dict.fromkeys([id, *likeliest]))
            for key, entry in entries.items():
                assert entry["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-4)
                assert entry["rank"] == 1 + int((row > row[int(key)]).sum())
            assert entries[str(id)]["decoded_token"].encode() or id == 0


def test_cached_prompts_are_scored_too(server: RunningServer, oracle: Any) -> None:
    for _ in range(2):
        choices(server, prompt=IDS, max_tokens=2)
        status, answer = post(server, prompt=IDS, echo=True, logprobs=1, max_tokens=1)
        assert status == 200 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        check_echo(answer["choices"][0], IDS, oracle(IDS), 1)


def test_tokens_that_begin_a_text_are_not_in_its_echo(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "begun"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tokenizer = byte_tokenizer()
    processor: Any = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.post_processor = processor
    tokenizer.save(str(copy / "tokenizer.json"))
    with running_server(copy) as server:
        (choice,) = choices(server, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    logprobs = choice["logprobs"]
    assert choice["text"] == "abc"
    assert (logprobs["tokens"], logprobs["text_offset"]) == ([END, "a", "b", "c"], [0, 0, 1, 2])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused(server: RunningServer, body: dict[str, Any], param: str) -> None:
    status, answer = post(server, prompt=TEXT, **body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_too_many_log_probabilities_are_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_request, "MOST_PROMPT_LOGPROBS", 8 * len(IDS))
    body = {"prompt": IDS, "echo": True, "logprobs": 3, "max_tokens": 0}
    assert post(server, **body, n=2)[0] == 200
    status, answer = post(server, **body, n=3)
    assert status == 400 and "fewer of the likeliest" in answer["error"]["message"]


def test_the_event_loop_has_turns_while_a_prompt_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_output, "ENTRIES_AT_ONCE", 4)
    values = PromptLogprobs.empty()
    for column, count in zip(values, (1, 1, 3, 3), strict=True):
        column.extend([0] * count * (len(IDS) - 1))
    prompt = prompt_output.PromptOutput(IDS, TokenBytes(TOKENIZER))
    prompt.add(values.packed())

    async def turns() -> int:
        work, count = asyncio.ensure_future(prompt.listed(3)), 0
        while not work.done():
            count += 1
            await asyncio.sleep(0)
        return count

    assert prompt.complete and asyncio.run(turns()) >= len(IDS) - 1


@pytest.fixture(autouse=True)
def nothing_is_left(server: RunningServer) -> Iterator[None]:
    yield
    server.settle()
