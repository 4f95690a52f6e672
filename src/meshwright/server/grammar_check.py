"""A process that tries to compile the grammars of clients, because the library has no time limit that always holds.

A schema of a few hundred bytes can take hours, for example the intersection of 30 patterns. A thread cannot be ended
from outside, a process can. This process uses a vocabulary of single bytes, so it is small and starts quickly. A
grammar that compiles here is compiled again by the engine, with the model's vocabulary.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from meshwright.events.parent import PARENT, end_with_parent
from meshwright.serve.compiled_grammar import BadGrammar, Grammar, compiled, llguidance

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COMPILE_SECONDS = 0.8
"""Seconds that one grammar may take to compile."""
START_SECONDS = 30.0
"""Seconds that the process may take to start."""
MEMORY_BYTES = 4 << 30
"""Limit of the process's address space, in bytes."""


class GrammarCheck:
    """Tries grammars in a process of its own, which is killed when a grammar takes too long. Not thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def refusal(self, grammar: Grammar) -> str | None:
        """Return the reason why a grammar cannot be used; None if it can be used."""
        process = self._started()
        if process is None:
            return "grammar: the process that checks grammars does not start"
        assert process.stdin is not None
        with suppress(OSError):  # the process has just ended: `_line` then finds the end of its output
            process.stdin.write(json.dumps([grammar.notation, grammar.text]).encode("ascii") + b"\n")
            process.stdin.flush()
        answer = _line(process, COMPILE_SECONDS)
        if answer is None:
            self.close()
            return (
                f"grammar: this {grammar.notation} takes longer than {COMPILE_SECONDS:g} s to compile, or too much memory; "
                "use fewer or simpler patterns, keys and alternatives"
            )
        return json.loads(answer)

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Return the process, and start it if it does not run. None if it does not start within `START_SECONDS`."""
        if self._process is None:
            environment = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "LANG")}
            environment[PARENT] = str(os.getpid())
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, close_fds=True
            )
            if _line(self._process, START_SECONDS) is None:
                self.close()
        return self._process

    def close(self) -> None:
        """Kill the process, if it runs. The next grammar starts a new one."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return the next line of the process's output. None if no line comes within `seconds`, or the process has ended."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    deadline = time.monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready or not (data := os.read(descriptor, 1 << 16)):
            return None
        line += data
    return line


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose vocabulary is the 256 bytes and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": 0} | {char: index for index, char in enumerate(alphabet, 1)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def main() -> None:
    """Read lines `[notation, grammar]` from stdin. Answer each with one line: null, or the reason to refuse the grammar."""
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    library = llguidance()
    tokens = library.LLTokenizer(byte_tokenizer().to_str(), eos_token=[0])
    _say("ready")
    for line in sys.stdin.buffer:
        refusal = None
        try:
            compiled(library, tokens, Grammar(*json.loads(line)))
        except BadGrammar as error:
            refusal = str(error)
        _say(refusal)


def _say(value: str | None) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
