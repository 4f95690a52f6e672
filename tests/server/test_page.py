"""The page at `/`, in a headless Chromium."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.browser import BROWSER, browser
from tests.server.helpers import RunningServer, call, running_server
from tests.server.scripted_engine import ARGUMENTS, CALLS, REPLY, RESULT, scripted_server

READY = "(document.getElementById('load') || {textContent: ''}).textContent.includes('running')"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_talks_to_the_model(server: RunningServer, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(server.url)
        page.wait(READY)
        page.value(
            "by('prompt').value = '<b>Hello</b>'; by('tokens').value = 5; by('temperature').value = 0; by('send').click()"
        )
        page.wait("document.querySelectorAll('.text').length === 2 && !running")
        assert page.value("document.querySelector('.user').textContent") == "<b>Hello</b>"
        answer = page.value("document.querySelector('.model').textContent")
        assert page.value("document.querySelector('.error')") is None
        assert page.value("messages.length") == 2
        page.value("by('prompt').value = 'again '.repeat(5000); by('send').click()")
        assert "context" in page.wait("(document.querySelector('.error') || {}).textContent")
    request = {"messages": [{"role": "user", "content": "<b>Hello</b>"}], "max_tokens": 5, "temperature": 0}
    headers = [(b"content-type", b"application/json")]
    alone = server.run(call(server.app, "POST", "/v1/chat/completions", json.dumps(request).encode(), headers))
    assert json.loads(alone.body)["choices"][0]["message"]["content"] == answer


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_shows_reasoning_calls_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALLS, "qwen3", f"<think>\nI ask a tool.\n</think>\n\nWait.\n{CALLS['qwen3']}")
    (tmp_path / "model").mkdir()
    with scripted_server(tmp_path / "model", "qwen3") as url, browser(tmp_path / "browser") as page:
        page.open(url)
        page.wait(READY)
        page.value(
            f"by('tools').value = {json.dumps(json.dumps([TOOL]))}; by('prompt').value = 'Rain?'; by('send').click()"
        )
        page.wait("document.querySelector('.result') && !running")
        assert page.value("document.querySelector('.reasoning').textContent") == "I ask a tool."
        assert page.value("document.querySelector('.model').textContent") == "Wait."
        name, _, arguments = page.value("document.querySelector('.call').textContent").partition("(")
        assert (name, json.loads(arguments.removesuffix(")"))) == ("weather", ARGUMENTS)
        shown = page.value("document.querySelector('.figures').textContent")
        assert re.fullmatch(
            r"\d+ tokens \(\d+ of reasoning\)(, .* tokens/s)?, first after .* s; prompt \d+, .* from the cache", shown
        )
        page.value(f"document.querySelector('.result').value = {json.dumps(RESULT)}")
        page.value("document.querySelector('.result').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
        page.wait("messages.length === 4 && !running")
        assert page.value("[...document.querySelectorAll('.model')].at(-1).textContent") == REPLY
        assert page.value("messages[2].tool_call_id === messages[1].tool_calls[0].id")
        page.value("by('tools').value = '[oops'; by('prompt').value = 'Again?'; by('send').click()")
        assert page.wait("(document.querySelector('.error') || {}).textContent").startswith("tools: ")


def test_the_page_can_be_left_out(folder: Path) -> None:
    with running_server(folder, page=False) as server:
        assert server.run(call(server.app, "GET", "/")).status == 404
        assert server.run(call(server.app, "GET", "/health")).status == 200


def test_the_page_loads_nothing_from_elsewhere(server: RunningServer) -> None:
    answer = server.run(call(server.app, "GET", "/"))
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for name, value in attrs if name in ("src", "href", "action"))

    Links().feed(answer.body.decode())
    assert answer.status == 200 and not found
    assert b"default-src 'none'" in answer.headers[b"content-security-policy"]
