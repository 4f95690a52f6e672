"""The engine's process: it receives requests from the HTTP process, and sends it the new tokens in one message for each step.

The HTTP process starts this process. If the model is divided over several devices, it starts one process for each rank. The processes end
when the HTTP process closes the socket or dies.
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
"""While the weights are loaded, a rank waits at most this time for the other ranks, in seconds."""


class EngineConnection:
    """The engine process's side of the connection to the HTTP process."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = ServerMessageReader()

    def fileno(self) -> int:
        """Return the file descriptor of the socket, as `select` needs it."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the HTTP process. It waits while the socket's buffer is full."""
        self._socket.sendall(encode(message))

    def receive(self, *, wait: bool) -> list[dict[str, Any]]:
        """Return the messages that have arrived completely. With `wait`, it first waits until any bytes arrive.

        Raises EOFError if the HTTP process has closed the connection.
        """
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return self._reader.add(data)


class EngineLoop:
    """The main loop of the process: it applies the messages of the HTTP process to the engine, and computes steps.

    A sequence has an id, which the HTTP process chooses, and a number, which the engine chooses.
    """

    def __init__(self, engine: Engine, connection: EngineConnection, transfer: TransferSetup | None = None) -> None:
        """`transfer` has the settings for the exchange of cache blocks with other engines, or is None.

        Raises BadInput if an address in `transfer` cannot be used.
        """
        self._engine = engine
        self._connection = connection
        self._grammars = GrammarJobs(engine)
        self._compiling: set[int] = set()
        """Ids of the sequences whose grammar is being compiled."""
        self._unwanted: set[int] = set()
        """Ids in `_compiling` whose sequences were aborted."""
        self.transfers = (
            None if transfer is None else BlockTransfers(engine, transfer, self._submit_sequences, self._grammars)
        )
        self._numbers: dict[int, int] = {}
        """By id: the engine's number of each unfinished sequence."""
        self._ids: dict[int, int] = {}
        """By number: the id of each unfinished sequence."""
        self._paused = False
        self._failed_steps = 0
        """Number of failed steps in a row."""
        self._reported: tuple[TransferFigures, EngineFigures] | None = None
        """The figures that were reported last."""

    def run(self) -> None:
        """Process messages and compute steps until the HTTP process closes the socket.

        Raises EngineLost after an error that makes the device unusable, and after `FAILED_STEPS` failed steps in a row.
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
                self._grammars.call_finished()
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
        """Begin a request (a message `submit`) once its grammar is compiled: let a peer compute its prompt, or submit it to the engine."""
        ids = set(request["ids"])
        aborted = ids & self._unwanted
        self._compiling -= ids
        self._unwanted -= ids
        if aborted == ids:
            return
        # Log probabilities of a prompt need the logits of all its tokens, so this engine must compute the prompt itself.
        transfers = None if "prompt_logprobs" in request["sampling"] else self.transfers
        if transfers is None or not transfers.begin(request):
            self._submit_sequences(request, None)
        self._abort(list(aborted))

    def _submit_sequences(self, request: Mapping[str, Any], firsts: Sequence[Sequence[Any]] | None) -> None:
        """Submit the sequences of a request to the engine. If that fails, refuse the request.

        `firsts` has, for each sequence, the tokens that another engine has computed, and a dictionary of details as in a message `step`. It
        is None if no other engine has computed tokens.
        """
        try:
            self._queue_sequences(request, firsts)
        except (EOFError, OSError):  # The HTTP process has ended, so `run` ends too.
            raise
        except BadInput as error:
            code = BadGrammar.code if isinstance(error, BadGrammar) else None
            self._refuse(request, str(error), code)
        except Exception as error:  # An error in one request must not end the process, unless the device is unusable.
            if any(text in f"{type(error).__name__}: {error}" for text in DEVICE_ERRORS):
                raise
            traceback.print_exc()
            self._refuse(request, *RequestFailure.of(error))

    def _refuse(self, request: Mapping[str, Any], message: str, code: str | None) -> None:
        """Tell the HTTP process that the sequences of a request are refused."""
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
        """Report the first tokens, which another engine has computed, and submit the sequences that have not ended.

        Returns the ids and the numbers of the submitted sequences.
        """
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
                continue  # The request was refused after some of its sequences were submitted.
            if update.reason or update.logprobs or update.cached_tokens or update.prompt_logprobs:
                entries.append([id, update.tokens, update.details])
            else:
                entries.append([id, update.tokens])
            if update.reason is not None:
                del self._numbers[id], self._ids[update.number]
        self._connection.send({"step": entries, "figures": self._engine.figures()})

    def _report_figures(self, transfers: TransferFigures) -> None:
        """Send the figures to the HTTP process if they have changed.

        They also change between steps: blocks become free when another engine has copied them.
        """
        if self._busy() and self._reported is not None and transfers == self._reported[0]:
            return  # The message of the next step has the engine's figures.
        figures = transfers, self._engine.figures()
        if figures != self._reported:
            self._reported = figures
            self._connection.send({"transfers": transfers, "figures": figures[1]})

    def _count_failure(self, updates: Sequence[Update]) -> None:
        """Count the failed steps in a row. `updates` are the updates of the last step.

        Raises EngineLost after `FAILED_STEPS` failed steps in a row, and after an error that makes the device unusable.
        """
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
    """Raise BadInput if `options.context` is longer than the context of the model."""
    if options.context is not None and options.context > spec.max_seq_len:
        expected = f"expected at most {spec.max_seq_len}, the model's context"
        raise BadInput(f"context: {expected}, got {options.context}", key="context")


def load_engine(setup: EngineSetup, weights: Chosen | None = None) -> Engine:
    """Load an engine on one device: a GPU if there is one, else the CPU. Its updates have tokens and no text.

    `weights` is the checkpoint to load, if the caller has already chosen and verified one. If it is None, `setup.folder` is loaded.
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
    """Run one rank of an engine on several devices until the engine ends. `connection` is None on all ranks but rank 0."""
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
    """Report that the engine is ready, then run it until the HTTP process closes the socket. `weights` is the loaded checkpoint."""
    with suppress(BadGrammar):  # If the vocabulary does not support grammars, only requests with a grammar are refused.
        engine.grammars()
    loop = EngineLoop(engine, connection, transfer)
    ready = {"context": engine.context, "vocab": engine.spec.vocab_size, "sequences": engine.options.sequences}
    facts, warning = ({}, None) if weights is None else (weights.facts(), weights.warning)
    connection.send({"ready": ready, "weights": facts, "warning": warning})
    loop.run()


def main() -> int:
    """Run the engine, or one rank of it. Returns an exit code of docs/reference/exit-codes.md.

    The command-line argument is the file descriptor of the inherited socket, or -1 on all ranks but rank 0. Standard input has the
    `EngineSetup` as JSON.
    """
    end_with_parent()
    raise_file_limit()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # No core files: they would contain keys and texts of requests.
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
