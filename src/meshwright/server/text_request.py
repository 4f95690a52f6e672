"""Requests for text: the keys that completions and chats share, with their ranges and the server's limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.serve.sampling_options import SamplingOptions
from meshwright.server.errors import RequestError, wrong
from meshwright.server.fields import LARGEST_INTEGER, Fields, checked_text
from meshwright.server.packed_ids import ID_BYTES, packed_ids, unpacked_ids
from meshwright.server.tool_calls import CallFormat
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import ServeSpec

LONGEST_STOP_STRING = 256
MOST_STOP_IDS = 64
LONGEST_SCHEMA = 64 << 10
"""Characters of a JSON schema at most."""
WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
"""Keys of OpenAI's clients that this server has no use for."""
_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class Limits:
    """Limits of requests for text, by the server's settings and the model."""

    spec: ServeSpec
    model: str
    """Name of the model for clients."""
    context: int
    vocab: int
    stop_ids: Sequence[int]
    """Tokens that end a text."""

    @property
    def new_tokens(self) -> int:
        """Largest `max_tokens`."""
        return min(self.spec.max_new_tokens or self.context, self.context)


@dataclass(kw_only=True)
class TextRequest:
    """Checked fields of a request for text, without its prompt."""

    count: int
    """Texts for each prompt."""
    new_tokens: int | None
    """New tokens of a text at most; None: as many as the context has room for."""
    sampling: dict[str, Any]
    """Fields of `SamplingOptions`; without `seed` each prompt gets a random one."""
    logprobs: int | None
    """Likeliest tokens to report for each new token; None: no log probabilities."""
    stop_ids: Sequence[int]
    stop_strings: Sequence[str]
    grammar: tuple[str, str] | None
    """Notation and text of a `Grammar`."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    continuous_usage: bool = False
    """Whether every event has them."""
    include_stop: bool = False
    """Whether a text ends behind its stop string, instead of before it."""
    reported_stops: Sequence[int] = ()
    """Tokens of `stop_ids` that are the request's own: an end at one of them is reported with it."""
    prompts: list[Sequence[int]] = field(default_factory=list)
    """Token ids of each prompt."""
    echoes: list[str] = field(default_factory=list)
    """The prompts' own texts, with which the texts begin; empty if they do not."""
    grammar_key: str = "response_format"
    """Key of the body that asks for the grammar."""
    calls: CallFormat | None = None
    """How tool calls are found in the texts; None if they are not."""
    special_tokens: bool = False
    """Whether the text has special tokens."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """Return the request for another process: values of JSON, and the bytes of all token ids."""
        values = {**vars(self), "prompts": [len(prompt) for prompt in self.prompts]}
        return values, b"".join(map(packed_ids, self.prompts))

    @classmethod
    def unpack(cls, values: Mapping[str, Any], ids: memoryview) -> TextRequest:
        """The request that `pack` has packed; its prompts are arrays."""
        fields, prompts, start = dict(values), [], 0
        for count in fields["prompts"]:
            prompts.append(unpacked_ids(ids[start : start + count * ID_BYTES]))
            start += count * ID_BYTES
        fields["prompts"] = prompts
        if fields["grammar"] is not None:
            fields["grammar"] = tuple(fields["grammar"])
        if fields["calls"] is not None:
            fields["calls"] = CallFormat(*fields["calls"])
        return cls(**fields)


def read_shared(fields: Fields, limits: Limits, *, logprobs: int | None, new_tokens: int | None) -> TextRequest:
    """The keys that completions and chats share. `new_tokens` is the default of `max_tokens`. Raises RequestError."""
    spec = limits.spec
    model = fields.text("model", limits.model)
    if model not in ("", limits.model):
        raise RequestError(
            404,
            f"model: there is no such model here; the one served is {limits.model}",
            param="model",
            code="model_not_found",
        )
    fields.ignore(*WITHOUT_EFFECT)
    count = fields.integer("n", 1, spec.max_choices, 1)
    if (best := fields.take("best_of")) is not None and best != count:
        raise RequestError(400, "best_of: expected the value of n; texts are not ranked", param="best_of")
    most = fields.integer("max_tokens", 1, limits.new_tokens, None)
    most = fields.integer("max_completion_tokens", 1, limits.new_tokens, most)
    ignore_end = fields.flag("ignore_eos")
    least = fields.integer("min_tokens", 0, limits.new_tokens, 0)
    special_tokens = not fields.flag("skip_special_tokens", True)
    stop_ids = _stop_ids(fields, limits.vocab)
    stop_strings = _stop_strings(fields, spec.max_stop_strings)
    sampling = _sampling(fields, limits, logprobs) | ({"min_tokens": least} if least else {})
    grammar = _grammar(fields)
    if grammar is not None and ignore_end:
        raise RequestError(400, "ignore_eos: a text that follows a schema needs its end", param="ignore_eos")
    stream = fields.flag("stream")
    options = fields.section("stream_options")
    include_usage = options is not None and options.flag("include_usage")
    continuous_usage = options is not None and options.flag("continuous_usage_stats") and include_usage
    if options is not None:
        options.ignore("include_obfuscation")
        options.finish()
        if not stream:
            raise RequestError(400, "stream_options: needs stream: true", param="stream_options")
    return TextRequest(
        count=count,
        new_tokens=new_tokens if most is None else most,
        sampling=sampling,
        logprobs=logprobs,
        stop_ids=[*stop_ids, *(() if ignore_end else limits.stop_ids)],
        stop_strings=stop_strings,
        grammar=grammar,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        include_stop=fields.flag("include_stop_str_in_output"),
        reported_stops=[id for id in stop_ids if ignore_end or id not in limits.stop_ids],
        special_tokens=special_tokens,
    )


def check_prompts(request: TextRequest, limits: Limits) -> None:
    """Raise RequestError if the prompts are too many or too long for the context."""
    if len(request.prompts) * request.count > limits.spec.max_choices:
        raise RequestError(
            400,
            f"n: expected at most {limits.spec.max_choices} texts in a request, n times the number of prompts",
            param="n",
        )
    for prompt in request.prompts:
        if not prompt:
            raise RequestError(400, "the prompt has no tokens")
        if len(prompt) >= limits.context:
            raise too_long(str(len(prompt)), limits.context)


def too_long(tokens: str, context: int) -> RequestError:
    """The error for a prompt with so many tokens."""
    return RequestError(
        400,
        f"the prompt has {tokens} tokens, and the context is {context}; shorten it to {context - 1}",
        code="context_length_exceeded",
    )


def token_ids(value: object, key: str, vocab: int) -> list[int]:
    """A list of token ids. Raises RequestError for anything else."""
    if not isinstance(value, list):
        raise wrong(key, "a list of token ids", value)
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab:
        return value
    for id in value:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab:
            raise wrong(key, f"token ids from 0 to {vocab - 1}", id)
    return value


def _stop_ids(fields: Fields, vocab: int) -> list[int]:
    value = fields.take("stop_token_ids")
    ids = [] if value is None else token_ids(value, "stop_token_ids", vocab)
    if len(ids) > MOST_STOP_IDS:
        raise wrong("stop_token_ids", f"at most {MOST_STOP_IDS} token ids", ids)
    return ids


def _stop_strings(fields: Fields, most: int) -> list[str]:
    value = fields.take("stop")
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > most:
        raise wrong("stop", f"text, or a list of at most {most}", value)
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STOP_STRING:
            raise wrong("stop", f"texts of 1 to {LONGEST_STOP_STRING} characters", text)
        checked_text(text, "stop")
    return texts


def _sampling(fields: Fields, limits: Limits, logprobs: int | None) -> dict[str, Any]:
    """Fields of `SamplingOptions`, checked by it; without `seed` if the body has none."""
    values = {key: value for key in _SAMPLING_NUMBERS if (value := fields.take(key)) is not None}
    if (top_k := fields.integer("top_k", -1, 2**31 - 1, None)) is not None:
        values["top_k"] = max(top_k, 0)
    seed = fields.integer("seed", -LARGEST_INTEGER - 1, LARGEST_INTEGER, None)
    given: dict[str, Any] = {} if seed is None else {"seed": seed & LARGEST_INTEGER}
    values["logit_bias"] = _biases(fields.take("logit_bias"))
    values |= {"logprobs": logprobs is not None, "top_logprobs": logprobs or 0}
    try:
        options = SamplingOptions(**values, **given)
        options.check_tokens(limits.vocab)
    except BadInput as error:
        raise RequestError(400, str(error), param=str(error).partition(":")[0].partition(" ")[0]) from None
    return {key: value for key, value in vars(options).items() if value != getattr(SamplingOptions, key, None)} | given


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("logit_bias", "an object from token ids to numbers", value)
    for token in value:
        if not token.isascii() or not token.isdecimal() or len(token) > 9:
            raise wrong("logit_bias", "token ids as keys", token)
    return {int(token): bias for token, bias in value.items()}


def _grammar(fields: Fields) -> tuple[str, str] | None:
    """Notation and text of the grammar that `response_format` asks for."""
    section = fields.section("response_format")
    if section is None:
        return None
    form = section.text("type", "text", ("text", "json_object", "json_schema"))
    schema: Any = {"type": "object"}
    described = section.section("json_schema")
    if form == "json_schema":
        if described is None:
            raise wrong("response_format.json_schema", "an object with the key schema", None)
        described.ignore("name", "description", "strict")
        schema = described.take("schema")
        described.finish()
        if not isinstance(schema, dict):
            raise wrong("response_format.json_schema.schema", "an object", schema)
    section.finish()
    if form == "text":
        return None
    return schema_grammar(schema, "response_format.json_schema.schema")


def schema_grammar(schema: Any, key: str) -> tuple[str, str]:
    """Notation and text of the grammar of a schema, which `key` of the body asks for. Raises RequestError if it is too long."""
    text = json.dumps(schema)
    if len(text) > LONGEST_SCHEMA:
        raise wrong(key, f"at most {LONGEST_SCHEMA} characters", schema)
    return "json_schema", text
