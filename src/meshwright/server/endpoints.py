"""Endpoints of the API: they take requests and make their answers."""

from __future__ import annotations

import asyncio
import html
import itertools
import secrets
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright import __version__
from meshwright.data.token_bytes import TokenBytes
from meshwright.events.exposition import CONTENT_TYPE
from meshwright.server.answer import TextAnswer
from meshwright.server.bodies import ChatBody, CompletionBody, ResponseBody
from meshwright.server.engine_client import EngineClient
from meshwright.server.errors import RequestError
from meshwright.server.messages_body import MessagesBody
from meshwright.server.model_files import ModelFiles, check_same_texts
from meshwright.server.own_answers import OwnAnswers
from meshwright.server.replies import JSON_HEADERS, ContentResponse, client_left, json_response, read_body
from meshwright.server.request_reader import RequestReader, chat_template
from meshwright.server.responses_body import ResponsesBody
from meshwright.server.scores import scored
from meshwright.server.text_process import RENDERS
from meshwright.server.text_request import CheckedTextRequest
from meshwright.server.text_workers import Sizes, TextWorkers
from meshwright.spec.deployment import Role
from meshwright.spec.serve import ServeSpec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

T = TypeVar("T")
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    (b"x-frame-options", b"DENY"),
]
OWN_BODY = 4 << 10
"""Maximum number of bytes of a body that this process reads itself, in 1 to 3 ms, if it renders no template.

A text process reads all other bodies.
"""
RETRY_SECONDS = 1


class Api:
    """The state and endpoints of one server."""

    def __init__(self, spec: ServeSpec, name: str, files: ModelFiles, client: EngineClient) -> None:
        """`name` is the model's for clients. Raises BadInput for a chat template that cannot be used."""
        self.spec = spec
        self.name = name
        self.files = files
        self.client = client
        self.has_template = chat_template(spec, files) is not None
        self.workers = TextWorkers(spec, name, files)
        self.draining = False
        """Whether new requests are refused while running requests go on."""
        self.role: Role = spec.role
        self._created = int(time.time())
        self._tokens = TokenBytes(files.tokenizer)
        self._own_answers = OwnAnswers(self._tokens)
        self._unique = secrets.token_hex(6)
        self._numbers = itertools.count()

    async def load(self, folder: Path) -> None:
        """Use newer weights from the next step on. Raises BadInput if they cannot be used, or are for texts of another format."""
        await asyncio.to_thread(check_same_texts, folder, self.files.text)
        await self.client.load(folder)

    async def completions(self, request: Request) -> ASGIApp:
        """Continues prompts."""
        self._refuse_if_full(1)
        return self._answer(await self._read(request, RequestReader.completion), CompletionBody, request)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """The next message of a chat, by the model's chat template."""
        self._refuse_if_full(1)
        return self._answer(await self._read(request, RequestReader.chat), ChatBody, request)

    async def responses(self, request: Request) -> ASGIApp:
        """The next answer of a conversation, in the form of OpenAI's Responses API; nothing is kept."""
        self._refuse_if_full(1)
        return self._answer(await self._read(request, RequestReader.responses), ResponsesBody, request)

    async def messages(self, request: Request) -> ASGIApp:
        """The next message of a chat, in the form of Anthropic's Messages API."""
        self._refuse_if_full(1)
        return self._answer(await self._read(request, RequestReader.messages), MessagesBody, request)

    async def count_tokens(self, request: Request) -> ASGIApp:
        """The number of tokens of a prompt of /v1/messages."""
        return ContentResponse(200, await self._read(request, RequestReader.count_tokens), JSON_HEADERS)

    async def score(self, request: Request) -> ASGIApp:
        """The scores of texts or conversations, by a reward model."""
        self._refuse_if_full(1)
        texts = await self._read(request, RequestReader.score)
        if not self._scores:
            raise RequestError(400, "this is a language model, which writes texts; a reward model gives scores")
        self._refuse_if_full(len(texts.prompts))
        return await scored(self.client, self.name, texts, request)

    async def models(self, request: Request) -> ASGIApp:
        """The model that is served."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> ASGIApp:
        """The model of that name."""
        if request.path_params["name"] != self.name:
            raise RequestError(
                404, f"there is no such model here; the one served is {self.name}", code="model_not_found"
            )
        return json_response(self._model())

    async def tokenize(self, request: Request) -> ASGIApp:
        """The tokens of a text (`prompt`) or of a chat (`messages`)."""
        return ContentResponse(200, await self._read(request, RequestReader.tokenize), JSON_HEADERS)

    async def detokenize(self, request: Request) -> ASGIApp:
        """The text of `tokens`."""
        return ContentResponse(200, await self._read(request, RequestReader.detokenize), JSON_HEADERS)

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """The tokens that begin, end and fill texts, and the chat template, as lm-eval asks for them."""
        length = None if self.client.ready is None else self.client.ready["context"]
        shown = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
        return json_response({**shown, **self.files.special_tokens, "chat_template": self.files.chat_template})

    async def health(self, request: Request) -> ASGIApp:
        """200 while requests are taken, else 503 with the reason."""
        state = self.state
        if state in ("ready", "paused"):
            return json_response({"status": state, "role": self.role})
        return json_response({"status": state}, 503)

    async def version(self, request: Request) -> ASGIApp:
        """The version of Meshwright."""
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> ASGIApp:
        """Figures for Prometheus."""
        self.client.metrics.own_answers = self._own_answers.results
        content = self.client.metrics.text(self.client.figures, self.client.transfers).encode()
        return ContentResponse(200, content, [(b"content-type", CONTENT_TYPE.encode("ascii"))])

    async def page(self, request: Request) -> ASGIApp:
        """A page to talk to the model and see its load."""
        content = PAGE.read_bytes().replace(b"MODEL_NAME", html.escape(self.name).encode())
        content = content.replace(b"HAS_CHAT", b"true" if self.has_template else b"false")
        return ContentResponse(200, content, PAGE_HEADERS)

    @property
    def state(self) -> str:
        """State of the server: loading, ready, paused, draining, unhealthy (the model gives no finite logits) or failed."""
        if self.client.failure is not None:
            return "failed"
        if self.client.ready is None:
            return "loading"
        if self.draining:
            return "draining"
        if self.client.probe.failing:
            return "unhealthy"
        return "paused" if self.client.paused else "ready"

    async def _read(self, request: Request, read: Callable[[RequestReader, bytes], T]) -> T:
        """The result of `read` for the body, in this process or a text process, after a check that the request can be taken."""
        if (state := self.state) not in ("ready", "paused"):
            self.client.metrics.rejected += 1
            wait = None if state == "failed" else RETRY_SECONDS
            raise RequestError(503, f"the server is {state}", code=state, retry_after=wait)
        body = await read_body(request, self.spec.max_body_bytes)
        may_render = self.has_template and read in RENDERS
        if len(body) <= OWN_BODY and not may_render:
            return read(self._reader, body)
        reading = asyncio.ensure_future(self.workers.read(read, body, self._sizes))
        leaving = asyncio.ensure_future(client_left(request.receive))
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not reading.done():
                reading.cancel()
        if reading.cancelled() or not reading.done():
            raise RequestError(400, "the client has closed the connection")
        return reading.result()

    @cached_property
    def _sizes(self) -> Sizes:
        """Sizes of the engine, which is ready."""
        assert self.client.ready is not None
        return Sizes(self.client.ready["context"], self.client.ready["vocab"])

    @cached_property
    def _reader(self) -> RequestReader:
        """The reader of requests in this process; it renders no template. The engine is ready."""
        return RequestReader(self.spec, self.name, self.files, None, self._sizes.context, self._sizes.vocab)

    @property
    def _scores(self) -> bool:
        """Whether the model is a reward model; the engine is ready."""
        assert self.client.ready is not None
        return "scores" in self.client.ready

    def _refuse_if_full(self, texts: int) -> None:
        """Raise RequestError if the queue has no room for so many texts."""
        waiting = self.client.unfinished - self.spec.sequences
        if waiting + texts > self.spec.queue:
            self.client.metrics.rejected += 1
            message = f"{max(waiting, 0)} requests are waiting; try again later"
            raise RequestError(429, message, retry_after=RETRY_SECONDS)

    def _answer(self, shared: CheckedTextRequest, body: type[ResponseBody], request: Request) -> TextAnswer:
        """The answer to a request that has passed all checks; the queue must have room for it."""
        if self.role == "prefill":
            self.client.metrics.rejected += 1
            raise RequestError(503, "this engine computes prompts for others", code="role", retry_after=RETRY_SECONDS)
        if self._scores:
            raise RequestError(400, "this is a reward model, which writes no text; use /score")
        self._refuse_if_full(len(shared.prompts) * shared.count)
        self.client.metrics.ignored.update(shared.ignored)
        number = f"{self._unique}{next(self._numbers):x}"
        shown = body(number, int(time.time()), self.name, shared)
        keep = None
        if body is not CompletionBody and len(shared.prompts) * shared.count == 1:
            (prompt,) = shared.prompts = [self._own_answers.replaced(shared.prompts[0], shared.salt)]
            keep = partial(self._own_answers.keep, prompt, salt=shared.salt)
        answer = TextAnswer(self.client, self._tokens, shared, shown, self._sizes.context, keep)
        request.scope["meshwright"] = {"prompt_tokens": shared.prompt_tokens, "answer": answer}
        return answer

    def _model(self) -> dict[str, Any]:
        ready = self.client.ready
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "meshwright",
            "max_model_len": None if ready is None else ready["context"],
            "default_sampling": self.files.sampling,
            **_by_name(self.client.weights),
        }


def _by_name(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Chosen.facts` says of the weights, with names of checkpoints in place of paths, which are not for clients."""
    shown = dict(weights)
    if "checkpoint" in weights:
        shown["checkpoint"] = Path(weights["checkpoint"]).name
    if "damaged_checkpoints" in weights:
        shown["damaged_checkpoints"] = [
            {"checkpoint": Path(each["path"]).name, "reason": each["reason"]} for each in weights["damaged_checkpoints"]
        ]
    return shown
