"""Servers of chats whose engine says what a test has written: a call of a tool, and a text once the tool has answered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.server.engine_process import EngineConnection
from meshwright.server.packed_ids import ids_of_text
from meshwright.spec.serve import ServeSpec
from tests.server.chat_templates import SPECIAL_TOKENS, TEMPLATES
from tests.server.helpers import SIZES, byte_tokenizer, running_api

SPECIAL = (
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
)
ARGUMENTS = {"city": "Paris"}
RESULT = "22 degrees"
"""Answer of the tool."""
REPLY = "It is 22 degrees in Paris, and no rain is near."
_WRITTEN = json.dumps({"name": "weather", "arguments": ARGUMENTS})
CALLS: Mapping[str, str] = {
    "qwen3": f"<tool_call>\n{_WRITTEN}\n</tool_call>",
    "llama3": json.dumps({"name": "weather", "parameters": ARGUMENTS}),
    "mistral": f"[TOOL_CALLS][{_WRITTEN}]",
}
"""The call of the tool in the notation of each form of template."""


def say(form: str, connection: EngineConnection) -> None:
    """An engine that calls the tool until a prompt has the tool's answer; three tokens a step."""
    connection.send({"ready": {"context": 8192, "vocab": 300, "sequences": 8}})
    tokenizer = byte_tokenizer(*SPECIAL)
    try:
        while True:
            for message in connection.receive(wait=True):
                if (request := message.get("submit")) is None:
                    continue
                answered = RESULT in tokenizer.decode(ids_of_text(request["tokens"]))
                tokens = tokenizer.encode(REPLY if answered else CALLS[form]).ids
                for id in request["ids"]:
                    for start in range(0, len(tokens), 3):
                        _send(connection, [id, tokens[start : start + 3]])
                    _send(connection, [id, [], {"reason": "stop"}])
    except EOFError:
        return


def _send(connection: EngineConnection, entry: list[Any]) -> None:
    connection.send({"step": [entry], "figures": [0, 0, 0.0, 0, 0]})


@contextmanager
def scripted_server(folder: Path, form: str) -> Iterator[str]:
    """The URL of a server whose chat template has this form; `folder` gets the template and a tokenizer."""
    byte_tokenizer(*SPECIAL).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS[form]))
    (folder / "chat_template.jinja").write_text(TEMPLATES[form])
    with running_api(folder, ServeSpec(**SIZES, log_requests=False), partial(say, form)) as (url, _, _):
        yield url
