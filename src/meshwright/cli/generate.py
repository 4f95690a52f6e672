"""`meshwright generate`: continues prompts with a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from meshwright.cli.chat_prompts import ChatPrompts, messages_of
from meshwright.cli.evaluate import AdapterFolder, Model
from meshwright.cli.options import Json, model_folder, say
from meshwright.cli.spread import (
    PlanFile,
    answer_of_ranks,
    ask_ranks,
    check_experts,
    check_split,
    cluster_here,
    found_weights,
    model_in,
)
from meshwright.spec.engine import ONE_RANK, ExpertRanks
from meshwright.spec.errors import BadInput
from meshwright.spec.serve import MTP

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from meshwright.serve.engine import Engine
    from meshwright.serve.generation import Update
    from meshwright.spec.engine import EngineOptions

MOST_AT_ONCE = 64
"""Maximum number of prompts that are continued at the same time."""
DRAFT_TOKENS = 4
"""Default number of draft tokens in a step if there is a draft model."""


class Drafting(NamedTuple):
    """Settings of speculative decoding. If there is neither a draft model nor `mtp`, drafts come from prompt lookup."""

    tokens: int = 0
    """Maximum number of draft tokens of a sequence in a step. 0 switches speculative decoding off."""
    model: Path | None = None
    """Folder of a draft model."""
    mtp: bool = False
    """Whether the modules for multi-token prediction of the model itself propose drafts."""

    @property
    def modules(self) -> int:
        """Number of prediction modules that propose drafts. Each proposes one token."""
        return self.tokens if self.mtp else 0


class MatmulFlags(StrEnum):
    """Formats that `--weights` offers for the matmuls with the model's weights. They are narrower than the model's dtype."""

    FP8 = "fp8"
    INT8 = "int8"


class CacheFormat(StrEnum):
    """Formats that `--kv-cache` offers for cached keys and values. They are narrower than the model's dtype."""

    FP8 = "fp8"


class Int8Format(StrEnum):
    """Formats that `--expert-dispatch` offers for the hidden states that are sent to experts on other devices."""

    INT8 = "int8"


class EngineFormats(NamedTuple):
    """Formats with which the engine computes, as in `serve.engine.EngineOptions`."""

    weights: MatmulFlags | None = None
    """Format of the matmuls with weights; None for the model's dtype."""
    kv_cache: CacheFormat | None = None
    """Format of cached keys and values; None for the model's dtype."""
    invariant: bool = False
    """Whether the result for a sequence must not depend on the other sequences, bit for bit."""


def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; may be given several times.")],
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Scale of randomness; 0 always selects the most likely token (greedy).")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0 from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Another seed draws another continuation.")] = 0,
    weights: Annotated[MatmulFlags | None, typer.Option(help="Format of the matmuls with the blocks' weights.")] = None,
    kv_cache: Annotated[CacheFormat | None, typer.Option(help="Format of cached keys and values.")] = None,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Make each text independent of the others, bit for bit.")
    ] = False,
    speculate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draft tokens that a step checks for each text; 0 for none, or 4 with --draft-model, 1 if that is mtp.",
        ),
    ] = 0,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A smaller model that proposes the draft tokens, or mtp: the model's own prediction modules (default: prompt lookup).",
        ),
    ] = None,
    adapter: AdapterFolder = None,
    plan: PlanFile = None,
    tensor: Annotated[
        int,
        typer.Option(min=1, metavar="RANKS", help="Devices of this host over which the engine divides every layer."),
    ] = 1,
    expert: Annotated[
        int,
        typer.Option(
            min=1, metavar="RANKS", help="Devices of this host that share the experts; each has prompts of its own."
        ),
    ] = 1,
    expert_dispatch: Annotated[
        Int8Format | None, typer.Option(help="Format of tokens on their way to experts of other devices.")
    ] = None,
    expert_micro_batches: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Parts of a step's decodes; the tokens of one travel while another is computed."
        ),
    ] = 1,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Each prompt is a message: it is answered, written by the model's chat template."),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System prompt, with --chat.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, on one or several devices. The same seed gives the same text.

    With --chat the model answers the prompt as a message; `meshwright chat` talks with it.

    Examples:

        meshwright generate runs/quickstart -p "def read_lines(path):" --tokens 80

        meshwright generate my-chat-model --chat -p "Hi" --system "Answer in one sentence."

        meshwright generate runs/big --tensor 2 -p "def read_lines(path):"

        meshwright generate runs/big --plan runs/big/plan.yaml -p "def read_lines(path):"
    """
    if plan is not None and tensor > 1:
        raise BadInput("--plan and --tensor exclude each other: a plan has its own ranks")
    if system is not None and not chat:
        raise BadInput("--system needs --chat: a text to continue has no system prompt")
    if expert > 1 and (tensor > 1 or plan is not None):
        raise BadInput("--expert excludes --tensor and --plan, which name other ranks")
    dispatch = None if expert_dispatch is None else expert_dispatch.value
    experts = ExpertRanks(count=expert, dispatch=dispatch, micro_batches=expert_micro_batches)
    folder = model_folder(model)
    show = _unseen if as_json else partial(print, end="", flush=True)
    mtp = draft_model == Path(MTP)
    drafting = Drafting(speculate or int(mtp), mtp=mtp)
    if draft_model is not None and not mtp:
        drafting = Drafting(speculate or DRAFT_TOKENS, model_folder(draft_model))
    source, facts = found_weights(folder)
    samples = sample(
        source,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        formats=EngineFormats(weights, kv_cache, invariant),
        drafting=drafting,
        adapter=adapter,
        plan=plan,
        tensor=tensor,
        experts=experts,
        chat=chat,
        system=system,
        show=show,
    )
    if as_json:
        print(json.dumps({"samples": samples, **facts}))


def _unseen(piece: str) -> None:
    """Ignore a part of a text. Used if the texts are only returned and not shown."""


def sample(
    folder: Path,
    prompts: list[str],
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    formats: EngineFormats = EngineFormats(),
    drafting: Drafting = Drafting(),
    adapter: Path | None = None,
    plan: Path | None = None,
    tensor: int = 1,
    experts: ExpertRanks = ONE_RANK,
    chat: bool = False,
    system: str | None = None,
    show: Callable[[str], object] = _unseen,
) -> list[dict[str, str]]:
    """Continue each prompt. Returns `[{prompt, text}]`, where `text` is the continuation, in the order of `prompts`.

    - `tensor`, `experts`, `plan`: the ranks that compute: tensor-parallel ranks, expert-parallel ranks, or the ranks of
      a plan file.
    - `chat`: each prompt is a message of a user, after the `system` prompt if there is one. The continuation is the
      answer.
    - `adapter`: adapters that are merged into the weights. Only for one device.
    - `formats`: formats of the engine. With a plan, other formats than the default raise BadInput; so does `invariant`
      with several ranks.
    - `show`: receives the texts in the order of the prompts. On one device it receives each part as it is generated,
      otherwise all texts at the end.

    All prompts are continued at the same time.
    """
    from meshwright.data.token_bytes import TokenBytes
    from meshwright.serve.text import continuation
    from meshwright.server.model_files import read_model_files

    ranks = max(tensor, experts.count)
    if plan is not None or ranks > 1:
        option = "--tensor" if tensor > 1 else "--expert"
        option = option if plan is None else "--plan"
        if formats.invariant or (plan is not None and formats != EngineFormats()):
            refused = "--invariant is" if plan is None else "--weights, --kv-cache and --invariant are"
            raise BadInput(f"{refused} for one device: leave out {option}")
        if drafting.tokens:
            raise BadInput(f"--speculate and --draft-model are for one device: leave out {option}")
        if adapter is not None:
            raise BadInput(
                f"--adapter is for one device: leave out {option}, or merge it first (meshwright checkpoint merge)"
            )
    files = read_model_files(folder)
    tokenizer = files.tokenizer
    for sentence in files.text.sentences():
        say(f"meshwright: {sentence}")
    how = SamplingFlags(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, stops=files.stop_ids)
    if chat:
        chats = ChatPrompts(folder, files)
        ids = [chats.ids(messages_of(system, prompt)) for prompt in prompts]
    else:
        ids = [files.text.prompt(tokenizer.encode(prompt, add_special_tokens=False).ids) for prompt in prompts]
    _warn_past_context(folder, max(map(len, ids)), tokens, spread=plan is not None)
    texts = _TextsInOrder([f"{prompt}\n" if chat else prompt for prompt in prompts], show)
    if plan is None and ranks == 1:
        _continue_here(folder, tokenizer, ids, how, texts, formats, drafting, adapter)
    else:
        by_ranks = (
            _continued_by_engine_ranks(folder, tensor, experts, ids, how, formats)
            if plan is None
            else _continued_by_plan(folder, plan, ids, how)
        )
        decoded = TokenBytes(tokenizer)
        for number, new in enumerate(by_ranks):
            texts.add(number, continuation(ids[number], new, decoded), ended=True)
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts.texts, strict=True)]


class SamplingFlags(NamedTuple):
    """Options of the command that say how tokens are drawn."""

    tokens: int
    """Maximum number of new tokens of a prompt."""
    temperature: float
    """Divides the logits before the softmax; 0 takes the likeliest token."""
    top_k: int
    """Draw from this many likeliest tokens; 0 from all."""
    seed: int
    stops: tuple[int, ...]
    """Ids of tokens that end a text."""


class _TextsInOrder:
    """Shows the continuations of several prompts in the order of the prompts, while they are generated at the same time.

    A continuation grows on the screen once all before it have ended.
    """

    def __init__(self, prompts: Sequence[str], show: Callable[[str], object]) -> None:
        self.texts = [""] * len(prompts)
        self._prompts = prompts
        self._show = show
        self._ended = [False] * len(prompts)
        self._current = self._shown = 0
        show(prompts[0])

    def add(self, number: int, piece: str, *, ended: bool) -> None:
        """Add a part of the continuation of prompt `number`. `ended` tells that it is the last part."""
        self.texts[number] += piece
        self._ended[number] = ended
        while self._current < len(self.texts):
            text = self.texts[self._current]
            if len(text) > self._shown:
                self._show(text[self._shown :])
                self._shown = len(text)
            if not self._ended[self._current]:
                return
            self._show("\n")
            self._current = self._current + 1
            self._shown = 0
            if self._current < len(self.texts):
                self._show(self._prompts[self._current])


def _warn_past_context(folder: Path, prompt: int, tokens: int, *, spread: bool) -> None:
    """Warn on stderr if a prompt of `prompt` tokens plus `tokens` new ones is longer than the context of the model."""
    context = model_in(folder)[0].max_seq_len
    if prompt + tokens <= context:
        return
    end = f"each new token then follows from the last {context} alone" if spread else "the text ends there"
    say(
        f"meshwright: a prompt of {prompt} tokens and {tokens} new tokens pass the model's context of {context}; "
        f"{end}. Fewer --tokens or a shorter prompt stay within it"
    )


def _continue_here(
    folder: Path,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[int, ...]],
    how: SamplingFlags,
    texts: _TextsInOrder,
    formats: EngineFormats,
    drafting: Drafting,
    adapter: Path | None,
) -> None:
    """Continue all prompts with an engine in this process, on one device."""
    from meshwright.checkpoint.models.single_device import device_and_dtype, load_model
    from meshwright.serve.engine import Engine
    from meshwright.serve.load import load_for_engine

    draft_model = None if drafting.model is None else load_model(drafting.model, *device_and_dtype())
    options = engine_options(prompts, how, formats, drafting)
    model = load_for_engine(folder, *device_and_dtype(), options, predictions=drafting.modules, adapter=adapter)
    engine = Engine(model, tokenizer, options, draft_model=draft_model)
    for number, update in continued(engine, prompts, how):
        texts.add(number, update.text, ended=update.reason is not None)
    if drafting.tokens:
        proposed, accepted = engine.drafts
        say(f"meshwright: {accepted} of {proposed} draft tokens accepted ({accepted / max(proposed, 1):.0%})")


def engine_options(
    prompts: Sequence[Sequence[int]],
    how: SamplingFlags,
    formats: EngineFormats = EngineFormats(),
    drafting: Drafting = Drafting(),
) -> EngineOptions:
    """Return options of an engine with room for these prompts, which are lists of token ids."""
    from meshwright.spec.engine import EngineOptions, Speculation

    longest = max(map(len, prompts)) + how.tokens
    return EngineOptions(
        sequences=min(len(prompts), MOST_AT_ONCE),
        context=longest,
        weights=None if formats.weights is None else formats.weights.value,
        kv_cache=None if formats.kv_cache is None else formats.kv_cache.value,
        invariant=formats.invariant,
        speculation=Speculation(tokens=drafting.tokens, mtp=drafting.mtp) if drafting.tokens else None,
    )


def continued(engine: Engine, prompts: Sequence[Sequence[int]], how: SamplingFlags) -> Iterator[tuple[int, Update]]:
    """Continue `prompts` with the engine. Yields (index of a prompt, update of its continuation) until all have ended."""
    from meshwright.serve.sampling import SamplingOptions

    sampling = SamplingOptions(temperature=how.temperature, top_k=how.top_k, seed=how.seed)
    numbers = [
        engine.submit(prompt, new_tokens=how.tokens, sampling=sampling, stop_ids=how.stops) for prompt in prompts
    ]
    for update in engine.run():
        if update.error is not None:
            raise RuntimeError(update.error)
        yield numbers.index(update.number), update


def _continued_by_engine_ranks(
    folder: Path,
    tensor: int,
    experts: ExpertRanks,
    prompts: Sequence[tuple[int, ...]],
    how: SamplingFlags,
    formats: EngineFormats,
) -> Sequence[Sequence[int]]:
    """Return the new tokens of each prompt. The engine runs on several ranks of this host, tensor-parallel or expert-parallel."""
    from meshwright.cli.generate_rank import EngineJob
    from meshwright.spec.fields import to_plain

    model, weights = model_in(folder)
    if experts.count > 1:
        check_experts(model, experts.count, "--expert")
        cluster = cluster_here(experts.count, f"--expert {experts.count}", "expected at most that many")
    else:
        check_split(model, tensor)
        cluster = cluster_here(tensor, f"--tensor {tensor}", "expected at most that many")
    options = engine_options(prompts, how, formats)
    source = weights.partition(":")[2]
    job = EngineJob(
        folder=source,
        cluster=cluster,
        prompts=tuple(prompts),
        weights=options.weights,
        kv_cache=options.kv_cache,
        experts=experts,
        **how._asdict(),
    )
    return answer_of_ranks("meshwright.cli.generate_rank", to_plain(job), cluster, weights)


def _continued_by_plan(
    folder: Path, plan: Path, prompts: Sequence[tuple[int, ...]], how: SamplingFlags
) -> Sequence[Sequence[int]]:
    """Return the new tokens of each prompt, computed by the ranks of a plan."""
    from meshwright.training.generate import GenerationSampling as PlanSampling
    from meshwright.training.spread import Continuation

    continuation = Continuation(prompts=tuple(prompts), sampling=PlanSampling(**how._asdict()))
    answer = ask_ranks(folder, plan, continuation=continuation)
    assert answer.tokens is not None
    return answer.tokens
