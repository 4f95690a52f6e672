"""Labels the Kubernetes node of a pod, with the rights of the pod's service account."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts the account's token and the certificate of its authority."""
HOST_OF_API = "KUBERNETES_SERVICE_HOST"
"""Environment variable of every pod with the host of the API."""
PORT_OF_API = "KUBERNETES_SERVICE_PORT"
"""Environment variable of every pod with its port."""
CAUSE_ANNOTATION = "meshwright/excluded"
"""Annotation of a labelled node: run, cause and time as JSON."""
ANSWER_SECONDS = 10.0
"""Longest time for a connection to the API, and for its answer."""
RETRY_SECONDS = (1.0, 5.0)
"""Waits before further attempts, if the API is not reached or overloaded."""
ANSWER_BYTES = 1 << 16


def label_node(
    label: tuple[str, str],
    node: str,
    cause: Mapping[str, object],
    account: Path = ACCOUNT,
    env: Mapping[str, str] = os.environ,
) -> None:
    """Give a node a label, and `cause` as an annotation. Raises OSError with the reason if Kubernetes does not do it."""
    if not env.get(HOST_OF_API):
        raise OSError(f"this is no pod of Kubernetes: {HOST_OF_API} is not set")
    key, value = label
    metadata = {"labels": {key: value}, "annotations": {CAUSE_ANNOTATION: json.dumps(cause)}}
    body = json.dumps({"metadata": metadata}).encode()
    for wait in (*RETRY_SECONDS, None):
        try:
            status, answer = _patch(f"/api/v1/nodes/{quote(node, safe='')}", body, account, env)
        except (OSError, http.client.HTTPException) as error:
            failure = OSError(f"the API of Kubernetes cannot be asked: {error}")
        else:
            if status < 300:
                return
            failure = OSError(f"Kubernetes does not label node {node}: {status} {answer}")
            if status < 500 and status != 429:
                raise failure
        if wait is None:
            raise failure
        time.sleep(wait)


def _patch(path: str, body: bytes, account: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Status and message of the answer to a merge patch. The token is read each time: Kubernetes replaces it."""
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    port = int(env.get(PORT_OF_API) or 443)
    headers = {
        "Authorization": f"Bearer {(account / 'token').read_text(encoding='ascii').strip()}",
        "Content-Type": "application/merge-patch+json",
    }
    connection = http.client.HTTPSConnection(env[HOST_OF_API], port, timeout=ANSWER_SECONDS, context=context)
    with closing(connection):
        connection.request("PATCH", path, body, headers)
        response = connection.getresponse()
        return response.status, _message(response.read(ANSWER_BYTES))


def _message(answer: bytes) -> str:
    """The message of an answer, at most 300 characters of it."""
    try:
        text = str(json.loads(answer).get("message"))
    except (ValueError, AttributeError):
        text = answer.decode("utf-8", "replace")
    return text[:300]
