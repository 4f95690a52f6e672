"""Settings of the HTTP server: the keys of a `serve.yaml` and the options of `meshwright serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.spec.fields import Bound, Positive

Port = Annotated[int, Bound(at_least=0, at_most=65_535)]


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen at; one that is not loopback needs `api_key`."""
    port: Port = 8000
    """Port of the API; 0 takes a free one."""
    api_key: str | None = None
    """Key that all paths but /health need, as `Authorization: Bearer KEY`; MESHWRIGHT_API_KEY sets it too."""
    admin_port: Port | None = None
    """Port for pause and drain; none has no such port."""
    admin_key: str | None = None
    """Key of the admin port, which needs one; MESHWRIGHT_ADMIN_KEY sets it too."""
    name: str | None = None
    """Name of the model for clients; the folder's name if none."""
    chat_template: str | None = None
    """File with the Jinja template of chats; that of the model's folder if none."""
    sequences: Positive = 256
    """Requests in a batch at most."""
    queue: Positive = 1024
    """Requests that may wait beside those in the batch; more are answered with 429."""
    step_tokens: Positive = 8192
    """Tokens of a step at most; a longer prompt is computed in chunks."""
    tokens_per_block: Positive = 16
    """Tokens in a block of the cache."""
    cache_blocks: Positive | None = None
    """Blocks in the cache; none takes as many as fit the device."""
    context: Positive | None = None
    """Longest text in tokens, prompt and new tokens together; none is the model's context."""
    prefix_cache: bool = True
    """Whether requests share cached blocks of equal prefixes."""
    max_body_bytes: Positive = 8 << 20
    """Longest body of a request."""
    max_new_tokens: Positive | None = None
    """Largest `max_tokens` of a request; none is the context."""
    max_choices: Positive = 16
    """Largest `n` of a request times its number of prompts."""
    max_logprobs: Annotated[int, Bound(at_least=0, at_most=20)] = 20
    """Largest `top_logprobs` of a request."""
    max_stop_strings: Positive = 16
    """Most stop strings of a request."""
    drain_seconds: Annotated[float, Bound(at_least=0)] = 30.0
    """Longest time that SIGTERM waits for running requests."""
    log_requests: bool = True
    """Whether each request is logged on stderr: number, path, status, tokens and seconds; never its text."""
