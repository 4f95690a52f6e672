"""Endpoints of the API: reading of their requests, and their answers."""

from __future__ import annotations

import asyncio
import html
import itertools
import secrets
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import __version__
from meshwright.events.exposition import CONTENT_TYPE
from meshwright.server.answer import TextAnswer
from meshwright.server.bodies import ChatBody, CompletionBody, TokenTexts
from meshwright.server.chat_messages import read_messages
from meshwright.server.chat_template import ChatTemplate
from meshwright.server.engine_client import EngineClient
from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields, checked_text, parse_object
from meshwright.server.model_files import ModelFiles
from meshwright.server.replies import ContentResponse, json_response, read_body
from meshwright.server.text_request import Limits, TextRequest, check_prompts, read_shared, schema_grammar, token_ids
from meshwright.server.tool_calls import CallFormat, Notation, template_notation
from meshwright.server.tools import Tools, read_tools
from meshwright.spec.deployment import Role
from meshwright.spec.errors import attach_key
from meshwright.spec.serve import ServeSpec

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
    ),
    (b"x-frame-options", b"DENY"),
]
LONG_TEXT = 8_192
"""Characters from which a text is tokenised in a thread, so that other answers do not wait."""
RETRY_SECONDS = 1
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in /v1/completions."""


class Api:
    """The state and endpoints of one server."""

    def __init__(self, spec: ServeSpec, name: str, files: ModelFiles, client: EngineClient) -> None:
        """`name` is the model's for clients. Raises BadInput for a chat template that cannot be used."""
        self.spec, self.name, self.files, self.client = spec, name, files, client
        source = files.chat_template
        with nullcontext() if spec.chat_template is None else attach_key("chat_template"):
            self.template = None if source is None else ChatTemplate(source, files.special_tokens)
        self._notation = _notation(spec, source)
        self.draining = False
        """Whether new requests are refused, while those that run go on."""
        self.role: Role = spec.role
        self._created = int(time.time())
        self._texts = TokenTexts(files.tokenizer)
        self._unique = secrets.token_hex(6)
        self._numbers = itertools.count()

    async def completions(self, request: Request) -> ASGIApp:
        """Continues prompts."""
        fields, limits = await self._read(request), self._limits()
        logprobs = fields.integer("logprobs", 0, self.spec.max_logprobs, None)
        shared = read_shared(fields, limits, logprobs=logprobs, new_tokens=DEFAULT_COMPLETION_TOKENS)
        shared.echo = fields.flag("echo")
        if shared.echo and logprobs is not None:
            raise RequestError(
                400, "echo: log probabilities of prompts are not supported; leave out logprobs", param="echo"
            )
        special = fields.flag("add_special_tokens", True)
        prompts = fields.take("prompt")
        if fields.text("suffix", ""):
            raise RequestError(400, "suffix: text between a prompt and a suffix is not supported", param="suffix")
        fields.finish()
        shared.prompts = await self._prompts(prompts, limits, special=special)
        return self._answer(shared, limits, CompletionBody, request)

    async def chat_completions(self, request: Request) -> ASGIApp:
        """The next message of a chat, by the model's chat template."""
        fields, limits = await self._read(request), self._limits()
        if self.template is None:
            raise RequestError(
                400,
                "messages: the model has no chat template; use /v1/completions, or start the server with --chat-template",
            )
        most = fields.integer("top_logprobs", 0, self.spec.max_logprobs, None)
        wanted = fields.flag("logprobs")
        if most is not None and not wanted:
            raise RequestError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
        shared = read_shared(fields, limits, logprobs=(most or 0) if wanted else None, new_tokens=None)
        messages, tools = read_messages(fields.take("messages")), read_tools(fields)
        self._find_calls(shared, tools)
        prompt = fields.flag("add_generation_prompt", True)
        variables = fields.take("chat_template_kwargs")
        if variables is not None and not isinstance(variables, dict):
            raise wrong("chat_template_kwargs", "an object", variables)
        fields.finish()
        text = self.template.render(messages, tools.tools, variables, add_generation_prompt=prompt)
        shared.prompts = [await self._encode(text, special=False)]
        return self._answer(shared, limits, ChatBody, request)

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
        fields = await self._read(request)
        fields.ignore("model")
        special = fields.flag("add_special_tokens", True)
        names = fields.flag("return_token_strs")
        if fields.has("messages") and self.template is not None:
            prompt = fields.flag("add_generation_prompt", True)
            text = self.template.render(
                read_messages(fields.take("messages")), read_tools(fields).tools, add_generation_prompt=prompt
            )
            special = False
        else:
            text = fields.text("prompt", None)
        fields.finish()
        if text is None:
            raise wrong("prompt", "text", None)
        ids = await self._encode(text, special=special)
        strings = [self.files.tokenizer.id_to_token(id) for id in ids] if names else None
        return json_response(
            {"count": len(ids), "max_model_len": self._limits().context, "tokens": ids, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> ASGIApp:
        """The text of `tokens`."""
        fields = await self._read(request)
        fields.ignore("model")
        tokens = token_ids(fields.take("tokens"), "tokens", self._limits().vocab)
        fields.finish()
        return json_response({"prompt": self.files.tokenizer.decode(tokens, skip_special_tokens=False)})

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
        content = self.client.metrics.text(self.client.figures, self.client.transfers).encode()
        return ContentResponse(200, content, [(b"content-type", CONTENT_TYPE.encode("ascii"))])

    async def page(self, request: Request) -> ASGIApp:
        """A page to talk to the model and see its load."""
        content = PAGE.read_bytes().replace(b"MODEL_NAME", html.escape(self.name).encode())
        content = content.replace(b"HAS_CHAT", b"false" if self.template is None else b"true")
        return ContentResponse(200, content, PAGE_HEADERS)

    @property
    def state(self) -> str:
        """State of the server: loading, ready, paused, draining or failed."""
        if self.client.failure is not None:
            return "failed"
        if self.client.ready is None:
            return "loading"
        if self.draining:
            return "draining"
        return "paused" if self.client.paused else "ready"

    async def _read(self, request: Request) -> Fields:
        """The keys of the body, once it is clear that the request can be taken."""
        if (state := self.state) not in ("ready", "paused"):
            self.client.metrics.rejected += 1
            wait = None if state == "failed" else RETRY_SECONDS
            raise RequestError(503, f"the server is {state}", code=state, retry_after=wait)
        return parse_object(await read_body(request, self.spec.max_body_bytes))

    def _limits(self) -> Limits:
        ready = self.client.ready
        assert ready is not None
        return Limits(self.spec, self.name, ready["context"], ready["vocab"], self.files.stop_ids)

    def _answer(self, shared: TextRequest, limits: Limits, body: type[CompletionBody], request: Request) -> TextAnswer:
        """The answer to a request that has passed all checks; the queue must have room for it."""
        check_prompts(shared, limits)
        if self.role == "prefill":
            self.client.metrics.rejected += 1
            raise RequestError(503, "this engine computes prompts for others", code="role", retry_after=RETRY_SECONDS)
        waiting = self.client.unfinished - self.spec.sequences
        if waiting + len(shared.prompts) * shared.count > self.spec.queue:
            self.client.metrics.rejected += 1
            raise RequestError(
                429, f"{max(waiting, 0)} requests are waiting; try again later", retry_after=RETRY_SECONDS
            )
        number = f"{self._unique}{next(self._numbers):x}"
        shown = body(number, int(time.time()), self.name, self._texts, with_usage=shared.include_usage)
        answer = TextAnswer(self.client, self.files.tokenizer, shared, shown, limits.context)
        request.scope["meshwright"] = {"prompt_tokens": shared.prompt_tokens, "answer": answer}
        return answer

    def _find_calls(self, shared: TextRequest, tools: Tools) -> None:
        """Let the texts of a request have calls of tools, by a grammar if there must be some."""
        if tools.schema is not None:
            if shared.grammar is not None:
                raise RequestError(
                    400, "response_format: excludes a tool_choice that needs calls", param="response_format"
                )
            shared.grammar, shared.grammar_key = schema_grammar(tools.schema, "tools"), "tools"
            shared.calls = CallFormat("array", tools.parallel)
        elif tools.tools is not None and shared.grammar is None and self._notation is not None:
            shared.calls = CallFormat(self._notation, tools.parallel)

    async def _prompts(self, value: object, limits: Limits, *, special: bool) -> list[list[int]]:
        """Token ids of each prompt: `value` is text, a list of texts, token ids, or a list of lists of them."""
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not value:
            raise wrong("prompt", "text, token ids, or a list of either", value)
        if isinstance(value[0], int):
            value = [value]
        if len(value) > self.spec.max_choices:
            raise wrong("prompt", f"at most {self.spec.max_choices} prompts", value)
        prompts = []
        for prompt in value:
            if isinstance(prompt, str):
                prompts.append(await self._encode(checked_text(prompt, "prompt"), special=special))
            else:
                prompts.append(token_ids(prompt, "prompt", limits.vocab))
        return prompts

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        tokenizer = self.files.tokenizer
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=special).ids
        return (await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)).ids

    def _model(self) -> dict[str, Any]:
        ready = self.client.ready
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "meshwright",
            "max_model_len": None if ready is None else ready["context"],
        }


def _notation(spec: ServeSpec, template: str | None) -> Notation | None:
    """The notation of tool calls by the settings or the chat template."""
    if spec.tool_calls != "auto":
        return None if spec.tool_calls == "none" else spec.tool_calls
    return None if template is None else template_notation(template)
