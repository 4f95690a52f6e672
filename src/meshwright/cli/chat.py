"""`meshwright chat`: a chat with a model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.chat_prompts import ChatPrompts, Message, messages_of
from meshwright.cli.evaluate import Model
from meshwright.cli.options import model_folder, say
from meshwright.cli.spread import found_weights
from meshwright.spec.errors import BadInput, nearest

if TYPE_CHECKING:
    from meshwright.serve.engine import Engine
    from meshwright.serve.sampling_options import SamplingOptions

COMMANDS = {
    "/help": "show these commands",
    "/reset": "forget the chat, but not the system prompt",
    "/retry": "answer the last message again, with another seed",
    "/system": "TEXT: begin anew with this system prompt; without TEXT with none",
    "/quit": "end (as Ctrl-D, or Ctrl-C twice)",
}
"""Commands that the user may type, with their help."""
PROMPT = "> "
"""Shown before the user's message."""
TEMPERATURE = 0.7
"""Default temperature, if the model's generation_config.json gives none."""
NEW_TOKENS = 1024
"""Default of the most new tokens of an answer. An answer also ends where the context of the model ends."""


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer at most.")] = NEW_TOKENS,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help=f"Scale of randomness; 0 takes the likeliest token [default: the model's generation_config.json, else {TEMPERATURE}]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other answers.")] = 0,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Jinja template of chats [default: the folder's]", show_default=False),
    ] = None,
) -> None:
    """Talk to a model in the terminal, with its own chat template, on one device.

    Answers appear as they are generated and end at the model's end tokens. A line that ends with \\ goes on in the next. `/help`
    lists commands, such as `/reset` and `/retry`. Ctrl-C stops an answer, twice it ends the chat. If the input is no terminal, each
    of its lines is a message.

    Examples:

        meshwright chat my-chat-model

        meshwright chat runs/chat --system "Answer in one sentence." --temperature 0

        echo "Hi" | meshwright chat my-chat-model
    """
    from meshwright.checkpoint.models.single_device import device_and_dtype
    from meshwright.serve.engine import Engine
    from meshwright.serve.load import load_for_engine
    from meshwright.serve.sampling_options import SamplingOptions
    from meshwright.server.model_files import read_model_files
    from meshwright.spec.engine import EngineOptions

    folder, _ = found_weights(model_folder(model))
    files = read_model_files(folder, chat_template)
    prompts = ChatPrompts(folder, files)
    given: dict[str, Any] = {"temperature": TEMPERATURE, **files.sampling, "seed": seed}
    sampling = SamplingOptions(**given)
    sampling = sampling if temperature is None else replace(sampling, temperature=temperature)
    for sentence in files.text.sentences():
        say(f"meshwright: {sentence}")
    options = EngineOptions(sequences=1)
    engine = Engine(load_for_engine(folder, *device_and_dtype(), options), files.tokenizer, options)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (gives `input` a history and cursor keys)
        print(f"{folder}: /help lists commands, Ctrl-C stops an answer, /quit ends")
    conversation = ChatConversation(engine, prompts, files.stop_ids, sampling, tokens, system)
    talk(conversation, read_line if sys.stdin.isatty() else _piped_line)


class ChatConversation:
    """The messages of a chat, and the engine that answers them."""

    def __init__(
        self,
        engine: Engine,
        prompts: ChatPrompts,
        stop_ids: tuple[int, ...],
        sampling: SamplingOptions,
        tokens: int,
        system: str | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._stop_ids = stop_ids
        self._sampling = sampling
        self._tokens = tokens
        self.reset(system)

    @property
    def system(self) -> str | None:
        """The system prompt; None if there is none."""
        return self._system

    def reset(self, system: str | None) -> None:
        """Forget all messages and begin again with this system prompt."""
        self._system = system
        self.messages: list[Message] = messages_of(system)

    def answer(self, text: str, show: Callable[[str], object]) -> str:
        """Add a message of the user and the model's answer to the chat.

        Returns why the answer ended: stop, length or abort.

        `show` receives the answer in parts while it is generated. Ctrl-C stops the answer, and the chat keeps the part
        that was generated. A second Ctrl-C raises KeyboardInterrupt. Raises BadInput if the template refuses the chat
        or if the chat is longer than the context; then nothing is added.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        number = self._engine.submit(
            self._prompts.ids(messages), new_tokens=self._tokens, sampling=self._sampling, stop_ids=self._stop_ids
        )
        pieces = []
        reason = "abort"
        with _first_interrupt(lambda: self._engine.abort(number)):
            for update in self._engine.run():
                if update.error is not None:
                    raise RuntimeError(update.error)
                show(update.text)
                pieces.append(update.text)
                reason = update.reason or reason
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        return reason

    def take_back(self) -> str | None:
        """Remove the last message of the user and its answer, and return that message. None if there is none.

        The seed of the next answer is another one, so the same message gets another answer.
        """
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            return None
        *self.messages, question, _ = self.messages
        self._sampling = replace(self._sampling, seed=self._sampling.seed + 1)
        return question["content"]


def talk(conversation: ChatConversation, read: Callable[[], str | None]) -> None:
    """Answer the lines that `read` returns, until it returns None or the user ends the chat."""
    while (line := read()) is not None:
        typed = line.strip()
        if typed == "/quit":
            return
        try:
            text = _obey(conversation, typed) if typed.startswith("/") else typed
            if text:
                reason = conversation.answer(text, lambda piece: print(piece, end="", flush=True))
                print()
                if reason != "stop":
                    say(_END_NOTES.get(reason, f"[{reason}]"))
        except BadInput as error:
            say(f"{error}; /reset begins anew")


_END_NOTES = {"length": "[the answer is cut: --tokens or the model's context]", "abort": "[stopped]"}
"""Remarks below an answer that did not end with an end token, by the reason."""


def _obey(conversation: ChatConversation, text: str) -> str | None:
    """Do what a command says. `text` begins with the command. Returns the message to answer, or None if there is none."""
    command, _, rest = text.partition(" ")
    if command == "/reset":
        conversation.reset(conversation.system)
    elif command == "/system":
        conversation.reset(rest.strip() or None)
    elif command == "/retry":
        if (again := conversation.take_back()) is not None:
            return again
        say("there is no answer to repeat")
    elif command == "/help":
        for name, meaning in COMMANDS.items():
            print(f"  {name:<8} {meaning}")
    else:
        near = nearest(command, COMMANDS)
        say(f"{command}: no such command{f'; nearest: {near}' if near else ''}; /help lists them")
    return None


def read_line() -> str | None:
    """Read the next message from the terminal. None at the end of input, or after Ctrl-C was pressed twice."""
    lines = []
    interrupts = 0
    while True:
        try:
            line = input(PROMPT if not lines else "  ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            interrupts = interrupts + 1
            lines = []
            if interrupts > 1:
                print()
                return None
            print("\n(Ctrl-C again or /quit ends)")
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _piped_line() -> str | None:
    """Read the next line of an input that is not a terminal. None at its end."""
    return sys.stdin.readline() or None


@contextmanager
def _first_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """A context in which the first Ctrl-C calls `act`, and the second one raises KeyboardInterrupt."""
    seen = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        act()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
