"""The inference engine: it takes requests, and returns their new tokens and text step by step.

The engine computes a step in two parts. `_launch` plans the step, runs the model and draws tokens. `_complete` reads the tokens, finds
which requests have ended, and reports to the policy.

On a GPU, steps overlap: the host launches step n + 1 before it reads the tokens of step n, so the device does not wait for the host. The
newest tokens stay on the device. If a request ends in step n, step n + 1 still computes one token for it; the engine discards that token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.data.token_bytes import TokenBytes
from meshwright.kernels.row_quantize import RoundedMatrix
from meshwright.models.decoder import Decoder
from meshwright.policies.batch_request import BatchLimits, CacheGroup, EngineStep, Request, RequestPart
from meshwright.policies.batching import BatchPolicy
from meshwright.policies.cache_blocks import CacheBlocks
from meshwright.serve.batch_inputs import NO_DRAFTS, BatchInputs, PackedScores, PackedStep
from meshwright.serve.drafters import check_speculation, drafter_for
from meshwright.serve.engine_sizes import blocks_that_fit, cache_dtype, cache_room, context_of, has_graphs, prompt_unit
from meshwright.serve.failures import ENGINE_FAILED, RequestFailure
from meshwright.serve.figures import EngineFigures
from meshwright.serve.formats import assign_parameter, rounded_parameters, use_formats
from meshwright.serve.generation import Generation, Update
from meshwright.serve.grammar import BadGrammar, GrammarTokens, unconstrained
from meshwright.serve.graphs import without_garbage_collection
from meshwright.serve.invariance import classes_for
from meshwright.serve.kv_cache import KVCache, layer_groups
from meshwright.serve.model_runner import ModelRunner, graph_sizes
from meshwright.serve.prefix_blocks import PrefixBlocks
from meshwright.serve.prompt_graphs import prompt_graph_sizes
from meshwright.serve.prompt_scores import StepScores, compute_scores
from meshwright.serve.prompts import check_request, prompt_ids
from meshwright.serve.readback import LaunchedStep, TokenReadback
from meshwright.serve.request_rows import RequestRows
from meshwright.serve.sampling import GREEDY, Sampler, SamplingOptions, mark_not_finite
from meshwright.serve.text import text_stream
from meshwright.serve.text_request import TextRequest
from meshwright.serve.warm_up import warm_up
from meshwright.serve.weights import check_same_model, open_newer
from meshwright.spec.engine import EngineOptions, Speculation
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Engine:
    """Generates tokens with one model on one device. Only one thread may use it at a time.

    - `model`: the engine replaces its attention, so from then on only the engine can use the model.
    - `tokenizer`: needed for prompts given as text, for text in the updates, for stop strings and for grammars.
    - `draft_model`: proposes draft tokens for speculative decoding, with the settings `options.speculation` or the defaults.
    - `clock`: returns the time in seconds, for deadlines.
    """

    runner_class: type[ModelRunner] = ModelRunner
    """Class of the object that runs the forward pass. Subclasses of the engine may set another one."""

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        *,
        draft_model: Decoder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options = options or EngineOptions()
        self.spec = model.spec
        self._tokenizer = tokenizer
        self._clock = clock
        self._texts = None if tokenizer is None or not options.texts else TokenBytes(tokenizer)
        self._model = model
        self._weights_whole = True
        self.context = context_of(model, options)
        speculation = options.speculation or (None if draft_model is None else Speculation())
        check_speculation(options, model.spec, draft_model)
        use_formats(model, weights=options.weights, invariant=options.invariant)
        weight = model.embed.weight
        cuda = weight.device.type == "cuda"
        self._overlap = cuda if options.overlap is None else options.overlap
        groups = layer_groups(model.spec)
        blocks = cache_room(model, options).group_blocks(groups, blocks_that_fit(model, options, draft_model))
        cache_groups = [CacheGroup(count, group.window) for count, group in zip(blocks, groups, strict=True)]
        self._policy = BatchPolicy(
            BatchLimits(
                tokens=options.step_tokens,
                sequences=options.sequences,
                prefix_cache=options.prefix_cache,
            ),
            CacheBlocks(cache_groups, options.tokens_per_block),
        )
        # The requests of the step in flight, and other requests in the next step, may need table rows at the same time.
        rows = 2 * options.sequences
        self._cache = cache = KVCache(
            model.spec,
            blocks,
            tokens_per_block=options.tokens_per_block,
            device=weight.device,
            dtype=cache_dtype(model, options),
            predictions=options.predictions,
        )
        graphs = has_graphs(model, options)
        sizes = graph_sizes(options.sequences) if graphs else ()
        in_pieces = graphs and options.prompt_graphs and not options.invariant
        prompt_sizes = prompt_graph_sizes(options.most_step_tokens) if in_pieces else ()
        self._inputs = BatchInputs(
            table_rows=rows,
            blocks=-(-self.context // options.tokens_per_block),
            groups=len(groups),
            tokens_per_block=options.tokens_per_block,
            step_tokens=options.most_step_tokens,
            device=weight.device,
            prompt_unit=prompt_unit(weight.device, cache, options, prompt_sizes),
            drafts=0 if speculation is None else speculation.tokens,
            predictions=options.predictions,
        )
        invariant = options.invariant
        runner, sampler = classes_for(model, options) if invariant else (self.runner_class, Sampler)
        self._runner = runner(
            model,
            cache,
            self._inputs,
            context=self.context,
            graph_sizes=sizes,
            prompt_sizes=prompt_sizes,
            invariant=invariant,
            predictions=options.predictions,
        )
        if not options.absorb:
            self._runner.expand_latents()
        self._sampler = sampler(rows + 1, weight.device, model.spec.vocab_size)
        self._table_rows = RequestRows(rows)
        self._generations: dict[int, Generation] = {}
        self._drafter = drafter_for(
            speculation,
            draft_model,
            model,
            self._runner,
            self._inputs,
            self._sampler,
            blocks=blocks,
            context=self.context,
            graph_sizes=sizes,
        )
        # Each request may need memory for its drafts, for the token after them, and for the number of accepted drafts.
        self._readback = TokenReadback(options.sequences * (2 + self._drafter.longest), weight.device)
        self._next_number = 0
        self._in_flight: LaunchedStep | None = None
        self._grammar_requests = 0
        """Number of unfinished requests that have a grammar."""
        self._scored: dict[int, int] = {}
        """The requests whose prompts get log probabilities: by request number, how many of the likeliest tokens are wanted per position."""
        self._grammars: GrammarTokens | None = None
        """The vocabulary in the form that grammars need; None until the first request with a grammar."""
        self._failures: dict[int, RequestFailure] = {}
        """By request number: errors in the host's work for one request (`_own_work`), until the end of the request is reported."""
        if graphs:
            with without_garbage_collection():
                # Each capture would collect garbage first; here it happens once for all captures.
                self._runner.capture_graphs()
                self._drafter.capture_graphs()
        if cuda:
            warm_up(self._runner, self._inputs, self._sampler, cache_groups, self.context)

    @property
    def drafts(self) -> tuple[int, int]:
        """Number of draft tokens that were proposed so far, and number of draft tokens that were accepted."""
        return self._drafter.proposed, self._drafter.accepted

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._generations)

    def submit(self, prompt: str | Sequence[int], *, new_tokens: int, **options: Any) -> int:
        """Queue a request for at most `new_tokens` tokens after a prompt. Returns the request's number, which its updates carry.

        `options` are the other fields of `TextRequest`. The request ends with the reason "length" after `new_tokens` tokens, or when the
        context is full. Raises BadInput for a prompt that does not fit the model's context or the cache, and BadGrammar for a grammar that
        cannot be followed.
        """
        ids = prompt_ids(prompt, self._tokenizer)
        return self._queue(TextRequest(prompt=ids, new_tokens=new_tokens, **options))

    def _queue(self, request: TextRequest) -> int:
        generation, planned = self._prepare(request)
        self._policy.add(planned)
        number = planned.number
        self._next_number += 1
        self._grammar_requests += generation.matcher is not None
        if generation.matcher is None and not generation.sampling.follows_text:
            self._drafter.begin(number)
        self._generations[number] = generation
        if (most := generation.sampling.prompt_logprobs) is not None:
            self._scored[number] = most
        return number

    def _prepare(self, request: TextRequest) -> tuple[Generation, Request]:
        """Check a request. Returns its state in the engine (`Generation`) and in the policy (`Request`). Raises the errors of `submit`."""
        ids = tuple(request.prompt)
        sampling = request.sampling
        grammar = request.grammar
        check_request(ids, request.new_tokens, context=self.context, vocab=self.spec.vocab_size)
        if request.stop_strings and self._texts is None:
            raise BadInput("stop strings need an engine with a tokenizer that gives texts; give stop ids")
        sampling.check_tokens(self.spec.vocab_size)
        matcher = None if grammar is None else self.grammars().matcher(grammar, request.stop_ids)
        stream = None if self._texts is None else text_stream(ids, self._texts)
        generation = Generation(
            sampling, stream, request.stop_ids, request.stop_strings, matcher, reports_steps=request.reports_steps
        )
        generation.begin_after(request.given)
        now = self._clock()
        planned = Request(
            self._next_number,
            ids,
            min(request.new_tokens, self.context - len(ids)),
            priority=request.priority,
            deadline=None if request.seconds is None else now + request.seconds,
            arrival=now,
            samples_of=request.samples_of,
            salt=request.salt,
            given=tuple(request.given),
            continued_elsewhere=request.continued_elsewhere,
            computes_all=sampling.prompt_logprobs is not None,
        )
        self._policy.check(planned)
        return generation, planned

    def submit_samples(
        self, prompt: str | Sequence[int], count: int, *, sampling: SamplingOptions, **options: Any
    ) -> list[int]:
        """Queue `count` requests with the same prompt, which is computed only once. Returns the numbers of the requests.

        Request i gives the same text as a single request with the sampling options `sampling.sample(i)`. `options` is as in `submit`.
        Raises BadInput if `count` is below 1, and the errors of `submit`; then no request stays in the queue.
        """
        if count < 1:
            raise BadInput(f"samples: expected at least 1, got {count}")
        ids = prompt_ids(prompt, self._tokenizer)
        numbers: list[int] = []
        try:
            for index in range(count):
                first = {"samples_of": numbers[0]} if numbers else {}
                numbers.append(self.submit(ids, sampling=sampling.sample(index), **first, **options))
        except Exception:  # The caller gets no numbers, so it could not abort the samples that are queued already.
            for number in numbers:
                self.abort(number)
            raise
        return numbers

    def abort(self, number: int) -> None:
        """End a request. The next step returns its last update. A number is ignored if no unfinished request has it."""
        self._policy.abort(number)

    def load_weights(self, folder: Path) -> None:
        """Load new weights from `folder`, which the next step uses. The folder is a run, a checkpoint or a Hugging Face folder.

        The weights are copied into the existing parameters, so CUDA graphs stay valid. The prefix cache is emptied. Running requests keep
        their tokens and compute the keys and values of these again, so their next tokens depend on the new weights only.

        All files are verified before the first parameter changes. Raises BadInput if the folder has another model, and Damaged for damaged
        files; in both cases the engine keeps its old weights. If reading fails later, while parameters change, `step` raises RuntimeError
        until a call of `load_weights` succeeds.
        """
        device = self._model.embed.weight.device
        with open_newer(folder, predictions=self.spec.prediction_depth, device=device) as stored:
            check_same_model(self.spec, stored.spec, folder)
            stored.verify()
            self.replace_weights(stored.tensors(formats=rounded_parameters(self._model)))

    def replace_weights(self, tensors: Iterable[tuple[str, Tensor | RoundedMatrix]]) -> None:
        """Replace the weights by `tensors`: pairs of a parameter's name and its whole tensor. The next step uses them.

        The effect on running requests is that of `load_weights`. If the iterator raises, `step` raises RuntimeError until a call of
        `replace_weights` or `load_weights` succeeds.
        """
        self._policy.forget_cache()
        self._weights_whole = False
        for name, value in tensors:
            assign_parameter(self._model, name, value)
        self._weights_whole = True

    def prefix_blocks(self) -> PrefixBlocks:
        """Return the prefix cache, so that other processes can read and fill its blocks. The blocks are valid until `load_weights`."""
        return PrefixBlocks(self._model, self._policy, self._cache)

    def figures(self) -> EngineFigures:
        """Return the current load of the engine. The cache usage is the fraction of used blocks, in the group of layers that uses most."""
        policy = self._policy
        pools = policy.cache.pools
        usage = max(1 - pool.free / pool.blocks for pool in pools)
        waiting = policy.unfinished - policy.running
        load = policy.running, waiting, usage, policy.preemptions
        return EngineFigures(*load, policy.cached_tokens, *self.drafts, policy.looked_up_tokens)

    def run(self) -> Iterator[Update]:
        """Compute steps until no request is left, and yield the updates of each."""
        while self.unfinished:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """Compute one step. Returns the updates of requests that got tokens or have ended.

        Without overlap, the call launches a step and returns its tokens. With overlap, call n launches step n and returns the tokens of
        step n - 1. But if a prompt waits, and the device has already computed the tokens of step n - 1, the call only returns these tokens
        and launches nothing.

        If the computation of a step raises, all requests of the step end with the reason "failed". If the host's work for one request
        raises, only this request ends. Raises RuntimeError if the last call of `load_weights` has replaced only a part of the weights.
        """
        if not self._weights_whole:
            raise RuntimeError("the weights were replaced in part only; load weights again")
        updates: list[Update] = []
        # The host must know the newest token before a grammar can say which tokens may follow, and before drafts are proposed.
        drafting = self._drafter.begin_step(len(self._policy.decodes))
        overlap = self._overlap and not self._grammar_requests and not drafting
        if not overlap:
            self._complete_in_flight(updates)
        elif self._policy.prompts_wait and self._tokens_have_come():
            # The host launches a prompt more slowly than the device computes most steps. So it returns these tokens first.
            self._complete_in_flight(updates)
            return updates
        launched = self._launch(updates, drafting)
        self._end_failed()
        self._report_ended(updates)
        if overlap:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._complete(launched, updates)
        return updates

    def _launch(self, updates: list[Update], drafting: bool) -> LaunchedStep | None:
        """Plan a step and start it, with drafts if `drafting`. Returns None if there is nothing to compute, or if the step raised."""
        drafts = self._drafter.propose(self._policy.decodes, self._own_work) if drafting else NO_DRAFTS
        self._end_failed()
        step = self._policy.next_step(self._clock(), {number: len(tokens) for number, tokens in drafts.items()})
        if step is None:
            return None
        try:
            self._assign_rows(step)
            packed = self._inputs.pack(
                step,
                self._table_rows.row_of,
                self._runner.decode_sizes,
                drafts,
                uniform=self._runner.uniform_drafts,
                scored={number: self._generations[number].scored for number in self._scored},
            )
            self._drafter.follow(packed)
            logits = self._runner.logits(packed)
            scores = None if packed.scores is None else self._compute_scores(packed.scores)
            tokens = self._sampler.sample(logits, packed.sampled_rows, packed.sampled_positions, self._allowed(packed))
            checked = self._drafter.check(packed, logits, tokens)
            self._inputs.newest[checked.table_rows] = checked.newest
            logprobs = self._sampler.logprobs(logits, checked.tokens) if self._sampler.wants_logprobs else None
            marked = mark_not_finite(checked.tokens, logits)
            launched = self._readback.start(step, packed, marked, logprobs, scores, checked.accepted)
            # This comes after the readback has begun, so that the host can read the tokens before the next drafts are drawn.
            self._drafter.draw_next(packed, checked)
            return launched
        except Exception as error:
            self._complete_in_flight(updates)
            self._fail(step, error, updates)
            return None

    def _compute_scores(self, packed: PackedScores) -> StepScores:
        """Return the log probabilities of prompt tokens, from the step that the runner has just computed."""
        most = max(self._scored[number] for number, _ in packed.counts)
        for number, count in packed.counts:
            self._generations[number].scored += count
        return compute_scores(self._runner, self._sampler, packed, most)

    def _assign_rows(self, step: EngineStep) -> None:
        """Give a table row to each request of a step that has none.

        In this step such a request has a chunk, or a decode whose newest token the host knows. In the second case the token is copied to
        the device.
        """
        if step.unchanged:
            return
        rows = self._table_rows.row_of
        new = [(index, part) for index, part in enumerate(step.parts) if part.request.number not in rows]
        if not new:
            return
        needed = {part.request.number for part in step.parts}
        if self._in_flight is not None:
            needed.update(part.request.number for part in self._in_flight.step.parts)
        for index, part in new:
            number = part.request.number
            row = self._table_rows.take(number, needed)
            self._inputs.forget_row(row)
            self._generations[number].note_cached(part.progress.cached or 0)
            self._own_work(number, self._assign_options, row, part)
            if number in self._failures:
                self._sampler.assign(row, GREEDY)
            if index < step.decodes:
                self._inputs.newest[row] = part.tokens[part.start]

    def _assign_options(self, row: int, part: RequestPart) -> None:
        generation = self._generations[part.request.number]
        prompt_tokens = len(part.request.prompt)
        self._sampler.assign(row, generation.sampling, part.tokens, prompt_tokens, generation.stop_ids)

    def _own_work(self, number: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that works for request `number` only, and return its result.

        If the function raises, the error is stored in `_failures`, the request ends later, and the result is None.
        """
        try:
            return call(*arguments)
        except Exception as error:
            self._failures.setdefault(number, RequestFailure.of(error))
            return None

    def _end_failed(self) -> None:
        """Let the policy end the requests for which `_own_work` has stored a failure."""
        for number, failure in self._failures.items():
            self._policy.fail_request(number, poisoned=failure.poisoned)

    def _tokens_have_come(self) -> bool:
        """Whether the tokens of the step in flight can be read without waiting."""
        return self._in_flight is not None and self._in_flight.has_come()

    def _complete_in_flight(self, updates: list[Update]) -> None:
        launched = self._in_flight
        self._in_flight = None
        if launched is not None:
            self._complete(launched, updates)

    def _complete(self, launched: LaunchedStep, updates: list[Update]) -> None:
        """Read the tokens of a launched step, add them to the requests, and complete the step in the policy."""
        step = launched.step
        try:
            scored = self._take_in_scores(launched)
            complete = self._take_in_drafts(launched) if step.drafts else self._take_in(launched)
        except Exception as error:
            self._fail(step, error, updates)
            return
        # This comes before `complete`, so that blocks of failed requests do not enter the prefix cache.
        self._end_failed()
        complete()
        self._report_ended(updates)
        for number in dict.fromkeys([*scored, *(part.request.number for part in launched.parts)]):
            if (generation := self._generations.get(number)) is not None and generation.reports_steps:
                update = self._own_work(number, generation.update, number)
                updates += () if update is None else (update,)
        if self._failures:
            self._end_failed()
            self._report_ended(updates)

    def _take_in_scores(self, launched: LaunchedStep) -> Sequence[int]:
        """Add the log probabilities of prompts to the generations. Returns the numbers of their requests. `_take_in` is called later."""
        if launched.scores is None:
            return ()
        launched.read()
        most = {number: self._scored.get(number, 0) for number, _ in launched.scores.counts}
        for number, logprobs in launched.scores.by_request(most):
            if (generation := self._generations.get(number)) is not None:
                self._own_work(number, generation.add_prompt_logprobs, logprobs)
        return [*most]

    def _take_in(self, launched: LaunchedStep) -> Callable[[], None]:
        """Add the tokens of a launched step to the generations. Returns a function that completes the step in the policy."""
        tokens = launched.read()
        step = launched.step
        logprobs = launched.token_logprobs(len(tokens))
        token_of = {part.request.number: token for part, token in zip(launched.parts, tokens, strict=True)}
        stopped = {
            number
            for (number, token), logprob in zip(token_of.items(), logprobs, strict=True)
            if (generation := self._generations.get(number)) is not None
            and self._own_work(number, generation.add, token, logprob)
        }
        return partial(self._policy.complete, step, [token_of[part.request.number] for part in step.sampling], stopped)

    def _take_in_drafts(self, launched: LaunchedStep) -> Callable[[], None]:
        """Do the work of `_take_in` for a step with drafts: a request may get several tokens, and each of them may end the request."""
        new = launched.read_drafted()
        step = launched.step
        new_of = {}
        stopped = set()
        self._drafter.record(launched, [len(pairs) for pairs in new])
        for part, pairs in zip(launched.parts, new, strict=True):
            number = part.request.number
            generation = self._generations.get(part.request.number)
            taken = None if generation is None else self._own_work(number, generation.add_drafted, pairs)
            # The policy ignores the tokens of a request that has ended.
            new_of[number], ended = ([token for token, _ in pairs], False) if taken is None else taken
            if ended:
                stopped.add(number)
        tokens = [new_of[part.request.number] for part in step.sampling]
        return partial(self._policy.complete_drafts, step, tokens, stopped)

    def _fail(self, step: EngineStep, error: Exception, updates: list[Update]) -> None:
        """End all requests of a step that has raised `error`, and add their last updates."""
        self._policy.fail(step)
        self._report_ended(updates, RequestFailure(f"{type(error).__name__}: {error}", ENGINE_FAILED))

    def _report_ended(self, updates: list[Update], failed_step: RequestFailure | None = None) -> None:
        """Add the last update of each request that has ended. Requests with the reason "failed" report the failure `failed_step`."""
        for ended in self._policy.drain_ended():
            generation = self._generations.pop(ended.number)
            self._drafter.end(ended.number)
            self._scored.pop(ended.number, None)
            self._grammar_requests -= generation.matcher is not None
            if (row := self._table_rows.release(ended.number)) is not None:
                self._sampler.release(row)
            failure = failed_step if ended.reason == "failed" else None
            update = self._own_work(ended.number, generation.update, ended.number, ended.reason, failure)
            if (own := self._failures.pop(ended.number, None)) is not None:
                update = Update(ended.number, (), "", "failed", own.message, code=own.code)
            updates.append(update)

    def grammars(self) -> GrammarTokens:
        """Return the vocabulary in the form that grammars need. The first call takes seconds.

        Raises BadGrammar if the engine has no tokenizer.
        """
        if self._tokenizer is None:
            raise BadGrammar("a grammar needs an engine with a tokenizer")
        if self._grammars is None:
            self._grammars = GrammarTokens(self._tokenizer, vocab=self.spec.vocab_size)
        return self._grammars

    def _allowed(self, packed: PackedStep) -> Tensor | None:
        """Return a bitmask on the device with the tokens that grammars allow, one row for each sample. None if no request has a grammar."""
        if not self._grammar_requests:
            return None
        # A request with a grammar never has drafts, so it has one sample. Parts with drafts come first and have several samples each: the
        # sample of part i (after the parts with drafts) is i + the number of further samples of the parts with drafts.
        before = packed.drafts.total - len(packed.drafts.counts) if packed.drafts is not None else 0
        device = self._inputs.device
        bitmask = unconstrained(len(packed.sampled_rows), self.spec.vocab_size, pin_memory=device.type == "cuda")
        for index, part in enumerate(packed.sampled_parts, before):
            number = part.request.number
            if (matcher := self._generations[number].matcher) is not None:
                self._own_work(number, matcher.write_bitmask, bitmask, index)
        return bitmask.to(device, non_blocking=True)
