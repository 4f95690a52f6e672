"""Compiles the grammars of waiting requests in a thread, while the engine goes on with its steps.

The library releases the GIL while it compiles. Before that, a separate process has tried the grammar (`grammar_check`),
so the thread never gets one that takes too long.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from meshwright.serve.compiled_grammar import BadGrammar, Grammar
from meshwright.server.grammar_check import GrammarCheck

if TYPE_CHECKING:
    from meshwright.serve.engine import Engine
    from meshwright.serve.grammar import GrammarTokens

NICE = 10
"""Niceness of the thread: the operating system prefers the engine's thread."""


class GrammarJobs:
    """Compiles grammars for one engine. All public methods are called by the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted: queue.SimpleQueue[tuple[GrammarTokens, Grammar, Callable[[], None]]] = queue.SimpleQueue()
        """The grammars that the thread must compile, each with its vocabulary and its function `done`."""
        self._finished: deque[Callable[[], None]] = deque()
        """The functions `done` of compiled grammars that are not called yet."""
        self._thread: threading.Thread | None = None
        self._ours, self._theirs = socket.socketpair()
        self._check = GrammarCheck()

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when a grammar has been compiled; then call `call_finished`."""
        return self._ours.fileno()

    def when_compiled(self, grammar: Sequence[Any] | None, done: Callable[[], None]) -> None:
        """Call `done` when a grammar is compiled or refused.

        `grammar` is (notation, text) or None. If there is nothing to wait for, `done` is called at once; otherwise a
        later call of `call_finished` calls it.
        """
        try:
            tokens = None if grammar is None else self._engine.grammars()
        except BadGrammar:  # grammars cannot be used at all: the engine will refuse the request with this error
            tokens = None
        if tokens is None or grammar is None or tokens.has(wanted := Grammar(*grammar)):
            done()
            return
        self._wanted.put((tokens, wanted, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
            self._thread.start()

    def call_finished(self) -> None:
        """Call the `done` functions of all grammars that were compiled since the last call."""
        for _ in range(len(self._finished)):
            self._ours.recv(1)
            done = self._finished.popleft()
            done()

    def close(self) -> None:
        """Kill the process that tries grammars."""
        self._check.close()

    def _compile_all(self) -> None:
        """Compile one wanted grammar after the other, and put its `done` function into the queue. The thread runs this."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            tokens, grammar, done = self._wanted.get()
            try:
                self._compile(tokens, grammar)
            except Exception as error:  # the engine would meet the same error: refuse the grammar
                tokens.refuse(grammar, f"grammar: cannot be prepared: {type(error).__name__}: {error}")
            self._finished.append(done)
            self._theirs.send(b"1")

    def _compile(self, tokens: GrammarTokens, grammar: Grammar) -> None:
        """Compile a grammar with the model's vocabulary, unless it is known or the separate process refuses it."""
        if tokens.has(grammar):
            return
        if (refusal := self._check.refusal(grammar)) is not None:
            tokens.refuse(grammar, refusal)
            return
        with suppress(BadGrammar):  # `tokens` keeps the error, and the engine raises it for the request
            tokens.compile(grammar)
