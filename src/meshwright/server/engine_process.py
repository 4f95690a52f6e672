"""The engine's process: takes requests from the HTTP process and sends new tokens, one message for each step.

The HTTP process starts it, with one process for each rank if the model is divided. It ends when the HTTP process closes the socket or dies.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.format.inventory import Chosen, choose_weights
from meshwright.connections.limits import raise_file_limit
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.events.parent import end_with_parent
from meshwright.serve.compiled_grammar import BadGrammar, Grammar
from meshwright.serve.failures import DEVICE_ERRORS, ENGINE_FAILED, FAILED_STEPS, EngineLost, RequestFailure
from meshwright.server.engine_setup import EngineSetup
from meshwright.server.grammar_jobs import GrammarJobs
from meshwright.server.messages import ServerMessageReader, encode
from meshwright.server.packed_ids import ids_of_text
from meshwright.server.process_memory import keep_loaded
from meshwright.server.score_process import has_score, serve_scores
from meshwright.server.transfers import BlockTransfers, TransferFigures, TransferSetup
from meshwright.spec.deployment import Role
from meshwright.spec.errors import EXIT_INTERNAL, BadInput, MeshwrightError
from meshwright.spec.failures import as_meshwright_error
from meshwright.spec.fields import from_plain
from meshwright.spec.rank_environment import RankEnvironment
from meshwright.spec.serve import MTP

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from meshwright.serve.engine import Engine
    from meshwright.serve.figures import EngineFigures
    from meshwright.serve.generation import Update
    from meshwright.serve.sampling_options import SamplingOptions
    from meshwright.spec.engine import EngineOptions
    from meshwright.spec.model import ModelSpec

_RECEIVE_BYTES = 1 << 20
LOAD_SECONDS = 600
"""Time that a rank waits for the others to read their weights."""


class EngineConnection:
    """The engine's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._reader = ServerMessageReader()

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Write a message."""
        self._socket.sendall(encode(message))

    def receive(self, *, wait: bool) -> list[dict[str, Any]]:
        """Messages that have arrived; with `wait` at least a part of one. Raises EOFError if the other process has closed."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return self._reader.add(data)


class EngineLoop:
    """Runs an engine by the messages of the HTTP process."""

    def __init__(self, engine: Engine, connection: EngineConnection, transfer: TransferSetup | None = None) -> None:
        """`transfer` has the settings of block exchange with other engines. Raises BadInput for an address that cannot be used."""
        self._engine = engine
        self._connection = connection
        self._grammars = GrammarJobs(engine)
        self._unwanted: set[int] = set()
        self._compiling: set[int] = set()
        """Ids of requests whose grammar is being compiled; `_unwanted` are those of them that were aborted."""
        self.transfers = (
            None if transfer is None else BlockTransfers(engine, transfer, self._submit_sequences, self._grammars)
        )
        self._numbers: dict[int, int] = {}
        """The engine's number of each unfinished request by its id."""
        self._ids: dict[int, int] = {}
        self._paused = False
        self._failed_steps = 0
        self._reported: tuple[TransferFigures, EngineFigures] | None = None

    def run(self) -> None:
        """Take messages and compute steps until the HTTP process closes the socket.

        Raises EngineLost if the device is unusable or steps fail one after the other.
        """
        with suppress(EOFError, ConnectionError):
            while True:
                if self.transfers is not None:
                    self.transfers.wait((self._connection.fileno(), self._grammars.fileno()), self._busy)
                    self._report_figures(self.transfers.figures)
                elif not self._busy():
                    select.select([self._connection, self._grammars], [], [])
                for message in self._connection.receive(wait=False):
                    self._take(message)
                self._grammars.run_done()
                if self._busy():
                    updates = self._engine.step()
                    self._send(updates if self.transfers is None else self.transfers.after_step(updates))
                    self._count_failure(updates)
        self._grammars.close()
        if self.transfers is not None:
            self.transfers.close()

    def _busy(self) -> bool:
        return self._engine.unfinished > 0 and not self._paused

    def _take(self, message: dict[str, Any]) -> None:
        actions: dict[str, Callable[[Any], None]] = {
            "submit": self._submit,
            "abort": self._abort,
            "pause": self._pause,
            "load": self._load,
            "role": self._use_role,
        }
        for key, value in message.items():
            actions[key](value)

    def _submit(self, request: dict[str, Any]) -> None:
        request["tokens"] = ids_of_text(request["tokens"])
        self._compiling.update(request["ids"])
        self._grammars.when_compiled(request["grammar"], partial(self._begin, request))

    def _begin(self, request: dict[str, Any]) -> None:
        """Continue a request whose grammar is compiled."""
        ids = set(request["ids"])
        aborted = ids & self._unwanted
        self._compiling -= ids
        self._unwanted -= ids
        if aborted == ids:
            return
        # If the logits of a prompt are needed, it must be computed here: keys and values from elsewhere do not help.
        transfers = None if "prompt_logprobs" in request["sampling"] else self.transfers
        if transfers is None or not transfers.begin(request):
            self._submit_sequences(request, None)
        self._abort(list(aborted))

    def _submit_sequences(self, request: Mapping[str, Any], firsts: Sequence[Sequence[Any]] | None) -> None:
        """Queue the sequences of a request, or refuse them; `firsts` has for each its first tokens, and the details of
        a message `step`."""
        try:
            self._queue_sequences(request, firsts)
        except (EOFError, OSError):  # the HTTP process has ended
            raise
        except BadInput as error:
            code = BadGrammar.code if isinstance(error, BadGrammar) else None
            self._refuse(request, str(error), code)
        except Exception as error:  # a mistake in one request does not end the process
            if any(text in f"{type(error).__name__}: {error}" for text in DEVICE_ERRORS):
                raise
            traceback.print_exc()
            self._refuse(request, *RequestFailure.of(error))

    def _refuse(self, request: Mapping[str, Any], message: str, code: str | None) -> None:
        """Report that the sequences of a request are not continued."""
        self._abort(request["ids"])
        self._connection.send({"refused": request["ids"], "error": message, "code": code})

    def _queue_sequences(self, request: Mapping[str, Any], firsts: Sequence[Sequence[Any]] | None) -> None:
        from meshwright.serve.sampling_options import SamplingOptions

        sampling = SamplingOptions.from_plain(request["sampling"])
        options: dict[str, Any] = {
            "new_tokens": request["new_tokens"],
            "stop_ids": request["stop_ids"],
            "grammar": None if request["grammar"] is None else Grammar(*request["grammar"]),
            "priority": request["priority"],
            "salt": request["salt"],
        }
        if firsts is None:
            ids = request["ids"]
            numbers = self._engine.submit_samples(request["tokens"], len(ids), sampling=sampling, **options)
        else:
            ids, numbers = self._continue_sequences(request, firsts, sampling, options)
        self._numbers.update(zip(ids, numbers, strict=True))
        self._ids.update(zip(numbers, ids, strict=True))
        if self.transfers is not None and numbers:
            self.transfers.publish(numbers[0], request)

    def _continue_sequences(
        self,
        request: Mapping[str, Any],
        firsts: Sequence[Sequence[Any]],
        sampling: SamplingOptions,
        options: Mapping[str, Any],
    ) -> tuple[list[int], list[int]]:
        """Report first tokens from another engine and queue the sequences that go on; returns the ids and numbers of
        these."""
        ids = []
        numbers = []
        entries = []
        for index, (id, (tokens, details)) in enumerate(zip(request["ids"], firsts, strict=True)):
            reason = details.get("reason")
            if reason == "abort":
                continue
            goes_on = reason != "stop" and len(tokens) < request["new_tokens"]
            if tokens or not goes_on:
                rest = {key: value for key, value in details.items() if key != "reason"}
                entries.append([id, tokens, rest if goes_on else details])
            if goes_on:
                sample = sampling.sample(index)
                number = self._engine.submit(request["tokens"], sampling=sample, given=tokens, **options)
                self._numbers[id] = number
                self._ids[number] = id
                numbers.append(number)
                ids.append(id)
        if entries:
            self._connection.send({"step": entries, "figures": self._engine.figures()})
        return ids, numbers

    def _abort(self, ids: list[int]) -> None:
        self._unwanted |= self._compiling.intersection(ids)
        if self.transfers is not None:
            self.transfers.abort(ids)
        for id in ids:
            if id in self._numbers:
                self._engine.abort(self._numbers[id])

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def _use_role(self, role: Role) -> None:
        assert self.transfers is not None
        self.transfers.use_role(role)

    def _load(self, folder: str) -> None:
        error = None
        try:
            self._engine.load_weights(Path(folder))
        except MeshwrightError as refusal:
            error = str(refusal)
        if self.transfers is not None:
            self.transfers.use_new_weights()
        self._connection.send({"loaded": folder, "error": error})

    def _send(self, updates: Sequence[Update]) -> None:
        entries: list[list[Any]] = []
        for update in updates:
            if (id := self._ids.get(update.number)) is None:
                continue  # it was refused while it was being queued
            if update.reason or update.logprobs or update.cached_tokens or update.prompt_logprobs:
                entries.append([id, update.tokens, update.details])
            else:
                entries.append([id, update.tokens])
            if update.reason is not None:
                del self._numbers[id], self._ids[update.number]
        self._connection.send({"step": entries, "figures": self._engine.figures()})

    def _report_figures(self, transfers: TransferFigures) -> None:
        """Report changed figures. They also change between steps: blocks become free when another engine has copied them."""
        if self._busy() and self._reported is not None and transfers == self._reported[0]:
            return  # the next step reports the engine's figures
        figures = transfers, self._engine.figures()
        if figures != self._reported:
            self._reported = figures
            self._connection.send({"transfers": transfers, "figures": figures[1]})

    def _count_failure(self, updates: Sequence[Update]) -> None:
        """Count failed steps in a row, from the updates of each step. Raises EngineLost after `FAILED_STEPS`, or after a device error."""
        failure = next((update.error for update in reversed(updates) if update.code == ENGINE_FAILED), None)
        if failure is None:
            self._failed_steps = 0
            return
        self._failed_steps += 1
        if any(text in failure for text in DEVICE_ERRORS):
            raise EngineLost(f"the device cannot be used any more: {failure}")
        if self._failed_steps >= FAILED_STEPS:
            raise EngineLost(f"{FAILED_STEPS} steps failed one after the other; the last: {failure}")


def check_context(spec: ModelSpec, options: EngineOptions) -> None:
    """Raise BadInput for a context that is longer than the model's."""
    if options.context is not None and options.context > spec.max_seq_len:
        expected = f"expected at most {spec.max_seq_len}, the model's context"
        raise BadInput(f"context: {expected}, got {options.context}", key="context")


def load_engine(setup: EngineSetup, weights: Chosen | None = None) -> Engine:
    """An engine on one device, on a GPU if there is one; its updates have no texts.

    `weights` is the checkpoint to load, if it was chosen and verified already.
    """
    from meshwright.checkpoint.models.single_device import device_and_dtype, load_model
    from meshwright.serve.engine import Engine
    from meshwright.serve.load import load_for_engine

    options = _options(setup)
    folder = setup.draft_model
    draft = None if folder in (None, MTP) else load_model(Path(folder), *device_and_dtype())
    source = Path(setup.folder) if weights is None else weights.path
    adapter = None if setup.adapter is None else Path(setup.adapter)
    more = {"predictions": options.predictions, "contents": weights is None, "adapter": adapter}
    model = load_for_engine(source, *device_and_dtype(), options, **more)
    check_context(model.spec, options)
    return Engine(model, _tokenizer(setup), options, draft_model=draft)


def serve_on_ranks(setup: EngineSetup, connection: EngineConnection | None) -> None:
    """Run this rank of an engine on several devices; rank 0 has the connection."""
    import torch

    from meshwright.parallel.world import join
    from meshwright.serve.rank_engines import engine_of_rank
    from meshwright.serve.rank_group import RankModel

    assert setup.cluster is not None
    world = join(RankEnvironment.from_environment(), setup.cluster, timeout_seconds=LOAD_SECONDS)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    weights = choose_weights(Path(setup.folder), contents=False)
    options = _options(setup)
    source = Path(setup.folder) if weights is None else weights.path
    part = RankModel.load(source, world, dtype, setup.experts, options.weights)
    check_context(part.spec, options)
    engine = engine_of_rank(part, world, _tokenizer(setup), options, setup.experts)
    keep_loaded()
    if connection is None:
        engine.follow()
    else:
        serve_engine(engine, connection, setup.transfer, weights)
        engine.close()
    world.leave()


def _tokenizer(setup: EngineSetup) -> Tokenizer | None:
    return None if setup.tokenizer is None else open_tokenizer(Path(setup.tokenizer))


def _options(setup: EngineSetup) -> EngineOptions:
    from meshwright.spec.engine import EngineOptions, Speculation

    mtp = setup.draft_model == MTP
    tokens = setup.speculate or int(mtp)
    speculation = Speculation(tokens=tokens, mtp=mtp) if tokens else None
    return EngineOptions(**setup.options, texts=False, speculation=speculation)


def serve_engine(
    engine: Engine, connection: EngineConnection, transfer: TransferSetup | None = None, weights: Chosen | None = None
) -> None:
    """Report that the engine is ready with `weights`, then run it until the HTTP process closes the socket."""
    with suppress(BadGrammar):  # requests with a grammar are refused for it
        engine.grammars()
    loop = EngineLoop(engine, connection, transfer)
    ready = {"context": engine.context, "vocab": engine.spec.vocab_size, "sequences": engine.options.sequences}
    facts, warning = ({}, None) if weights is None else (weights.facts(), weights.warning)
    connection.send({"ready": ready, "weights": facts, "warning": warning})
    loop.run()


def main() -> int:
    """Run the engine, or a rank of it; returns the exit code of docs/reference/exit-codes.md.

    The argument is the number of the inherited socket, or -1 for all ranks but the first. Standard input has the `EngineSetup` as JSON.
    """
    end_with_parent()
    raise_file_limit()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would have keys and texts
    descriptor = int(sys.argv[1])
    setup = from_plain(EngineSetup, json.load(sys.stdin))
    connection = None if descriptor < 0 else EngineConnection(socket.socket(fileno=descriptor))
    try:
        if connection is None or setup.ranks > 1:
            serve_on_ranks(setup, connection)
        else:
            weights = choose_weights(Path(setup.folder))
            if has_score(Path(setup.folder) if weights is None else weights.path):
                serve_scores(setup, connection, weights)
                return 0
            engine = load_engine(setup, weights)
            keep_loaded()
            serve_engine(engine, connection, setup.transfer, weights)
    except (EOFError, BrokenPipeError):  # the HTTP process has ended
        return 0
    except Exception as error:
        failure = as_meshwright_error(error)
        if failure.exit_code == EXIT_INTERNAL:
            traceback.print_exc()
        with suppress(OSError):
            if connection is not None:
                connection.send({"failed": str(failure), "code": failure.exit_code, "key": failure.key})
        return failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
