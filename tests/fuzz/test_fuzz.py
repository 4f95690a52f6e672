"""A slice of the fuzz run, and that its bodies have every key which the server documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from tests.fuzz.bodies import CHATS, COMPLETIONS, KEYS, body_request
from tests.fuzz.run import Fuzz, requests_of, tiny_server
from tests.fuzz.schemas import schema_request

ROOT = Path(__file__).resolve().parents[2]
SEED, BODIES, SCHEMAS = 1, 300, 50


def test_a_slice_of_the_fuzz_run_finds_nothing() -> None:
    pytest.importorskip("llguidance")
    with tiny_server() as server:
        fuzz = Fuzz(server, lambda line: None)
        before = fuzz.references()
        fuzz.run_pass(requests_of(SEED, BODIES, SCHEMAS), BODIES + SCHEMAS, "slice")
        assert [(failure.name, failure.fault) for failure in fuzz.failures] == []
        assert fuzz.references() == before and server.starts == 1
        assert {200, 400} <= set(fuzz.statuses)


def test_requests_are_the_same_for_the_same_seed() -> None:
    assert [*requests_of(1, 30, 5)] == [*requests_of(1, 30, 5)]
    assert body_request(1, 7) != body_request(2, 7) and schema_request(1, 7) != schema_request(2, 7)


def test_bodies_have_every_documented_key() -> None:
    text = (ROOT / "docs/reference/serve.md").read_text(encoding="utf-8")
    requests = text[text.index("## Requests") : text.index("## Errors")]
    listed = {
        name: set(re.findall(r"`([a-z_]+)`", found[1]))
        for name, found in ((name, re.search(rf"^- {name}: (.*?)(?=^- |^$)", requests, re.M | re.S)) for name in NAMES)
        if found is not None
    }
    assert set(listed) == set(NAMES)
    known = {"max_tokens", "max_completion_tokens", *KEYS[COMPLETIONS], *KEYS[CHATS], *VALUES, *OPTIONS}
    for name, keys in listed.items():
        assert keys <= known, f"{name}: add {sorted(keys - known)} to tests/fuzz/bodies.py"


NAMES = ("both", "completions", "chats", "without effect")
OPTIONS = ("include_usage", "continuous_usage_stats")
"""Keys of `stream_options`."""
VALUES = ("json_object", "json_schema", "grammar", "text", "none", "auto", "required")
"""Words of the list that are no keys."""
