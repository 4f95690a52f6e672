"""Messages as clients send them, in the prompts of templates with the form of Qwen3's, Llama 3's and Mistral's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from meshwright.server.chat_messages import read_messages
from meshwright.server.chat_template import ServedChatTemplate
from meshwright.server.errors import RequestError
from tests.server.chat_templates import QWEN3, SPECIAL_TOKENS, TEMPLATES

FORMS = [*TEMPLATES]
ASK = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
DUMPED = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": None}
"""Keys of `model_dump()` of OpenAI's client beside those that its API reads."""
STRING_ARGUMENTS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
)
"""A template that writes calls only beside a content that is null, and needs their arguments as text."""


def called(arguments: object = '{"city": "Paris"}', id: str = "a1b2c3d4e", **keys: Any) -> dict[str, Any]:
    call = {"id": id, "type": "function", "index": 0, "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **keys}


def prompt(form: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    template = ServedChatTemplate(TEMPLATES.get(form, form), SPECIAL_TOKENS.get(form, {}))
    return template.render(read_messages(list(messages)), **options)


@pytest.mark.parametrize("form", FORMS)
def test_the_servers_own_call_can_be_sent_back(form: str) -> None:
    result = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "Sunny", "name": None}
    plain = {**called({"city": "Paris"}), "content": ""}
    expected = ServedChatTemplate(TEMPLATES[form], SPECIAL_TOKENS[form]).render([ASK, plain, result], TOOLS)
    assert '{"city": "Paris"}' in expected and "Sunny" in expected
    assert prompt(form, [ASK, called(**DUMPED), result], tools=TOOLS) == expected
    parts = {**result, "content": [{"type": "text", "text": "Sun"}, {"type": "text", "text": "ny"}]}
    assert prompt(form, [ASK, called(), parts], tools=TOOLS) == expected.replace(
        "Sunny", "Sun\\nny" if form == "llama3" else "Sun\nny"
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("calls", [None, []])
def test_an_answer_without_calls_is_plain(form: str, calls: object) -> None:
    answer = {"role": "assistant", "content": "Hello."}
    expected = prompt(form, [ASK, answer, ASK])
    assert "Hello." in expected
    assert prompt(form, [ASK, {**answer, "tool_calls": calls, **DUMPED, "made_up": {"x": 1}}, ASK]) == expected
    silent = prompt(form, [ASK, {**answer, "content": None, "tool_calls": calls}, ASK])
    assert silent == expected.replace("Hello.", "")


@pytest.mark.parametrize("form", FORMS)
def test_instructions_of_the_developer_reach_the_model(form: str) -> None:
    expected = prompt(form, [{"role": "system", "content": "Be short."}, ASK])
    assert "Be short." in expected
    assert prompt(form, [{"role": "developer", "content": "Be short."}, ASK]) == expected


def test_a_template_with_developers_gets_them() -> None:
    named = "{% for m in messages %}{% if m.role == 'developer' %}D:{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    asked = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert prompt(named, asked) == "D:xy"
    refused = named.replace("D:{{ m.content }}", "{{ raise_exception('no developer') }}")
    assert prompt(refused, asked) == "xy"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", ["", " ", None, "null", {}, "{}"])
def test_no_arguments_are_an_empty_object(form: str, arguments: object) -> None:
    assert prompt(form, [ASK, called(arguments)]) == prompt(form, [ASK, called({})])
    assert "{}" in prompt(form, [ASK, called(arguments)])


@pytest.mark.parametrize("form", FORMS)
def test_arguments_that_are_cut_stay_text(form: str) -> None:
    text = prompt(form, [ASK, called('{"city": "Par')])
    assert ('{"city": "Par' if form == "qwen3" else json.dumps('{"city": "Par')) in text


@pytest.mark.parametrize("form", FORMS)
def test_ids_of_other_servers_work(form: str) -> None:
    """A chat that began at another server has its ids, which Mistral's templates refuse."""
    for id in ("call_Ab12Cd34Ef56Gh78", "chatcmpl-tool-0123456789abcdef"):
        text = prompt(form, [ASK, called(id=id), {"role": "tool", "tool_call_id": id, "content": "Sunny"}])
        assert "Sunny" in text
    if form == "mistral":
        assert text.count(text.partition('"call_id": "')[2].partition('"')[0]) == 2


def test_templates_that_need_text_and_null_get_them() -> None:
    assert prompt(STRING_ARGUMENTS, [ASK, called()]) == 'user:Weather?<call>weather{"city": "Paris"}'


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_reach_the_template(key: str) -> None:
    for name in ("reasoning_content", "reasoning"):
        shown = "{% for m in messages %}{{ m." + name + " }}{% endfor %}"
        assert prompt(shown, [{"role": "assistant", "content": "x", key: "Hm."}]) == "Hm."
    assert "<think>\nHm.\n</think>" in prompt(QWEN3, [ASK, called(**{key: "Hm."})])


def test_text_parts_are_lines() -> None:
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    (read,) = read_messages([{"role": "user", "content": parts}])
    assert read == {"role": "user", "content": "one\ntwo"}
    (read,) = read_messages([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}])
    assert read["content"] == "No."
    (read,) = read_messages([{"role": "assistant", "content": None, "refusal": "No."}])
    assert read["content"] == "No."


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "tool", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"role": "assistant", "function_call": {"name": "x", "arguments": ""}}, "messages[0].function_call"),
    ],
)
def test_mistakes_in_messages_are_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_messages([message])
    assert (raised.value.status, raised.value.param) == (400, param)


def test_half_characters_anywhere_in_a_chat_are_refused() -> None:
    for message in ({**ASK, "name": "\ud800"}, called('{"city": "\\ud800"}'), called(reasoning="\ud800")):
        shown = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
        with pytest.raises(RequestError, match="surrogate"):
            prompt(shown, [message])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begun", ["Paris is ", "", "Paris is\n", "Weather?", "[INST] <|im_end|>"])
def test_the_last_message_is_continued(form: str, begun: str) -> None:
    template = ServedChatTemplate(TEMPLATES[form], SPECIAL_TOKENS[form])
    messages = read_messages([ASK, {"role": "assistant", "content": begun}])
    text = template.continued(messages)
    assert text.endswith(begun) and "\ufdd0" not in text
    whole = template.render([*messages[:-1], {**messages[-1], "content": f"{begun}X"}], add_generation_prompt=False)
    assert whole.startswith(text + "X")


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{% for m in messages * 2 %}{{ m.content }}{% endfor %}"]
)
def test_a_template_that_cannot_continue_says_so(source: str) -> None:
    for messages, status in (([ASK, {"role": "assistant", "content": "x"}], 422), ([ASK], 400), ([ASK, called()], 400)):
        with pytest.raises(RequestError) as raised:
            ServedChatTemplate(source, {}).continued(read_messages(messages))
        assert (raised.value.status, raised.value.param) == (status, "continue_final_message")
