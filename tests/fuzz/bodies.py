"""Bodies at random: valid ones of all keys, and mutations of them. Each is a function of its number and the seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

COMPLETIONS, CHATS, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
MOST_TOKENS = {
    COMPLETIONS: ("max_tokens", "max_completion_tokens"),
    CHATS: ("max_tokens", "max_completion_tokens"),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
"""Keys that bound the texts of a path."""
NEW_TOKENS = 8
"""Largest `max_tokens` that a body has, but of streams that are left after their first token."""
VOCAB = 257
MOST_BYTES = 8 << 20

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
USER = {"role": "user", "content": "Hello?"}
CONVERSATIONS: Sequence[Any] = (
    [USER],
    [{"role": "system", "content": "Be short."}, USER],
    [{"role": "developer", "content": "Be short."}, USER],
    [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "22 degrees"},
    ],
    [USER, {"role": "assistant", "content": "Hi.", "refusal": None, "tool_calls": None}, USER],
    [USER, {"role": "assistant", "content": "It is"}],
)
WITHOUT_EFFECT: dict[str, Sequence[Any]] = {
    "user": ("someone",),
    "metadata": ({"a": "b"},),
    "store": (False,),
    "service_tier": ("auto",),
    "safety_identifier": ("x",),
    "prompt_cache_key": ("x",),
    "prompt_cache_retention": ("24h",),
    "guided_decoding_backend": ("auto",),
}
SHARED: dict[str, Sequence[Any]] = {
    "model": ("tiny", ""),
    "n": (1, 2, 3),
    "best_of": (1,),
    "temperature": (0, 0.5, 1, 2),
    "top_p": (0.1, 0.9, 1),
    "top_k": (-1, 0, 1, 40),
    "min_p": (0, 0.05, 1),
    "seed": (0, 7, -1, 2**62),
    "stop": ("e", ["a", "\n\n"], []),
    "presence_penalty": (-2, 0, 1.5),
    "frequency_penalty": (-2, 0, 1.5),
    "repetition_penalty": (0.5, 1, 1.3),
    "logit_bias": ({"65": 5}, {"0": -100, "256": 100}, {}),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
    "response_format": ({"type": "text"}, {"type": "json_object"}, JSON_SCHEMA),
    "stop_token_ids": ([65], [], [1, 2, 3]),
    "ignore_eos": (True, False),
    "min_tokens": (0, 1, 4),
    "skip_special_tokens": (True, False),
    "priority": (0, -5, 100),
    "cache_salt": ("tenant a",),
    "bad_words": (["bad", " word"],),
    "allowed_token_ids": (list(range(60, 90)),),
    "include_stop_str_in_output": (True, False),
    "guided_json": (SCHEMA,),
    "guided_regex": ("[ab]{1,4}",),
    "guided_grammar": ('start: "a" | "b"',),
    "guided_choice": (["yes", "no"],),
    "prompt_logprobs": (0, 2, 5),
    "structured_outputs": ({"json": SCHEMA}, {"regex": "a+"}, {"choice": ["a", "b"]}),
    **WITHOUT_EFFECT,
}
TEXT_BLOCK = {"type": "text", "text": "Hello?", "cache_control": {"type": "ephemeral"}}
TOOL_USE = {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Rome"}}
OF_MESSAGES: dict[str, Sequence[Any]] = {
    "model": ("tiny",),
    "system": ("Be short.", [TEXT_BLOCK], [{"type": "text", "text": "x-anthropic-billing-header: a=b;"}, TEXT_BLOCK]),
    "messages": (
        [USER],
        [{"role": "user", "content": [TEXT_BLOCK, TEXT_BLOCK]}, {"role": "system", "content": "Now."}],
        [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, TOOL_USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": [TEXT_BLOCK]}]},
        ],
        [USER, {"role": "assistant", "content": "It is"}],
    ),
    "tools": ([{"name": "weather", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}], []),
    "tool_choice": ({"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "weather"}),
    "thinking": ({"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}),
    "output_config": ({"effort": "high"}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "metadata": ({"user_id": "1"},),
}
FUNCTION_CALL = {"type": "function_call", "id": "fc_1", "call_id": "call00001", "name": "weather", "arguments": "{}"}
KEYS: dict[str, dict[str, Sequence[Any]]] = {
    MESSAGES: {
        **OF_MESSAGES,
        "temperature": (0, 1),
        "top_p": (0.5, 1),
        "top_k": (1, 40),
        "stop_sequences": (["e"], []),
        "stream": (True, False),
    },
    COUNT: OF_MESSAGES,
    RESPONSES: {
        "model": ("tiny",),
        "input": (
            "Hello?",
            [USER],
            [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]}, USER],
            [
                USER,
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                FUNCTION_CALL,
                {"type": "function_call_output", "call_id": "call00001", "output": "22 degrees"},
                {"type": "web_search_call"},
            ],
        ),
        "instructions": ("Be short.",),
        "tools": (
            [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}],
            [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}, {"type": "web_search"}],
            [{"type": "custom", "name": "patch"}],
        ),
        "tool_choice": ("auto", "none", "required", {"type": "function", "name": "weather"}),
        "parallel_tool_calls": (True, False),
        "text": ({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, {"format": {"type": "text"}}),
        "reasoning": ({"effort": "low", "summary": "auto"}, {"effort": "none"}),
        "temperature": (0, 1),
        "top_p": (0.5, 1),
        "stream": (True, False),
        "store": (False,),
        "include": (["reasoning.encrypted_content"],),
        "previous_response_id": ("resp_1",),
    },
    COMPLETIONS: {
        **SHARED,
        "prompt": ("Once", ["one", "two"], [1, 2, 3], [[1, 2], [3]]),
        "echo": (True, False),
        "logprobs": (0, 1, 5),
        "add_special_tokens": (True, False),
        "suffix": ("",),
        "use_beam_search": (False,),
    },
    CHATS: {
        **SHARED,
        "messages": CONVERSATIONS,
        "tools": ([TOOL], []),
        "parallel_tool_calls": (True, False),
        "tool_choice": ("none", "auto", "required", {"type": "function", "function": {"name": "weather"}}),
        "logprobs": (True, False),
        "top_logprobs": (0, 3),
        "add_generation_prompt": (True, False),
        "reasoning_effort": ("low",),
        "continue_final_message": (True, False),
        "chat_template_kwargs": ({"enable_thinking": False}, {}),
    },
    TOKENIZE: {
        "model": ("tiny",),
        "prompt": ("Once upon", ""),
        "messages": CONVERSATIONS,
        "add_special_tokens": (True, False),
        "return_token_strs": (True, False),
        "add_generation_prompt": (True, False),
        "continue_final_message": (True, False),
        "tools": ([TOOL],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True,),
        "chat_template_kwargs": ({"enable_thinking": True},),
    },
    DETOKENIZE: {"model": ("tiny",), "tokens": ([72, 105], [], list(range(VOCAB)))},
}
"""Every key of a path with valid values. `max_tokens` and `max_completion_tokens` are set by `_bound`."""
NEEDED = {
    RESPONSES: "input",
    MESSAGES: "messages",
    COUNT: "messages",
    COMPLETIONS: "prompt",
    CHATS: "messages",
    TOKENIZE: "prompt",
    DETOKENIZE: "tokens",
}
WEIGHTS = {COMPLETIONS: 30, CHATS: 30, RESPONSES: 14, MESSAGES: 14, COUNT: 3, TOKENIZE: 6, DETOKENIZE: 3}
"""How often a path is asked."""

NUMBERS: Sequence[Any] = (
    0,
    -0.0,
    1,
    -1,
    2,
    3,
    7.0,
    16,
    17,
    20,
    21,
    255,
    256,
    257,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    -(2**70),
    10**30,
    0.5,
    -0.5,
    1e-320,
    1e-9,
    1e9,
    1e38,
    1e39,
    1e308,
    -1e308,
    1.0000000001,
)
TEXTS = (
    "",
    " ",
    "\n",
    "x",
    "0",
    "null",
    "true",
    "NaN",
    "\0",
    "a\0b",
    "\ud800",
    "\udfff\ud800",
    "\ufeff",
    "\ufffd",
    "\uffff",
    "\U0010ffff",
    "é",
    "e\u0301",
    "e" + "\u0301" * 300,
    "\u202eabc",
    "\u200b\u200d\u2060",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈" * 20,
    "ﷺ" * 50,
    "İıſß",
    "中文字符",
    "ท้" * 40,
    "\r\n\t\x0b\x0c\x1b[31m",
    "{{ 7 * 7 }}{% raw %}",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|im_end|>",
    "__proto__",
    "../../etc/passwd",
    "file:///etc/passwd",
    "'; --",
    '"',
    "\\",
    "%s%n",
    "data: [DONE]\n\n",
)
VALUES: Sequence[Any] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    [None],
    [True],
    [1],
    [-1],
    [256],
    [VOCAB],
    [1.5],
    [2**64],
    ["a"],
    ["a", 1],
    [[1], ["a"]],
    [[1], []],
    [""],
    {"": 0},
    {"a": 1},
    {"5": "x"},
    {"-1": 1},
    {"5": 1e9},
    {"99999999999": 1},
    {"٣": 1},
    {"5": None},
    {"type": "json_schema"},
    {"type": "function"},
    {"type": "json_object", "json_schema": {}},
    {"include_usage": 3},
    {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
    {"type": "json_schema", "json_schema": {"schema": True}},
    [USER],
    [{"role": "user"}],
    [{"role": "assistant"}],
    [{"role": "tool", "content": None}],
    [{"role": ["user"], "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [[]]}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": None}}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"id": 3, "function": {"name": "f", "arguments": "{"}}]}],
    [{"type": "function", "function": {"name": "x", "parameters": {"type": "object", "$defs": 3}}}],
    [TOOL] * 2,
    [{"type": "function", "function": {"name": "", "parameters": {"$ref": "#"}}}],
    [{"type": "function", "function": {"name": "\ud800"}}],
)
DEPTHS = (2, 20, 200, 900, 990, 1_100, 5_000, 100_000)
LENGTHS = (300, 1_000, 4_000, 8_191, 8_192, 16_000, 40_000, 65_536)
PATTERNS = ("a", "ab ", " ", "é", "🙂", "\0", "\ud800", "\u0301", "a\n", "<tool_call>", "<|endoftext|>", "0", "中")
RAW = (
    b"",
    b" ",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"{",
    b"}",
    b"{}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 6_000,
    b"\xef\xbb\xbf{}",
    b"-",
    b"nul",
    b'{"prompt": }',
    b'{"prompt": "a",}',
    b"{'prompt': 'a'}",
    b'{"prompt": "a"} x',
    b'{"prompt": 01}',
    b"\xff\xfe",
)
BYTES = (
    b"",
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\0",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1e400",
    b"9" * 5_000,
    b'"',
    b"\\",
    b"\\u",
    b"\\ud800",
    b"{",
    b"]",
    b",",
    b":",
    b"//",
    b"1" * 400 + b".5",
)
_DEEP = "deep-value-goes-here"


@dataclass(frozen=True)
class FuzzRequest:
    """One request of a fuzz run."""

    number: int
    path: str
    body: bytes
    leaves: bool = False
    """Whether the client leaves after the first token, since the text may be long."""


def body_request(seed: int, number: int) -> FuzzRequest:
    """Body `number` of a run: a valid one, or one with mutations of its values, its keys or its bytes."""
    random = Random(f"body {seed} {number}")
    path = random.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
    body = _valid(random, path)
    kind = random.random()
    if kind > 0.35:
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            _mutate(random, path, body)
    leaves = _bound(random, path, body)
    content = _encoded(random, body)
    if kind > 0.9:
        content = _mutate_bytes(random, path, content)
    return FuzzRequest(number, path, content, leaves)


def _valid(random: Random, path: str) -> dict[str, Any]:
    """A body of valid values; some combinations of them exclude each other."""
    keys = KEYS[path]
    chosen = random.sample(sorted(keys), min(len(keys), random.choice((0, 1, 2, 3, 4, 6, 10))))
    body = {key: random.choice(keys[key]) for key in {NEEDED[path]: None, **dict.fromkeys(chosen)}}
    return json.loads(json.dumps(body))


def _mutate(random: Random, path: str, body: dict[str, Any]) -> None:
    """Change one value or key of the body, at any depth."""
    if random.random() < 0.45 or not body:  # every key has its turn, whatever the body has
        body[random.choice([*sorted(KEYS[path]), *MOST_TOKENS.get(path, ())])] = _odd(random)
        return
    container, key = random.choice([*_parts(body)])
    form = random.randrange(8)
    if form == 0:
        del container[key]
    elif form == 1:
        container[key] = [container[key]] * random.choice((1, 2, 17, 65, 3_000))
    elif form == 2:
        container[key] = {random.choice(TEXTS): container[key]}
    elif form == 3 and isinstance(container, dict):
        container[random.choice((*TEXTS, "k" * 5_000, "max_token", "no_such_key"))] = _odd(random)
    else:
        container[key] = _odd(random)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container with each of its keys or indices."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in [*items][:200]:
        yield value, key
        yield from _parts(inner)


def _odd(random: Random) -> Any:
    """A value that few keys expect."""
    form = random.randrange(24)
    if form < 7:
        return random.choice(NUMBERS)
    if form < 12:
        return random.choice(TEXTS)
    if form < 19:
        return json.loads(json.dumps(random.choice(VALUES)))
    if form == 19:
        return {"": _DEEP + str(random.choice(DEPTHS))}
    if form == 20:
        return [random.choice((0, 1, "x", None, [], 65)) for _ in range(random.choice((3, 64, 65, 4_097)))]
    if form == 21:
        return {str(token): 1 for token in range(random.choice((1, 300, 5_000)))}
    pattern = random.choice(PATTERNS)
    length = random.choice(LENGTHS)
    if random.random() < 0.02:
        length = random.choice((1 << 20, 3 << 20, MOST_BYTES))
    return pattern * max(1, length // len(pattern.encode("utf-8", "surrogatepass")))


def _bound(random: Random, path: str, body: dict[str, Any]) -> bool:
    """Let the texts be short; whether the client must leave after the first token.

    It leaves where a number of tokens is large, which a server may cut instead of refusing it.
    """
    if path not in MOST_TOKENS:
        return False
    keys = MOST_TOKENS[path]
    given = [body.get(key) for key in keys]
    if all(value is None for value in given):
        body[random.choice(keys)] = random.randint(1, NEW_TOKENS)
    numbers = [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]
    if not any(number > NEW_TOKENS for number in numbers):
        return False
    body["stream"] = True
    return True


def _encoded(random: Random, body: dict[str, Any]) -> bytes:
    """The JSON, of ASCII or of UTF-8; half pairs of surrogates stay escaped."""
    text = json.dumps(body)
    if random.random() < 0.5 and "\\ud" not in text:
        text = json.dumps(body, ensure_ascii=False)
    for depth in DEPTHS:
        marker = f'"{_DEEP}{depth}"'
        opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
        text = text.replace(marker, opening * depth + "1" + closing * depth)
    return text.encode("utf-8", "surrogatepass")


def _mutate_bytes(random: Random, path: str, content: bytes) -> bytes:
    """Bytes that may be no JSON, or have a key twice."""
    form = random.randrange(5)
    if form == 0:
        return random.choice(RAW)
    if form == 1:
        encoding = random.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-le"))
        return content.decode("utf-8", "replace").encode(encoding)
    if form == 2 and len(content) > 2:
        keys = sorted(KEYS[path])
        key, value = random.choice(keys), json.dumps(random.choice((*NUMBERS[:8], *VALUES[:12], "x")))
        return b'%b, "%b": %b}' % (content[:-1], key.encode(), value.encode())
    if form == 3:
        return content[: random.randrange(len(content) + 1)]
    for _ in range(random.choice((1, 1, 3))):
        position = random.randrange(len(content) + 1)
        content = content[:position] + random.choice(BYTES) + content[position + 1 :]
    return content
