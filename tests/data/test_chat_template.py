"""Chat templates of others: nothing of theirs is called outside the sandbox, and none is computed while it is compiled."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

from meshwright.data.chat_template import ChatTemplate, TemplateRefusal
from meshwright.spec.errors import BadInput


def rendered(source: str, **variables: Any) -> str:
    return ChatTemplate(source, {}).render([], None, variables)


def test_tojson_has_the_options_of_transformers() -> None:
    value = {"b": [1, "é"], "a": "<"}
    assert rendered("{{ v | tojson }}", v=value) == '{"b": [1, "é"], "a": "<"}'
    assert rendered("{{ v | tojson(true, sort_keys=true) }}", v=value) == '{"a": "<", "b": [1, "\\u00e9"]}'
    assert rendered("{{ v | tojson(separators=(',', ':'), indent=1) }}", v=["x"]) == '[\n "x"\n]'
    assert rendered("{{ v | tojson(separators=[',', ':']) }}", v=value) == '{"b":[1,"é"],"a":"<"}'


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_has_each_name_that_templates_read(given: str, read: str) -> None:
    template = ChatTemplate("{% for message in messages %}{{ message." + read + " }};{% endfor %}", {})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", given: "It is."}]
    assert template.render(messages) == ";It is.;"


@pytest.mark.parametrize("option", ["default", "cls", "object_hook", "skipkeys", "check_circular"])
@pytest.mark.parametrize(
    "form", ["{{{{ lipsum | tojson({0}=f) }}}}", "{{{{ [lipsum] | map('tojson', {0}=f) | list }}}}"]
)
def test_a_template_gives_tojson_nothing_to_call(option: str, form: str) -> None:
    called: list[Any] = []
    with pytest.raises(TemplateRefusal):
        rendered(form.format(option), f=called.append)
    assert not called


def test_functions_given_to_templates_take_plain_values() -> None:
    """Every function that templates get beside Jinja's own is one of these; a new one must be looked at."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment, own = ChatTemplate("", {})._plain.environment, ImmutableSandboxedEnvironment()
    for table, names in (
        ("filters", {"tojson"}),
        ("tests", {"none"}),
        ("globals", {"raise_exception", "strftime_now"}),
    ):
        ours, jinjas = getattr(environment, table), getattr(own, table)
        assert {name for name in ours if ours[name] is not jinjas.get(name)} == names
        assert all(type(ours[name]) is types.FunctionType for name in names)
    for call in ("strftime_now(f)", "strftime_now([f])", "raise_exception(f)", "raise_exception({'a': f})"):
        called: list[Any] = []
        try:
            assert "method" in rendered(f"{{{{ {call} }}}}", f=called.append)
        except TemplateRefusal:
            assert call.startswith("raise")
        assert not called


COSTLY = (
    "{{ 'a' * 10**11 }}",
    "{{ 'a' | center(10**11) }}",
    "{{ 9**9**9 }}",
    "{% set a = 9**9**9 %}",
    "{% if 9**9**9 %}{% endif %}",
    "{{ 'x' if 9**9**9 }}",
    "{% include 'a' * 10**11 %}",
    "{% macro f(a=9**9**9) %}{% endmacro %}",
    "{% for x in [9**9**9] %}{% endfor %}",
)


def test_nothing_is_computed_while_a_template_is_compiled() -> None:
    program = (
        f"from meshwright.data.chat_template import ChatTemplate\nfor source in {COSTLY!r}: ChatTemplate(source, {{}})"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "1" * 5000 + " }}",
        "{% autoescape 'a' * 10**11 %}{% endautoescape %}",
        "{% nothing %}",
    ],
)
def test_a_source_that_cannot_be_compiled_is_bad_input(source: str) -> None:
    with pytest.raises(BadInput, match="the chat template cannot be used: ."):
        ChatTemplate(source, {})
