"""Turns request bodies into checked requests with token ids, or directly into answers.

This module needs no torch, HTTP or engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

from meshwright.data.spelled_tokens import ChatText, SpelledTokens
from meshwright.server.agent_fields import AgentFields
from meshwright.server.chat_messages import read_messages
from meshwright.server.chat_template import ServedChatTemplate
from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import Fields, checked_text, parse_object
from meshwright.server.forced_calls import behind_reasoning, calls_grammar
from meshwright.server.grammar_request import schema_grammar
from meshwright.server.messages_request import counted, read_messages_body
from meshwright.server.model_files import ModelFiles
from meshwright.server.notations import NOTATIONS, template_notation
from meshwright.server.output_reader import OutputFormat
from meshwright.server.responses_request import read_responses_body, shown_request
from meshwright.server.score_request import read_score_request
from meshwright.server.text_request import (
    ONLY_DEFAULTS,
    CheckedTextRequest,
    RequestLimits,
    check_prompts,
    read_shared,
    token_ids,
    too_long,
)
from meshwright.server.tools import Tools, calls_schema, parameter_types, read_tools
from meshwright.spec.errors import attach_key
from meshwright.spec.serve import NotationName, ServeSpec

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in /v1/completions."""


EFFORT = "reasoning_effort"
"""Chat key for the reasoning effort. Some templates have a variable of this name."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which other templates switch reasoning on and off. The effort "none" sets them to false, any other to true."""


class RequestReader:
    """Reads the bodies of requests for one model. Every method raises RequestError for a body that cannot be used."""

    def __init__(
        self,
        spec: ServeSpec,
        model: str,
        files: ModelFiles,
        template: ServedChatTemplate | None,
        context: int,
        vocab: int,
    ) -> None:
        """`model`: the model's name in the API.
        `template`: result of `chat_template`, compiled once and shared by several readers; None if the model has none.
        `context`: maximum number of tokens of prompt and answer together.
        `vocab`: token ids are below this number.
        """
        self._files = files
        self._template = template
        self._tokenizer = files.tokenizer
        self._limits = RequestLimits(spec, model, files, context, vocab)
        described = f"{files.tool_template or files.chat_template or ''}\n{files.answer_marks}"
        self._notation = _notation(spec, described)
        marks = None if self._notation is None else NOTATIONS[self._notation].reasoning
        self._reasoning_marks = marks if marks is not None and any(mark in described for mark in marks) else None

    @cached_property
    def _spelled(self) -> SpelledTokens:
        """Encodes prompts so that text in a message that looks like a special token does not become one."""
        return SpelledTokens(self._tokenizer, self._files.special_tokens.values())

    def completion(self, body: bytes) -> CheckedTextRequest:
        """Return the checked request of a body of /v1/completions."""
        fields = parse_object(body)
        limits = self._limits
        # The key is a number in this API. Some clients send false, the default of the chat API; it counts as absent.
        given = fields.take("logprobs") is not False
        logprobs = fields.integer("logprobs", 0, limits.spec.max_logprobs, None) if given else None
        echo = fields.flag("echo")
        request = read_shared(fields, limits, logprobs=logprobs, new_tokens=DEFAULT_COMPLETION_TOKENS, echo=echo)
        special = fields.flag("add_special_tokens", True)
        prompts = fields.take("prompt")
        if fields.text("suffix", ""):
            raise RequestError(400, "suffix: text between a prompt and a suffix is not supported", param="suffix")
        fields.finish(ONLY_DEFAULTS)
        prompts = self._listed(prompts)
        request.prompts = [self._prompt(prompt, special=special) for prompt in prompts]
        check_prompts(request, limits, "prompt")
        if echo:
            request.echoes = [self._text(prompt) for prompt in prompts]
        return request

    def chat(self, body: bytes) -> CheckedTextRequest:
        """Return the checked request of a body of /v1/chat/completions."""
        return self._chat(parse_object(body))

    def _chat(self, fields: Fields, *, of_agent: bool = False, fits: bool = True) -> CheckedTextRequest:
        """Return the checked request of a chat request.

        `of_agent`: the request was translated from another API; a reasoning effort that the template does not know is
        then ignored instead of refused. `fits`: raise RequestError if the prompt leaves no room for a new token.
        """
        limits = self._limits
        template = self._chat_template()
        most = fields.integer("top_logprobs", 0, limits.spec.max_logprobs, None)
        wanted = fields.flag("logprobs")
        if most and not wanted:
            raise RequestError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
        request = read_shared(fields, limits, logprobs=(most or 0) if wanted else None, new_tokens=None)
        tools = read_tools(fields)
        limited = request.grammar is not None or tools.forced is not None
        write = _prompt_writer(fields, template, tools, self._spelled, limited=limited)
        if of_agent:
            fields.ignore(EFFORT)
        fields.finish(ONLY_DEFAULTS)
        in_notation = self._force_calls(request, tools)
        prompt = write()
        if fits:
            self._check_length(prompt.text, "messages")
        request.output = self._output(request, tools, prompt.text, in_notation=in_notation)
        request.prompts = [self._spelled.encode(prompt)]
        if fits:
            check_prompts(request, limits, "messages")
        return request

    def responses(self, body: bytes) -> CheckedTextRequest:
        """Return the checked request of a body of /v1/responses."""
        return self._of_agent(found := read_responses_body(parse_object(body)), shown_request(found))

    def messages(self, body: bytes) -> CheckedTextRequest:
        """Return the checked request of a body of /v1/messages."""
        return self._of_agent(read_messages_body(parse_object(body)))

    def count_tokens(self, body: bytes) -> bytes:
        """Return the answer to a body of /v1/messages/count_tokens. The prompt may be longer than the context."""
        return counted(self._of_agent(read_messages_body(parse_object(body)), fits=False).prompt_tokens)

    def _of_agent(
        self, body: AgentFields, shown: Mapping[str, Any] | None = None, *, fits: bool = True
    ) -> CheckedTextRequest:
        """Return the checked request of an agent's request.

        `shown` are keys that the answer repeats. Without `fits`, the prompt may be longer than the context.
        """
        most = self._limits.spec.max_new_tokens
        if most is not None and isinstance(given := body.chat.get("max_tokens"), int) and given > most:
            body.chat["max_tokens"] = most  # no error: agents always ask for the same large number
        try:
            request = self._chat(Fields(body.chat), of_agent=True, fits=fits)
        except RequestError as error:
            raise body.renamed(error) from None
        request.ignored = body.ignored
        request.tool_names = body.tool_names
        request.shown = shown or {}
        return request

    def score(self, body: bytes) -> CheckedTextRequest:
        """Return the checked request of a body of /score, whose sequences get scores instead of new tokens."""
        encode = partial(self._ids, special=True)
        return read_score_request(parse_object(body), self._limits, encode, self._whole_chat)

    def _whole_chat(self, messages: object, tools: Any, variables: Any) -> list[int]:
        """Return the tokens of a whole chat, without the beginning of another answer."""
        write = partial(self._chat_template().render, add_generation_prompt=False)
        return self._spelled.encode(self._spelled.write(write, read_messages(messages), tools, variables))

    def tokenize(self, body: bytes) -> bytes:
        """Return the answer to a body of /tokenize: the token ids of its `prompt` (a text) or of its `messages`."""
        fields = parse_object(body)
        fields.ignore("model")
        special = fields.flag("add_special_tokens", True)
        names = fields.flag("return_token_strs")
        if fields.has("messages"):
            write = _prompt_writer(fields, self._chat_template(), read_tools(fields), self._spelled)
            fields.finish()
            ids = self._spelled.encode(write())
        else:
            text = fields.text("prompt", None)
            fields.finish()
            if text is None:
                raise wrong("prompt", "text", None)
            ids = self._ids(text, special=special)
        strings = [self._tokenizer.id_to_token(id) for id in ids] if names else None
        answer = {"count": len(ids), "max_model_len": self._limits.context, "tokens": ids, "token_strs": strings}
        return json.dumps(answer).encode("ascii")

    def detokenize(self, body: bytes) -> bytes:
        """Return the answer to a body of /detokenize: the text of its `tokens`."""
        fields = parse_object(body)
        fields.ignore("model")
        tokens = token_ids(fields.take("tokens"), "tokens", self._limits.vocab)
        fields.finish()
        return json.dumps({"prompt": self._tokenizer.decode(tokens, skip_special_tokens=False)}).encode("ascii")

    def _chat_template(self) -> ServedChatTemplate:
        """Return the chat template. Raises RequestError if the model has none."""
        if self._template is None:
            message = "the model has no chat template; use /v1/completions, or start the server with --chat-template"
            raise RequestError(400, f"messages: {message}", param="messages")
        return self._template

    def _force_calls(self, request: CheckedTextRequest, tools: Tools) -> bool:
        """Set the grammar of a request whose answer must be tool calls; nothing happens for other requests.

        Returns whether the grammar is in the model's own notation of calls. If false, and calls are forced, the grammar
        is a JSON array of calls. Raises RequestError if the request also has a grammar of its own.
        """
        if tools.forced is None:
            return False
        if request.grammar is not None:
            key = request.grammar_key
            raise RequestError(400, f"{key}: excludes a tool_choice that needs calls", param=key)
        request.grammar_key = "tools"
        notation = self._notation
        grammar = None
        if notation is not None:
            grammar = calls_grammar(tools.forced, NOTATIONS[notation], self._special, several=tools.parallel)
        request.grammar = grammar or schema_grammar(calls_schema(tools.forced, several=tools.parallel), "tools")
        return grammar is not None

    @cached_property
    def _special(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def _output(
        self, request: CheckedTextRequest, tools: Tools, prompt: str, *, in_notation: bool
    ) -> OutputFormat | None:
        """Return how to read the answers to a prompt: which notation has calls and reasoning.

        None: all text is content.

        If the prompt has already opened the reasoning, this also changes the request's grammar: it then applies to the
        text after the reasoning.
        """
        forced = tools.forced is not None
        marks = self._reasoning_marks
        if forced and not in_notation:
            return OutputFormat("array", parallel=tools.parallel, named=tools.named, reasons=False)
        inside = marks is not None and prompt.rstrip().endswith(marks[0])
        if self._notation is None:
            return None
        notation = NOTATIONS[self._notation]
        if request.grammar is not None:
            inside = inside and (forced or request.grammar[0] == "json_schema")
            if marks is not None and inside:
                request.grammar = behind_reasoning(request.grammar, marks[1], self._special)
            if not (forced or inside):
                return None
            types = parameter_types(tools.tools or ()) if forced and notation.parameters is not None else {}
            return OutputFormat(
                self._notation, forced, tools.parallel, tools.named, types, reasons=inside, inside=inside
            )
        calls = tools.tools is not None and (bool(notation.patterns) or notation.channels)
        if not (calls or notation.channels or marks):
            return None
        types = {} if notation.parameters is None or not calls else parameter_types(tools.tools or ())
        return OutputFormat(
            self._notation, calls, tools.parallel, types=types, reasons=marks is not None, inside=inside
        )

    def _listed(self, value: object) -> list[Any]:
        """Return the prompts of a body as a list.

        `value` is a text, a list of texts, token ids, or a list of lists of token ids.
        """
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not value:
            raise wrong("prompt", "text, token ids, or a list of either", value)
        if isinstance(value[0], int):
            value = [value]
        most = self._limits.spec.max_choices
        if len(value) > most:
            raise wrong("prompt", f"at most {most} prompts", value)
        return value

    def _prompt(self, prompt: Any, *, special: bool) -> list[int]:
        """Return the token ids of one prompt, which is a text or a list of token ids. Raises RequestError if it is too long."""
        if isinstance(prompt, str):
            self._check_length(checked_text(prompt, "prompt"), "prompt")
            return self._ids(prompt, special=special)
        return token_ids(prompt, "prompt", self._limits.vocab)

    def _text(self, prompt: Any) -> str:
        """Return a prompt as text."""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _check_length(self, text: str, key: str) -> None:
        """Raise RequestError for a text that is certainly too long, without encoding it.

        If `TokenReach` is known, it gives a lower bound for the number of tokens. The text is too long if this bound
        leaves no room in the context for one new token.
        """
        reach = self._files.reach
        context = self._limits.context
        if reach is not None and (least := reach.least_tokens(text)) >= context:
            raise too_long(f"at least {least}", context, key)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text. With `special`, the tokens that begin every text come first."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._files.text.begun(ids) if special else ids


def chat_template(spec: ServeSpec, files: ModelFiles) -> ServedChatTemplate | None:
    """Return the compiled chat template; None if the model has none. Raises BadInput for a template that cannot be used."""
    if files.chat_template is None:
        return None
    with nullcontext() if spec.chat_template is None else attach_key("chat_template"):
        return ServedChatTemplate(files.chat_template, files.special_tokens, files.tool_template)


def _prompt_writer(
    fields: Fields, template: ServedChatTemplate, tools: Tools, spelled: SpelledTokens, *, limited: bool = False
) -> Callable[[], ChatText]:
    """Read the keys of a chat request that its prompt depends on, and return a function that renders the prompt.

    Rendering is expensive, so the caller checks all other keys before it calls that function.

    `limited`: a grammar limits the answer and leaves no room for reasoning. Reasoning is then switched off, unless the
    request asks for it.
    """
    messages = read_messages(fields.take("messages"))
    continued = fields.flag("continue_final_message")
    opens_answer = fields.flag("add_generation_prompt", not continued)
    if continued and opens_answer:
        raise RequestError(
            400, "continue_final_message: needs add_generation_prompt: false", param="continue_final_message"
        )
    variables = fields.take("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise wrong("chat_template_kwargs", "an object", variables)
    if template.knows(EFFORT) and (effort := fields.text(EFFORT, None)) is not None:
        variables = {EFFORT: effort, **(variables or {})}
    elif (fields.has(EFFORT) or limited) and (names := [name for name in SWITCHES if template.knows(name)]):
        effort = fields.text(EFFORT, "none")
        variables = {**dict.fromkeys(names, effort != "none"), **(variables or {})}
    write = template.continued if continued else partial(template.render, add_generation_prompt=opens_answer)
    return partial(spelled.write, write, messages, tools.tools, variables)


def _notation(spec: ServeSpec, described: str) -> NotationName | None:
    """Return the notation of reasoning and calls: the one in the settings, or the one that fits `described`.

    `described` is the source of the chat template, followed by the model's marks (`ModelFiles.answer_marks`).
    """
    if spec.notation != "auto":
        return None if spec.notation == "none" else spec.notation
    return template_notation(described)
