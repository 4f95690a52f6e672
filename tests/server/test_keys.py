"""Keys from settings and the environment, and the addresses that a request may name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from meshwright.config.serve_file import load_settings
from meshwright.server.addresses import with_keys
from meshwright.server.app import HostCheck, KeyCheck
from meshwright.spec.errors import BadConfig, BadInput
from meshwright.spec.secrets import OWN_KEYS, key_setting, without_own_keys, without_secrets
from meshwright.spec.serve import ServeSpec
from tests.server.helpers import call


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("text", ["key", "key\n", " key\t", "\r\nkey \n"])
@pytest.mark.parametrize("given", [False, True])
def test_white_space_around_a_key_locks_nobody_out(text: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not given:
        monkeypatch.setenv("MESHWRIGHT_API_KEY", text)
    spec = with_keys(ServeSpec(api_key=text if given else None))
    assert spec.api_key == "key"
    for sent, status in ((b"Bearer key", 200), (b"Bearer  key ", 200), (b"Bearer other", 401)):
        answer = asyncio.run(call(KeyCheck(app, spec.api_key), "GET", "/", b"", [(b"authorization", sent)]))
        assert answer.status == status


@pytest.mark.parametrize("text", [" ", "\n", "a\tb", "a\nb", "\u00fcml\u00e4ut", "a\x7fb"])
def test_a_key_that_no_client_can_send_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, variable in zip(("api_key", "admin_key", "transfer_key"), OWN_KEYS, strict=True):
        with pytest.raises(BadInput, match=name) as refused:
            with_keys(ServeSpec(**{name: text}))  # type: ignore[arg-type]
        assert (refused.value.key == name and text.strip() not in str(refused.value)) or not text.strip()
        monkeypatch.setenv(variable, text)
        with pytest.raises(BadInput, match=variable):
            with_keys(ServeSpec())
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "")
    assert key_setting("api_key", None, "MESHWRIGHT_API_KEY") is None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.0.0.2:8000", 200),
        ("127.1.2.3", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:80", 200),
        ("128.0.0.1", 400),
        ("example.org", 400),
        ("127.0.0.1.example.org:80", 400),
        ("", 400),
        ("0.0.0.0", 400),
    ],
)
def test_a_loopback_server_takes_requests_for_every_loopback_address(host: str, status: int) -> None:
    """Another name is DNS rebinding: a page of that name asks this machine."""

    async def ask() -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/health", "headers": [(b"host", host.encode())]}
        await HostCheck(app)(scope, cast(Any, None), send)
        return int(sent[0]["status"])

    assert asyncio.run(ask()) == status


def test_children_get_no_secrets() -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_SESSION_TOKEN": "s",
        "WANDB_API_KEY": "s",
        "HF_TOKEN": "s",
        "DB_PASSWORD": "s",
        "AZURE_STORAGE_CONNECTION_STRING": "s",
        **dict.fromkeys(OWN_KEYS, "s"),
    }
    kept = {"PATH": "p", "MESHWRIGHT_TOKEN_FILE": "f", "KEYBOARD": "k", "TOKENIZERS_PARALLELISM": "t", "MONKEY": "m"}
    assert without_secrets(secrets | kept) == kept
    assert without_own_keys({**kept, "WANDB_API_KEY": "s", "MESHWRIGHT_API_KEY": "s"}) == {**kept, "WANDB_API_KEY": "s"}


@pytest.mark.skipif(sys.platform != "linux", reason="the arguments are in /proc")
def test_keys_among_the_arguments_are_overwritten() -> None:
    code = (
        "import sys; from meshwright.spec.secrets import hide_arguments; hide_arguments(['s3cret', None, 'sk', '']);"
        "print(open('/proc/self/cmdline').read().split('\\0')[3:], sys.argv[1:])"
    )
    words = ["--api-key", "s3cret", "--admin-key=sk", "task", "s3cret-not"]
    output = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True).stdout
    assert output.strip() == f"{['--api-key', '******', '--admin-key=**', 'task', 's3cret-not', '']} {words}"


def test_a_mistake_in_a_file_does_not_show_a_key(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api_key: 123456789\nadmin_key: [secret-word]\ntransfer_key: {a: secret-word}\n")
    with pytest.raises(BadConfig) as refused:
        load_settings(ServeSpec, file, {})
    text = str(refused.value)
    assert text.count("got a value that is not shown") == 3 and "123456789" not in text and "secret-word" not in text
