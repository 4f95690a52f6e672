"""The page at `/`, in a headless Chromium."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.browser import BROWSER, browser
from tests.server.helpers import RunningServer, call


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_talks_to_the_model(server: RunningServer, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(server.url)
        page.wait("(document.getElementById('load') || {textContent: ''}).textContent.includes('running')")
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


def test_the_page_loads_nothing_from_elsewhere(server: RunningServer) -> None:
    answer = server.run(call(server.app, "GET", "/"))
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for name, value in attrs if name in ("src", "href", "action"))

    Links().feed(answer.body.decode())
    assert answer.status == 200 and not found
    assert b"default-src 'none'" in answer.headers[b"content-security-policy"]
