"""POST /score: the scores of transformers, refusals, texts that wait, clients that leave, and newer weights."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from meshwright.checkpoint.models.single_device import load_model
from meshwright.serve.failures import FAILED_STEPS, EngineLost
from meshwright.serve.reward_scorer import open_scorer
from meshwright.server.engine_process import EngineConnection
from meshwright.server.engine_setup import EngineSetup
from meshwright.server.messages import ServerMessageReader, encode
from meshwright.server.packed_ids import ids_as_text
from meshwright.server.score_process import ScoreLoop, check_settings, serve_scores
from meshwright.spec.errors import BadInput
from meshwright.spec.model import SCORE, with_score
from meshwright.spec.serve import ServeSpec
from tests.models.tiny import LLAMA
from tests.server.helpers import NAME, TEMPLATE, RunningServer, running_api, write_folder

CPU, FP32 = torch.device("cpu"), torch.float32
SPEC = ServeSpec(name=NAME, log_requests=False, sequences=4, step_tokens=64, context=192, max_choices=8)
CHAT = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]


@pytest.fixture(scope="module")
def rewarding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("rewarding") / NAME, with_score(LLAMA))


@pytest.fixture(scope="module")
def served(rewarding: Path) -> Iterator[tuple[str, Any, Any]]:
    setup = EngineSetup(folder=str(rewarding), tokenizer=None, options=SPEC.engine)
    with running_api(rewarding, SPEC, partial(serve_scores, setup, weights=None)) as running:
        yield running


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return self.body["error"]["message"]


def posted(url: str, path: str = "/score", **body: Any) -> Answer:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Answer(answer.status, json.load(answer))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.load(error))


def scores(answer: Answer) -> list[float]:
    assert answer.status == 200, answer
    data = answer.body["data"]
    assert [(each["object"], each["index"]) for each in data] == [("score", index) for index in range(len(data))]
    return [each["score"] for each in data]


def as_ids(text: str) -> list[int]:
    """Tokens of the tests' tokenizer, which are bytes."""
    from tests.server.helpers import byte_tokenizer

    return byte_tokenizer().encode(text).ids


def test_scores_are_those_of_transformers(served: tuple[str, Any, Any], rewarding: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    judge: Any = AutoModelForSequenceClassification.from_pretrained(rewarding, dtype=FP32).eval()
    judge.config.pad_token_id = None
    texts = ["one", "another text", "x" * 192]
    with torch.no_grad():
        expected = [judge(input_ids=torch.tensor([as_ids(text)])).logits[0, 0].item() for text in texts]
    answer = posted(served[0], input=texts, model=NAME)
    assert scores(answer) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert answer.body["usage"] == {"prompt_tokens": 207, "total_tokens": 207} and answer.body["model"] == NAME
    assert scores(posted(served[0], input=as_ids("one"))) == pytest.approx(expected[:1], rel=1e-4)
    assert scores(posted(served[0], input=[as_ids("one"), "another text"])) == pytest.approx(expected[:2], rel=1e-4)


def test_conversations_are_those_of_the_template(served: tuple[str, Any, Any]) -> None:
    """Without the beginning of another answer behind the last."""
    import jinja2

    whole = jinja2.Template(TEMPLATE, keep_trailing_newline=True).render(messages=CHAT)
    assert whole.endswith("assistant: 4\n")
    (expected,) = scores(posted(served[0], input=whole))
    worse = [CHAT[0], {"role": "assistant", "content": "5"}]
    assert scores(posted(served[0], messages=CHAT)) == [pytest.approx(expected, rel=1e-5)]
    both = scores(posted(served[0], conversations=[CHAT, worse]))
    assert both[0] == pytest.approx(expected, rel=1e-5) and both[1] != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "expected one of input, messages, conversations"),
        ({"input": "a", "messages": CHAT}, 400, "expected one of"),
        ({"input": ""}, 400, "a text has 0 tokens: expected 1 to 192, the context"),
        ({"input": "x" * 193}, 400, "a text has 193 tokens"),
        ({"input": [257]}, 400, "token ids from 0 to 256"),
        ({"input": ["a"] * 9}, 400, "at most 8 texts"),
        ({"conversations": []}, 400, "a list of conversations"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"input": "a", "temperature": 1}, 400, "temperature"),
        ({"input": "a", "model": "other"}, 404, "there is no such model here"),
    ],
)
def test_wrong_bodies_are_refused(served: tuple[str, Any, Any], body: dict[str, Any], status: int, said: str) -> None:
    answer = posted(served[0], **body)
    assert answer.status == status and said in answer.message


def test_texts_are_written_by_language_models_only(served: tuple[str, Any, Any], server: RunningServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": CHAT[:1]}),
        ("/v1/messages", {"messages": CHAT[:1], "max_tokens": 3}),
        ("/v1/responses", {"input": "a"}),
    ):
        answer = posted(served[0], path, **body)
        assert answer.status == 400 and answer.message == "this is a reward model, which writes no text; use /score"
    answer = posted(server.url, input="a")
    assert answer.status == 400 and "this is a language model" in answer.message
    with urllib.request.urlopen(f"{served[0]}/health", timeout=60) as health:
        assert json.load(health)["status"] == "ready"


def test_many_clients_at_once_get_their_own_scores(served: tuple[str, Any, Any]) -> None:
    texts = [f"text number {number}" * (number % 5 + 1) for number in range(40)]
    alone = [scores(posted(served[0], input=text))[0] for text in texts[:5]]

    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(lambda text: scores(posted(served[0], input=text))[0], texts))
    assert found[:5] == pytest.approx(alone, abs=1e-5) and len(set(found)) == len(texts)
    assert served[1].client.unfinished == 0


def test_texts_of_a_client_that_leaves_are_given_up(served: tuple[str, Any, Any]) -> None:
    url, api, loop = served
    loop.call_soon_threadsafe(api.client.pause, True)
    body = json.dumps({"input": ["a", "b"]}).encode()
    head = f"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + body)
        until(lambda: api.client.unfinished == 2)
    until(lambda: api.client.unfinished == 0)
    loop.call_soon_threadsafe(api.client.pause, False)
    assert len(scores(posted(url, input="a"))) == 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Loop:
    """A scorer's loop in a thread, and the other end of its socket."""

    def __init__(self, scorer: Any) -> None:
        self.ours, theirs = socket.socketpair()
        self.error: BaseException | None = None
        loop = ScoreLoop(scorer, EngineConnection(theirs), SPEC.engine)
        self._reader, self._messages = ServerMessageReader(), list[Any]()

        def run() -> None:
            try:
                loop.run()
            except EngineLost as error:
                self.error = error
            theirs.close()

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def send(self, **message: Any) -> None:
        self.ours.sendall(encode(message))

    def submit(self, id: int, tokens: list[int]) -> None:
        self.send(submit={"ids": [id], "tokens": ids_as_text(tokens)})

    def next(self) -> dict[str, Any]:
        while not self._messages:
            self._messages += self._reader.add(self.ours.recv(1 << 16))
        return self._messages.pop(0)

    def close(self) -> None:
        self.ours.close()
        self.thread.join(30)
        assert not self.thread.is_alive()


def test_texts_that_wait_are_scored_together_and_those_aborted_are_left_out(rewarding: Path) -> None:
    loop = Loop(open_scorer(rewarding, CPU, FP32))
    loop.send(pause=True)
    for id in range(7):
        loop.submit(id, [id + 1] * 10)
    loop.submit(7, [9] * 60)
    loop.send(abort=[2])
    loop.send(pause=False)
    steps = [[entry[0] for entry in loop.next()["step"]] for _ in range(3)]
    assert steps == [[0, 1, 3, 4], [5, 6], [7]]  # 4 texts, then 64 tokens at most
    loop.close()


class Broken:
    """A scorer whose forwards give a value or raise an error, in turn."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def score(self, texts: list[list[int]]) -> list[float]:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return [result] * len(texts)


def test_a_failure_ends_its_own_texts_only() -> None:
    loop = Loop(Broken(float("nan"), RuntimeError("once"), 1.5, *[RuntimeError("again")] * FAILED_STEPS))
    codes = []
    for id in range(2 + FAILED_STEPS):
        loop.submit(id, [1])
        ((found, tokens, details),) = loop.next()["step"]
        assert (found, tokens) == (id, [])
        codes.append((details["reason"], details.get("code"), details.get("score")))
    failed = ("failed", "engine_failed", None)
    assert codes == [("failed", "not_finite", None), failed, ("stop", None, 1.5), failed, failed]
    loop.submit(9, [1])
    loop.thread.join(30)
    assert "the reward model cannot go on" in str(loop.error)
    loop.close()


def test_newer_weights_replace_those_of_the_same_model(rewarding: Path, tmp_path: Path) -> None:
    scorer = open_scorer(rewarding, CPU, FP32)
    before = scorer.score([[1, 2, 3]])
    with torch.no_grad():
        changed = load_model(rewarding, CPU, FP32, scores=True)
        changed.get_parameter(SCORE).mul_(2)
    from meshwright.checkpoint.models.hf import export_hf

    export_hf(
        tmp_path / "newer", changed.spec, iter(changed.named_parameters()), tokenizer=None, run_note="", dtype="fp32"
    )
    loop = Loop(scorer)
    loop.send(load=str(tmp_path / "newer"))
    assert loop.next() == {"loaded": str(tmp_path / "newer"), "error": None}
    loop.submit(1, [1, 2, 3])
    assert loop.next()["step"][0][2]["score"] == pytest.approx(2 * before[0], rel=1e-5)
    write_folder(tmp_path / "other", LLAMA)
    loop.send(load=str(tmp_path / "other"))
    assert "model.head is vocabulary, expected score" in loop.next()["error"]
    loop.close()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"kv_cache": "fp8"}, "kv_cache"),
        ({"weights": "int8"}, "weights"),
        ({"cache_blocks": 9}, "cache_blocks"),
        ({"prefix_cache": False}, "prefix_cache"),
    ],
)
def test_settings_of_generation_are_refused(settings: dict[str, Any], key: str) -> None:
    setup = EngineSetup(folder="", tokenizer=None, options=replace(SPEC, **settings).engine)
    with pytest.raises(BadInput, match=rf"{key}: expected none with a reward model"):
        check_settings(setup)
    with pytest.raises(BadInput, match=r"speculate: expected none with a reward model"):
        check_settings(replace(setup, options=SPEC.engine, speculate=3))


def test_a_language_model_is_no_scorer(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"is a language model; expected a reward model"):
        open_scorer(folder, CPU, FP32)
