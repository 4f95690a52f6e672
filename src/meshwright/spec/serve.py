"""Settings of the HTTP server: the keys of a `serve.yaml` and the options of `meshwright serve`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from meshwright.spec.deployment import Role
from meshwright.spec.engine import EngineSettings
from meshwright.spec.errors import BadInput, raise_together
from meshwright.spec.fields import Bound, NotNegative, Positive

MTP = "mtp"
"""Value of `draft_model` that chooses the model's own modules for multi-token prediction."""
Port = Annotated[int, Bound(at_least=0, at_most=65_535)]
NotationName = Literal[
    "think",
    "hermes",
    "qwen3_coder",
    "glm",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "harmony",
    "llama3",
    "llama4",
    "lfm2",
    "mistral",
    "gemma",
    "minimax",
    "seed",
]
"""How a model writes its reasoning and its tool calls."""


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Addresses, keys and limits of the server."""

    host: str = "127.0.0.1"
    """Address at which it listens; an address that is not loopback needs `api_key`."""
    port: Port = 8000
    """Port of the API; 0 chooses a free one."""
    api_key: str | None = None
    """Key that all paths except /health need, as `Authorization: Bearer KEY`; MESHWRIGHT_API_KEY sets it too."""
    admin_port: Port | None = None
    """Port for new weights, pause and drain; none: there is no such port."""
    admin_key: str | None = None
    """Key of the admin port, which must have one; MESHWRIGHT_ADMIN_KEY sets it too."""
    name: str | None = None
    """Name of the model for clients; none is the name of the folder."""
    chat_template: str | None = None
    """File with the Jinja template of chats; none is the template in the model's folder."""
    generation_config: Literal["auto", "none"] = "auto"
    """Whether sampling values in the folder's generation_config.json are defaults of requests. auto: they are. none:
    they are not.
    """
    notation: Literal["auto", "none", NotationName] = "auto"
    """How the model writes reasoning and tool calls; auto detects it from the chat template, none leaves both in the text."""
    follow: bool = False
    """Whether each new checkpoint of a run is served as soon as it is committed."""
    follow_seconds: Annotated[float, Bound(more_than=0)] = 5.0
    """Time between two checks for a new checkpoint."""
    queue: Positive = 1024
    """Maximum number of requests that may wait, in addition to those in the batch.

    Further requests are answered with 429.
    """
    max_body_bytes: Positive = 8 << 20
    """Maximum number of bytes of the body of a request."""
    max_new_tokens: Positive | None = None
    """Largest `max_tokens` of a request; none is the context."""
    max_choices: Positive = 128
    """Largest `n` of a request times its number of prompts.

    OpenAI allows 128, and LangChain sends 20 prompts in a request.
    """
    max_logprobs: Annotated[int, Bound(at_least=0, at_most=20)] = 20
    """Largest `top_logprobs` of a request."""
    max_stop_strings: Positive = 16
    """Maximum number of stop strings of a request."""
    drain_seconds: Annotated[float, Bound(at_least=0)] = 30.0
    """Longest time for which running requests may continue after SIGTERM."""
    page: bool = True
    """Whether a browser gets a page at `/`, on which one can talk to the model and see its load."""
    log_requests: bool = True
    """Whether each request except /health is logged on stderr: number, path, status, tokens and seconds, but never its
    text.
    """


@dataclass(frozen=True, kw_only=True)
class ServeSpec(EngineSettings, HttpSettings):
    """How a model is served. Raises BadInput for settings that exclude each other."""

    adapter: str | None = None
    """Adapters that are merged into the weights when they are loaded: a folder with peft's files, or a run with
    adapters.
    """
    speculate: NotNegative = 0
    """Maximum number of draft tokens of a request that a step verifies (speculative decoding).

    0: none, but 4 with a `draft_model`, or 1 with `mtp`.
    """
    draft_model: str | None = None
    """Folder of a smaller model that proposes draft tokens.

    `mtp`: the model's own modules propose them. none: the drafts are the tokens that followed the same tokens earlier
    in the sequence.
    """
    tensor: Positive = 1
    """Number of devices of this host over which the engine divides every layer."""
    role: Role = "both"
    """`prefill` computes prompts for other engines.

    `decode` generates answers to prompts that others compute; `both` does whole requests.
    """
    transfer_address: str | None = None
    """Address at which other engines ask for prompts: `unix:PATH` for one host, or HOST:PORT, which needs
    `transfer_key`.
    """
    transfer_key: str | None = None
    """Key that engines show each other; MESHWRIGHT_TRANSFER_KEY sets it too."""
    prefill_engines: str | None = None
    """Transfer addresses of the engines that compute prompts for the role decode, separated by commas."""
    block_cache: str | None = None
    """Address of a `meshwright cache`, in which engines share the blocks of prompts."""
    transfer_seconds: Annotated[float, Bound(more_than=0)] = 30.0
    """Longest time without an answer from another engine.

    After it, a prompt that the other engine computes is computed here, and blocks that it reads are freed.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        raise_together(self._conflicts())

    def _conflicts(self) -> Iterator[BadInput]:
        """Yield the mistakes between settings."""
        if self.adapter is not None and (self.tensor > 1 or self.follow or self.admin_port is not None):
            yield BadInput(
                "adapter: for one device whose weights stay; leave out tensor, follow and admin_port", key="adapter"
            )
        names = ("invariant", "speculate", "draft_model")
        given = [name for name in names if getattr(self, name)]
        if self.tensor > 1 and given:
            yield BadInput(f"{' and '.join(given)}: for one device only; leave out tensor", key="tensor")
        if not self.exchanges:
            return
        if self.draft_model not in (None, MTP) or not self.prefix_cache:
            key = "draft_model" if self.prefix_cache else "prefix_cache"
            yield BadInput("roles: for an engine with a prefix cache and no draft_model", key=key)
        if self.role == "prefill" and self.transfer_address is None:
            yield BadInput("role prefill: needs transfer_address, where others ask for prompts", key="role")
        if self.role == "decode" and not self.prefill_addresses:
            yield BadInput("role decode: needs prefill_engines, which compute its prompts", key="role")

    @property
    def exchanges(self) -> bool:
        """Return whether the engine exchanges blocks with others."""
        return self.role != "both" or any((self.transfer_address, self.prefill_engines, self.block_cache))

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """Return the addresses in `prefill_engines`."""
        return tuple(address.strip() for address in (self.prefill_engines or "").split(",") if address.strip())

    @property
    def engine(self) -> dict[str, Any]:
        """Return the fields of `EngineSettings` by name."""
        return {field.name: getattr(self, field.name) for field in fields(EngineSettings)}
