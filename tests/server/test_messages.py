"""Messages between the processes, fields of a body, and files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.events.exposition import Histogram
from meshwright.server.chat_template import ServedChatTemplate
from meshwright.server.errors import RequestError
from meshwright.server.fields import parse_object
from meshwright.server.messages import ServerMessageReader, encode
from meshwright.server.model_files import read_model_files
from meshwright.spec.errors import BadInput
from tests.server.helpers import byte_tokenizer
from tests.slow import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=6
)


@settings(max_examples=examples(10, 60), deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=3), max_size=4), st.data())
def test_messages_arrive_whole_however_bytes_are_split(messages: list[dict], data: st.DataObject) -> None:
    sent = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    reader = ServerMessageReader()
    pieces = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert [message for piece in pieces for message in reader.add(piece)] == messages


def test_a_length_that_no_message_has_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        ServerMessageReader().add(b"\xff" * 8)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 10**5, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(RequestError) as error:
        parse_object(body)
    assert error.value.status == 400


def test_unknown_keys_are_named_with_the_nearest() -> None:
    fields = parse_object(b'{"stream": null, "options": {"include_usge": true}}')
    assert fields.flag("stream", True)
    options = fields.section("options")
    fields.finish()
    assert options is not None and not options.flag("include_usage")
    with pytest.raises(RequestError, match=r"options.include_usge.*nearest: include_usage"):
        options.finish()


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram("seconds", "Time.", (0.1, 1))
    for value, count in ((0.05, 1), (0.1, 2), (0.5, 1), (7, 1)):
        histogram.observe(value, count)
    assert [line for line in histogram.lines({"a": "b"}) if not line.startswith("#")] == [
        'seconds_bucket{a="b",le="0.1"} 3',
        'seconds_bucket{a="b",le="1"} 4',
        'seconds_bucket{a="b",le="+Inf"} 5',
        'seconds_sum{a="b"} 7.75',
        'seconds_count{a="b"} 5',
    ]


def test_templates_run_in_a_sandbox() -> None:
    template = ServedChatTemplate("{{ messages.append(1) }}", {})
    with pytest.raises(RequestError) as error:
        template.render([])
    assert error.value.status == 422
    escape = ServedChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(RequestError):
        escape.render([])
    refusing = ServedChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.render([])
    with pytest.raises(BadInput):
        ServedChatTemplate("{% if %}", {})


def test_files_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no tokenizer"):
        read_model_files(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token + eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    files = read_model_files(tmp_path)
    assert files.stop_ids == (byte_tokenizer().token_to_id("!"),)
    assert files.chat_template is not None
    assert ServedChatTemplate(files.chat_template, files.special_tokens).render([]) == "<!"
