"""`meshwright generate`: sample text from a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.evaluate import Model
from meshwright.cli.options import Json, model_folder, say
from meshwright.cli.spread import PlanFile, ask_ranks, model_in
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from meshwright.training.generate import Sampling


def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; may be given several times.")],
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always selects the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0 from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Another seed draws another continuation.")] = 0,
    plan: PlanFile = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, on one device or spread by a plan. The same seed gives the same text.

    Examples:

        meshwright generate runs/quickstart -p "def read_lines(path):" --tokens 80

        meshwright generate runs/big --plan runs/big/plan.yaml -p "def read_lines(path):"
    """
    folder = model_folder(model)
    show = _unseen if as_json else partial(print, end="", flush=True)
    samples = sample(
        folder, prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, plan=plan, show=show
    )
    if as_json:
        print(json.dumps({"samples": samples}))


def _unseen(piece: str) -> None:
    """Ignore partial texts: the whole text is returned."""


def sample(
    folder: Path,
    prompts: list[str],
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    plan: Path | None = None,
    show: Callable[[str], object] = _unseen,
) -> list[dict[str, str]]:
    """`[{prompt, text}]`: each prompt with the model's continuation, computed by the ranks of `plan` if it is given.

    `show` receives the texts: on one device each piece as it is generated, from ranks when all are complete.
    """
    from tokenizers import Tokenizer

    from meshwright.training.generate import Sampling

    candidates = [folder / "tokenizer.json", folder.parent.parent / "tokenizer.json"]
    file = next((path for path in candidates if path.exists()), None)
    if file is None:
        raise BadInput(f"{folder} has no tokenizer.json to read the prompt with")
    tokenizer = Tokenizer.from_file(str(file))
    stop = tokenizer.token_to_id("<|endoftext|>")
    how = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, stop=stop)
    ids = [tokenizer.encode(prompt).ids or [stop or 0] for prompt in prompts]
    _warn_past_context(folder, max(map(len, ids)), tokens)
    continuation = _continued(folder, ids, how, plan)
    samples = []
    for prompt, tokens_made in zip(prompts, continuation, strict=True):
        show(prompt)
        samples.append({"prompt": prompt, "text": _shown(tokenizer, tokens_made, show)})
        show("\n")
    return samples


def _warn_past_context(folder: Path, prompt: int, tokens: int) -> None:
    """Warn on stderr if a prompt of `prompt` tokens and `tokens` new ones exceed the model's context."""
    context = model_in(folder)[0].max_seq_len
    if prompt + tokens > context:
        say(
            f"meshwright: a prompt of {prompt} tokens and {tokens} new tokens pass the model's context of {context}; "
            f"each new token then follows from the last {context} alone. Fewer --tokens or a shorter prompt stay within it"
        )


def _shown(tokenizer: Tokenizer, tokens: Iterable[int], show: Callable[[str], object]) -> str:
    """The text of `tokens` up to the last complete character; a character may take several tokens."""
    ids: list[int] = []
    text = previous = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            show(text[len(previous) :])
            previous = text
    show(text[len(previous) :])
    return text


def _continued(
    folder: Path, prompts: Sequence[Sequence[int]], how: Sampling, plan: Path | None
) -> Sequence[Iterable[int]]:
    from meshwright.checkpoint.single_device import device_and_dtype, load_model
    from meshwright.training.generate import generate

    if plan is None:
        model = load_model(folder, *device_and_dtype())
        return [generate(model, prompt, how) for prompt in prompts]
    from meshwright.training.spread import Continuation

    continuation = Continuation(prompts=tuple(map(tuple, prompts)), sampling=how)
    answer = ask_ranks(folder, plan, continuation=continuation)
    assert answer.tokens is not None
    return answer.tokens
