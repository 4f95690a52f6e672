"""Tests of `meshwright chat` and `generate --chat`: the model's template, end tokens, system prompt, commands, Ctrl-C."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint.models.single_device import load_model
from meshwright.cli.chat import ChatConversation, _first_interrupt, read_line
from meshwright.cli.chat_prompts import ChatPrompts, messages_of
from meshwright.serve.engine import Engine
from meshwright.serve.sampling_options import SamplingOptions
from meshwright.server.model_files import read_model_files
from meshwright.spec.engine import EngineOptions
from meshwright.spec.errors import BadInput
from tests.cli.command import Answer, meshwright
from tests.server.helpers import byte_tokenizer, write_folder

TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    import torch

    model = load_model(folder, torch.device("cpu"), torch.float32)
    return Engine(model, byte_tokenizer(), EngineOptions(sequences=1, cache_blocks=64))


@pytest.fixture
def conversation(folder: Path, engine: Engine) -> ChatConversation:
    prompts = ChatPrompts(folder, read_model_files(folder))
    return ChatConversation(engine, prompts, (0,), SamplingOptions(temperature=0), TOKENS)


def continued(engine: Engine, text: str) -> str:
    """The greedy continuation of a text by the engine."""
    engine.submit(text, new_tokens=TOKENS, stop_ids=(0,))
    return "".join(update.text for update in engine.run())


def test_answers_follow_the_template_with_all_messages_before(conversation: ChatConversation, engine: Engine) -> None:
    shown: list[str] = []
    conversation.reset("Be short.")
    assert conversation.answer("Hi", shown.append) == "length"
    first = continued(engine, "system: Be short.\nuser: Hi\nassistant:")
    assert "".join(shown) == first
    conversation.answer("More", shown.append)
    assert "".join(shown) == first + continued(
        engine, f"system: Be short.\nuser: Hi\nassistant: {first}\nuser: More\nassistant:"
    )
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert conversation.take_back() == "More" and len(conversation.messages) == 3
    conversation.reset(conversation.system)
    assert conversation.messages == messages_of("Be short.")


def test_an_answer_ends_at_a_token_of_the_folder(conversation: ChatConversation, engine: Engine) -> None:
    engine.submit("user: Hi\nassistant:", new_tokens=TOKENS)
    whole = [token for update in engine.run() for token in update.tokens]
    place = next(at for at in range(2, TOKENS) if whole[at] not in whole[:at])
    conversation._stop_ids = (whole[place],)
    shown: list[str] = []
    assert conversation.answer("Hi", shown.append) == "stop"
    assert "".join(shown) == byte_tokenizer().decode(whole[:place])


def test_a_special_token_in_a_message_stays_text(folder: Path) -> None:
    ids = ChatPrompts(folder, read_model_files(folder)).ids(messages_of(None, "a<|endoftext|>b"))
    assert 0 not in ids and "a<|endoftext|>b" in byte_tokenizer().decode(ids)


def test_a_first_interrupt_stops_the_answer_and_a_second_one_the_chat(conversation: ChatConversation) -> None:
    def interrupt(piece: str) -> None:
        signal.raise_signal(signal.SIGINT)

    conversation._tokens = 10_000
    pieces: list[str] = []

    def once(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            interrupt(piece)

    assert conversation.answer("Hi", once) == "abort"
    assert conversation.messages[-1]["content"] == "".join(pieces) != ""
    with pytest.raises(KeyboardInterrupt), _first_interrupt(lambda: None):
        interrupt("")
        interrupt("")


def test_a_chat_that_the_context_does_not_hold_is_refused_and_goes_on(conversation: ChatConversation) -> None:
    with pytest.raises(BadInput, match="context"):
        conversation.answer("x" * 10_000, print)
    assert conversation.messages == []


@pytest.fixture
def piped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """The command with these lines as its input."""

    def run(*lines: str, options: tuple[str, ...] = ()) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return meshwright("chat", folder, "--temperature", "0", "--tokens", str(TOKENS), *options)

    return run


def test_piped_lines_are_answered(piped: Callable[..., Answer], engine: Engine) -> None:
    answer = piped("Hi", "/reset", "Hi", "/retry", "/system Be short.", "Hi", "/help", "/rest", "/quit", "never")
    plain, short = (continued(engine, f"{head}user: Hi\nassistant:") for head in ("", "system: Be short.\n"))
    assert answer.code == 0
    assert answer.out.startswith(f"{plain}\n{plain}\n{plain}\n{short}\n  /help")
    assert "/rest: no such command; nearest: /reset" in answer.err and "[the answer is cut" in answer.err


def test_a_system_prompt_and_another_template(piped: Callable[..., Answer], engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    answer = piped("Hi", options=("--system", "S", "--chat-template", str(tmp_path / "own.jinja")))
    assert answer.out == continued(engine, "[system]S[user]Hi") + "\n"


def test_generate_answers_a_message(folder: Path, engine: Engine) -> None:
    options = ("--temperature", 0, "--tokens", TOKENS)
    (sample,) = meshwright("generate", folder, "-p", "Hi", "--chat", "--system", "S", *options, "--json").json[
        "samples"
    ]
    assert sample == {"prompt": "Hi", "text": continued(engine, "system: S\nuser: Hi\nassistant:")}
    assert meshwright("generate", folder, "-p", "Hi", "--chat", *options).out.startswith("Hi\n")
    refused = meshwright("generate", folder, "-p", "Hi", "--system", "S")
    assert refused.code == 2 and "--system needs --chat" in refused.err


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for command in (("chat", folder), ("generate", folder, "-p", "Hi", "--chat")):
        answer = meshwright(*command)
        assert answer.code == 2 and "has no chat template" in answer.err and "--chat-template" in answer.err


def test_lines_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def typed(*given: str | BaseException) -> str | None:
        left = iter(given)

        def next_line(prompt: str) -> str:
            line = next(left)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", next_line)
        return read_line()

    assert typed("one\\", "two") == "one\ntwo"
    assert typed("one\\", KeyboardInterrupt(), "two") == "two"
    assert typed(KeyboardInterrupt(), KeyboardInterrupt()) is None
    assert typed(EOFError()) is None
