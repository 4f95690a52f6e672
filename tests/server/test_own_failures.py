"""Over HTTP: a request's own failure has its status and code, and harms no other request."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.server import engine_probe, grammar_check
from tests.server.helpers import JSON, RunningServer, call, running_server

needs_llguidance = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs the extra grammar")
POISON = 37
"""A token whose requests get NaN in these tests."""


def completion(server: RunningServer, **fields: Any) -> Any:
    """An unfinished answer of the server."""
    body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, **fields}).encode()
    return call(server.app, "POST", "/v1/completions", body, JSON)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


PATTERN = {"type": "string", "minLength": 5000, "pattern": "^a*$"}
ENDLESS = {"type": "string", "allOf": [{"pattern": f"[a-z]*x{index}"} for index in range(30)]}
KEYS = {"type": "object", "properties": {f"key_{index}": {"type": "string"} for index in range(520)}}
OBJECTS = {"enum": [{"n": index} for index in range(3000)]}


@needs_llguidance
def test_grammars_at_a_limit_end_their_own_request_only(server: RunningServer) -> None:
    async def all_at_once() -> list[Any]:
        stream = completion(server, max_tokens=100, ignore_eos=True)
        formats = [PATTERN, PATTERN, PATTERN, ENDLESS, KEYS, OBJECTS]
        return await asyncio.gather(
            stream, *(completion(server, response_format=schema_format(one)) for one in formats)
        )

    alone = server.run(completion(server, max_tokens=100, ignore_eos=True))
    stream, *answers, keys, objects = server.run(all_at_once())
    assert stream.status == 200, stream.body
    assert json.loads(stream.body)["choices"] == json.loads(alone.body)["choices"]
    for answer in answers:
        error = json.loads(answer.body)["error"]
        assert answer.status == 422 and error["code"] == "grammar" and error["param"] == "response_format"
    assert "0.8 s" in json.loads(answers[-1].body)["error"]["message"]
    assert keys.status == 200
    assert objects.status in (200, 422)  # by the speed of the machine
    server.settle()
    assert server.api.state == "ready"


@pytest.mark.slow
@needs_llguidance
def test_a_thousand_values_of_each_key_leave_caches_within_bounds(server: RunningServer) -> None:
    async def each(index: int) -> int:
        fields = {
            "stop_token_ids": [200 + index % 50, 150 + (index * 7) % 97],
            "seed": index,
            "logit_bias": {str(index % 100): 1.0},
            "presence_penalty": 0.001 * index,
            "response_format": schema_format({"enum": [f"value {index}"]}),
        }
        answer = await completion(server, max_tokens=1, temperature=1, **fields)
        assert answer.status == 200, answer.body
        return answer.status

    async def many(first: int) -> set[int]:
        return set(await asyncio.gather(*(each(index) for index in range(first, first + 100))))

    for first in range(0, 1000, 100):
        assert server.run(many(first)) == {200}
    server.settle()
    engine = server.engine
    assert len(engine.grammars()._compiled) <= 64
    kept: list[Any] = [
        engine._generations,
        engine._failures,
        engine._table_rows.row_of,
        engine._drafter._pauses._trials,
    ]
    kept += [engine._sampler._assigned, engine._sampler._logprobs, engine._sampler._history._slot_of]
    assert not any(kept)
    assert len(engine._sampler._history.counts) <= engine.options.sequences * 2 + 2
    assert engine._sampler._biases.values.shape[1] <= 1024


@pytest.fixture
def poisoned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, set[int]]]:
    """A server whose model gives NaN to prompts with one of a set of tokens."""
    monkeypatch.setattr(engine_probe, "PROBE_SECONDS", 0.02)
    with running_server(folder) as server:
        tokens, compute = {POISON}, server.engine._runner.logits

        def logits(packed: Any) -> Any:
            out = compute(packed).clone()
            for row, part in enumerate(packed.sampled_parts):
                if tokens & set(part.request.prompt):
                    out[row] = float("nan")
            return out

        server.engine._runner.logits = logits
        yield server, tokens


async def state_of(server: RunningServer, wanted: str) -> int:
    """The status of /health once the state is this one."""
    deadline = time.monotonic() + 30
    while server.api.state != wanted:
        assert time.monotonic() < deadline, server.api.state
        await asyncio.sleep(0.01)
    return (await call(server.app, "GET", "/health")).status


def test_nan_fails_the_request_and_only_a_broken_model_is_unhealthy(poisoned: tuple[RunningServer, set[int]]) -> None:
    server, tokens = poisoned
    for count in range(1, 5):
        answer = server.run(completion(server, prompt=[POISON], logprobs=2))
        error = json.loads(answer.body)["error"]
        assert answer.status == 500 and error["code"] == "not_finite" and b"NaN," not in answer.body
        assert (
            f'num_requests_not_finite_total{{model_name="{server.api.name}"}} {count}'
            in server.api.client.metrics.text(server.api.client.figures)
        )
    assert server.run(completion(server)).status == 200
    assert server.run(state_of(server, "ready")) == 200
    tokens.update(range(260))
    for _ in range(3):
        assert server.run(completion(server)).status == 500
    assert server.run(state_of(server, "unhealthy")) == 503
    assert server.run(completion(server)).status == 503
    tokens.clear()
    assert server.run(state_of(server, "ready")) == 200
    assert server.run(completion(server)).status == 200
    server.settle()


@needs_llguidance
def test_the_process_that_checks_grammars_starts_again_after_one_that_takes_too_long() -> None:
    from meshwright.serve.compiled_grammar import Grammar

    check = grammar_check.GrammarCheck()
    try:
        assert check.refusal(Grammar("regex", "a+")) is None
        assert "takes longer than" in str(check.refusal(Grammar.json_schema(ENDLESS)))
        assert "cannot be used" in str(check.refusal(Grammar("regex", "[a")))
        assert check.refusal(Grammar("regex", "b+")) is None
    finally:
        check.close()
