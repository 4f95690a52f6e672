"""Requests for text: the keys that completions and chats share, their ranges, and the server's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.policies.batch_request import LARGEST_PRIORITY, LONGEST_SALT
from meshwright.serve.sampling_options import SamplingOptions
from meshwright.server.bad_words import word_tokens
from meshwright.server.errors import TOO_LONG, RequestError, wrong
from meshwright.server.fields import LARGEST_INTEGER, Fields, checked_text
from meshwright.server.grammar_request import read_grammar
from meshwright.server.model_files import ModelFiles
from meshwright.server.output_reader import OutputFormat
from meshwright.server.packed_ids import ID_BYTES, packed_ids, unpacked_ids
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import ServeSpec

LONGEST_STOP_STRING = 256
MOST_STOP_IDS = 64
MOST_PROMPT_LOGPROBS = 1 << 20
"""Maximum number of log probabilities of prompts in an answer, with those of the likeliest tokens: about 40 MB of JSON."""
MOST_BAD_WORDS = 128
"""Maximum number of words in `bad_words`."""
LONGEST_BAD_WORD = 256
"""Maximum number of characters of one of the words in `bad_words`."""
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "guided_decoding_backend",
)
"""Keys of OpenAI's and vLLM's clients that are accepted with any value and have no effect."""
ONLY_DEFAULTS: Mapping[str, Any] = {
    "modalities": ["text"],
    "verbosity": "medium",
    "reasoning_effort": "medium",
    "function_call": "none",
    "functions": [],
    "echo": False,
    "add_special_tokens": False,
    "use_beam_search": False,
    "length_penalty": 1,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "include_reasoning": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
}
"""Keys of OpenAI's and vLLM's clients that this server does not implement. Only these values, their defaults, are accepted."""
_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests for text, from the server's settings and the model."""

    spec: ServeSpec
    model: str
    """Name of the model for clients."""
    files: ModelFiles
    context: int
    vocab: int

    @property
    def new_tokens(self) -> int:
        """Maximum number of new tokens of a text."""
        return min(self.spec.max_new_tokens or self.context, self.context)


@dataclass(kw_only=True)
class CheckedTextRequest:
    """Checked fields of a request for text, without its prompt."""

    count: int
    """Sequences for each prompt."""
    new_tokens: int
    """Maximum number of new tokens of a text, if the context has room for them; 0 for an answer about the prompt only."""
    sampling: dict[str, Any]
    """Fields of `SamplingOptions`; without `seed` each prompt gets a random one."""
    logprobs: int | None
    """Number of likeliest tokens to report with each new token, and with each token of an echoed prompt. None: no log probabilities."""
    stop_ids: Sequence[int]
    stop_strings: Sequence[str]
    grammar: tuple[str, str] | None
    """Notation and text of a `Grammar`."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    continuous_usage: bool = False
    """Whether every event of a stream has the numbers of tokens."""
    include_stop: bool = False
    """Whether a text includes the stop string that ended it."""
    reported_stops: Sequence[int] = ()
    """Stop tokens that the request itself named. If one of them ends a text, the answer says which."""
    priority: int = 0
    """Requests with a larger number go first."""
    salt: str = ""
    """Only requests with the same salt share cached prompts."""
    prompts: list[Sequence[int]] = field(default_factory=list)
    """Token ids of each prompt."""
    echoes: list[str] = field(default_factory=list)
    """Texts of the prompts, if the answer repeats them (`echo`); else empty."""
    grammar_key: str = "response_format"
    """Key of the body that asks for the grammar."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens to report with each token of the prompts, in vLLM's form. None: not reported."""
    output: OutputFormat | None = None
    """How reasoning and tool calls are found in the texts. None: they are not looked for."""
    special_tokens: bool = False
    """Whether texts show special tokens."""
    ignored: Sequence[str] = ()
    """Parts of the body that were ignored: labels of `agent_fields.IGNORED`."""
    tool_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tools whose name is another one for the model: by that name, the type, name and namespace that the client knows."""
    shown: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the answer repeats."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """The request for another process: JSON values, and the bytes of all token ids."""
        values = {**vars(self), "prompts": [len(prompt) for prompt in self.prompts]}
        return values, b"".join(map(packed_ids, self.prompts))

    @classmethod
    def unpack(cls, values: Mapping[str, Any], ids: memoryview) -> CheckedTextRequest:
        """The request that `pack` has packed; its prompts are arrays."""
        fields = dict(values)
        prompts = []
        start = 0
        for count in fields["prompts"]:
            prompts.append(unpacked_ids(ids[start : start + count * ID_BYTES]))
            start += count * ID_BYTES
        fields["prompts"] = prompts
        if fields["grammar"] is not None:
            fields["grammar"] = tuple(fields["grammar"])
        if fields["output"] is not None:
            fields["output"] = OutputFormat(*fields["output"])
        return cls(**fields)


def check_model(fields: Fields, limits: RequestLimits) -> None:
    """Take the key `model`. Raises RequestError for another one than is served."""
    model = fields.text("model", limits.model)
    if model not in ("", limits.model):
        raise RequestError(
            404,
            f"model: there is no such model here; the one served is {limits.model}",
            param="model",
            code="model_not_found",
        )


def read_shared(
    fields: Fields, limits: RequestLimits, *, logprobs: int | None, new_tokens: int | None, echo: bool = False
) -> CheckedTextRequest:
    """The keys that completions and chats share. `new_tokens` is the default of `max_tokens`. Raises RequestError.

    `echo`: the sequences begin with the prompts, whose log probabilities are reported if those of new tokens are.
    """
    spec = limits.spec
    check_model(fields, limits)
    fields.ignore(*WITHOUT_EFFECT)
    count = fields.integer("n", 1, spec.max_choices, 1)
    if (best := fields.take("best_of")) is not None and best != count:
        raise RequestError(400, "best_of: expected the value of n; sequences are not ranked", param="best_of")
    largest = spec.max_new_tokens or LARGEST_INTEGER  # what the context has no room for is cut
    of_prompt = _prompt_logprobs(fields, limits)
    fewest = 0 if echo or of_prompt is not None else 1
    most = fields.integer("max_tokens", fewest, largest, None)
    most = fields.integer("max_completion_tokens", fewest, largest, most)
    ignore_end = fields.flag("ignore_eos")
    special_tokens = not fields.flag("skip_special_tokens", True)
    stop_ids = [*_stop_ids(fields, limits.vocab), *(() if ignore_end else limits.files.stop_ids)]
    stop_strings = _stop_strings(fields, spec.max_stop_strings)
    least = fields.integer("min_tokens", 0, limits.new_tokens if most is None else most, 0)
    sampling = _sampling(fields, limits, logprobs, least if stop_ids or stop_strings else 0)
    scored = [most for most in (of_prompt, logprobs if echo else None) if most is not None]
    if scored:
        sampling["prompt_logprobs"] = max(scored)
    grammar = read_grammar(fields)
    if echo and logprobs is not None and most is not None and most <= 1 and grammar is None:
        stop_ids = []  # who scores texts counts on an entry for the new token, be it one that ends texts
    if grammar is not None and ignore_end:
        raise RequestError(400, "ignore_eos: a text that follows a schema needs its end", param="ignore_eos")
    stream = fields.flag("stream")
    if stream and of_prompt is not None:
        raise RequestError(400, "prompt_logprobs: needs stream: false", param="prompt_logprobs")
    options = fields.section("stream_options")
    include_usage = options is not None and options.flag("include_usage")
    continuous_usage = options is not None and options.flag("continuous_usage_stats") and include_usage
    if options is not None:
        options.ignore("include_obfuscation")
        options.finish()
        if not stream:
            raise RequestError(400, "stream_options: needs stream: true", param="stream_options")
    if most is None:
        most = new_tokens or limits.new_tokens
    request = CheckedTextRequest(
        count=count,
        new_tokens=min(most, limits.new_tokens),
        sampling=sampling,
        logprobs=logprobs,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        grammar=None if grammar is None else (grammar.notation, grammar.text),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        include_stop=fields.flag("include_stop_str_in_output"),
        reported_stops=[id for id in stop_ids if ignore_end or id not in limits.files.stop_ids],
        special_tokens=special_tokens,
        priority=-fields.integer("priority", -LARGEST_PRIORITY, LARGEST_PRIORITY, 0),  # as vLLM: lower ones first
        salt=_salt(fields),
        prompt_logprobs=of_prompt,
    )
    return request if grammar is None else replace(request, grammar_key=grammar.key)


def check_prompts(request: CheckedTextRequest, limits: RequestLimits, key: str) -> None:
    """Raise RequestError if the prompts, which `key` of the body gives, are empty, too many or too long for the context."""
    if len(request.prompts) * request.count > limits.spec.max_choices:
        raise RequestError(
            400,
            f"n: expected at most {limits.spec.max_choices} sequences in a request, n times the number of prompts",
            param="n",
        )
    for prompt in request.prompts:
        if not prompt:
            raise RequestError(400, f"{key}: the prompt has no tokens", param=key)
        if len(prompt) >= limits.context:
            raise too_long(str(len(prompt)), limits.context, key)
    most = request.sampling.get("prompt_logprobs")
    if most is not None and (wanted := request.prompt_tokens * request.count * (1 + most)) > MOST_PROMPT_LOGPROBS:
        raise RequestError(
            400,
            f"{key}: asks for {wanted} log probabilities of prompts, those of the likeliest tokens included; expected at most "
            f"{MOST_PROMPT_LOGPROBS}: send fewer or shorter prompts, or ask for fewer of the likeliest tokens",
            param=key,
        )


def too_long(tokens: str, context: int, key: str) -> RequestError:
    """The error for a prompt with so many tokens, which `key` of the body gives."""
    return RequestError(
        400,
        f"{key}: the prompt has {tokens} tokens, and the context is {context}; shorten it to {context - 1}",
        param=key,
        code=TOO_LONG,
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


def _prompt_logprobs(fields: Fields, limits: RequestLimits) -> int | None:
    """The key `prompt_logprobs`; some clients send false, which counts as absent."""
    if fields.take("prompt_logprobs") is False:
        return None
    return fields.integer("prompt_logprobs", 0, limits.spec.max_logprobs, None)


def _stop_ids(fields: Fields, vocab: int) -> list[int]:
    value = fields.take("stop_token_ids")
    ids = [] if value is None else token_ids(value, "stop_token_ids", vocab)
    if len(ids) > MOST_STOP_IDS:
        raise wrong("stop_token_ids", f"at most {MOST_STOP_IDS} token ids", ids)
    return ids


def _stop_strings(fields: Fields, most: int) -> list[str]:
    value = fields.take("stop")
    return _texts([value] if isinstance(value, str) else value, "stop", most, LONGEST_STOP_STRING)


def _texts(value: object, key: str, most: int, longest: int) -> list[str]:
    """A list of at most `most` texts of 1 to `longest` characters; empty without a value. Raises RequestError."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > most:
        raise wrong(key, f"a list of at most {most} texts", value)
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= longest:
            raise wrong(key, f"texts of 1 to {longest} characters", text)
        checked_text(text, key)
    return value


def _salt(fields: Fields) -> str:
    salt = fields.text("cache_salt", None)
    if salt is not None and not 0 < len(salt) <= LONGEST_SALT:
        raise wrong("cache_salt", f"text of 1 to {LONGEST_SALT} characters", salt)
    return salt or ""


def _bad_words(value: object, limits: RequestLimits) -> list[list[int]]:
    words = _texts(value, "bad_words", MOST_BAD_WORDS, LONGEST_BAD_WORD)
    return word_tokens(limits.files.tokenizer, words) if words else []


def _sampling(fields: Fields, limits: RequestLimits, logprobs: int | None, min_tokens: int) -> dict[str, Any]:
    """Fields of `SamplingOptions`, checked by it, with the model's defaults; without `seed` if the body has none."""
    values = dict(limits.files.sampling)
    values |= {key: value for key in _SAMPLING_NUMBERS if (value := fields.take(key)) is not None}
    values["min_tokens"] = min_tokens
    if words := _bad_words(fields.take("bad_words"), limits):
        values["bad_words"] = words
    if (allowed := fields.take("allowed_token_ids")) is not None:
        values["allowed_token_ids"] = token_ids(allowed, "allowed_token_ids", limits.vocab)
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
