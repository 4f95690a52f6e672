"""The label of an excluded host's Kubernetes node, by a server in place of the API."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.training.tiny import make_tiny, tiny_run

from meshwright.launch import defect_report, node_label
from meshwright.launch.defect_report import DefectReporter
from meshwright.launch.node_label import label_node
from meshwright.spec.node_label import node_label as parsed

LABEL = ("example.com/gpu-health", "bad")
TOKEN = "a-token-of-the-account"


@dataclass
class Api:
    """Answers, each a status and an object, one after the other; the last one stays. Keeps what it was asked."""

    account: Path
    env: dict[str, str]
    answers: list[tuple[int, Any]]
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)

    def label(self, node: str = "node7") -> None:
        label_node(LABEL, node, {"cause": "XID 79"}, self.account, self.env)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key and the certificate of an authority for 127.0.0.1, which signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no program openssl")
    folder = tmp_path_factory.mktemp("authority")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out ca.crt -days 2"
    )
    subprocess.run(
        [*command.split(), "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def api(certificate: Path, tmp_path: Path) -> Iterator[Api]:
    account = tmp_path / "account"
    account.mkdir()
    shutil.copy(certificate / "ca.crt", account)
    (account / "token").write_text(f"{TOKEN}\n")
    found = Api(account, {}, [(200, {})])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.requests.append((self.command, self.path, dict(self.headers), body))
            status, answer = found.answers[0]
            found.answers = found.answers[1:] or found.answers
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "ca.crt", certificate / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        found.env = {node_label.HOST_OF_API: "127.0.0.1", node_label.PORT_OF_API: str(server.server_address[1])}
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield found
        server.shutdown()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_label, "RETRY_SECONDS", (0.01, 0.01))


def test_a_node_gets_the_label_and_the_cause_by_one_merge_patch(api: Api) -> None:
    api.label("ip-10-0-0-7.ec2.internal")
    ((method, path, headers, body),) = api.requests
    assert (method, path) == ("PATCH", "/api/v1/nodes/ip-10-0-0-7.ec2.internal")
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert headers["Authorization"] == f"Bearer {TOKEN}"
    assert body["metadata"]["labels"] == {"example.com/gpu-health": "bad"}
    assert json.loads(body["metadata"]["annotations"]["meshwright/excluded"]) == {"cause": "XID 79"}


def test_the_name_of_a_node_is_no_path(api: Api) -> None:
    api.label("../pods/a?b")
    assert api.requests[0][1] == "/api/v1/nodes/..%2Fpods%2Fa%3Fb"


def test_a_refusal_has_the_reason_of_kubernetes_and_is_not_repeated(api: Api) -> None:
    api.answers = [(403, {"message": 'nodes "node7" is forbidden'})]
    with pytest.raises(OSError, match='Kubernetes does not label node node7: 403 nodes "node7" is forbidden'):
        api.label()
    assert len(api.requests) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_api_is_asked_again(api: Api, status: int) -> None:
    api.answers = [(status, {"message": "later"}), (status, {"message": "later"}), (200, {})]
    api.label()
    assert len(api.requests) == 3
    api.answers = [(status, {"message": "later"})]
    with pytest.raises(OSError, match=f"{status} later"):
        api.label()
    assert len(api.requests) == 6


def test_an_api_with_another_certificate_gets_no_token(api: Api, tmp_path: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout other.pem -days 2 -out"
    out = str(api.account / "ca.crt")
    subprocess.run([*command.split(), out, "-subj", "/CN=api"], cwd=tmp_path, check=True, capture_output=True)
    with pytest.raises(OSError, match="cannot be asked: .*certificate verify failed"):
        api.label()
    assert api.requests == []


def test_a_missing_api_or_account_is_said(api: Api) -> None:
    with pytest.raises(OSError, match="this is no pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set"):
        label_node(LABEL, "node7", {}, api.account, {})
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        with pytest.raises(OSError, match="cannot be asked: .*refused"):
            label_node(LABEL, "node7", {}, api.account, {**api.env, node_label.PORT_OF_API: port})
    (api.account / "token").unlink()
    with pytest.raises(OSError, match="No such file or directory: .*token"):
        api.label()


@pytest.mark.parametrize(
    "text",
    ["health", "=bad", "a b=c", "example.com/=x", "-a=b", f"{'k' * 64}=v", f"k={'v' * 64}", "k=a/b", "A.com/x=y"],
)
def test_labels_that_kubernetes_would_refuse_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected KEY=VALUE"):
        parsed(text)


def test_a_label_of_hyperpod_is_one() -> None:
    text = "sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement"
    assert parsed(text) == ("sagemaker.amazonaws.com/node-health-status", "UnschedulablePendingReplacement")
    assert parsed("drained=") == ("drained", "")


def test_the_reporter_labels_the_node_of_an_excluded_host(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(make_tiny(tmp_path))
    run = replace(run, supervision=replace(run.supervision, report_label="example.com/gpu-health=bad"))
    monkeypatch.setattr(
        defect_report, "label_node", lambda label, node, cause: label_node(label, node, cause, api.account, api.env)
    )
    with closing(DefectReporter(run)) as reporter:
        reporter("node7/1", "is not healthy: GPU 3: XID 79")
    ((_, path, _, body),) = api.requests
    assert path == "/api/v1/nodes/node7" and body["metadata"]["labels"] == {"example.com/gpu-health": "bad"}
    cause = json.loads(body["metadata"]["annotations"]["meshwright/excluded"])
    assert cause["run"] == run.name and cause["cause"] == "is not healthy: GPU 3: XID 79"
    api.answers = [(403, {"message": "forbidden"})]
    with closing(DefectReporter(run)) as reporter:
        reporter("node7/1", "it failed")
    assert (
        "meshwright: supervision.report_label: Kubernetes does not label node node7: 403 forbidden"
        in capfd.readouterr().err
    )
