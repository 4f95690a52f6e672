"""`meshwright generate`: sample text from a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.evaluate import Model
from meshwright.cli.options import Json, model_folder
from meshwright.spec.errors import BadInput


def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to continue; may be given several times.")],
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from this many likeliest tokens; 0 from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Another seed draws another continuation.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, on one device. The same seed gives the same text.

    Example:

        meshwright generate runs/quickstart -p "def read_lines(path):" --tokens 80
    """
    samples = sample(model_folder(model), prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    if as_json:
        print(json.dumps({"samples": samples}))
        return
    for one in samples:
        print(one["prompt"] + one["text"])


def sample(
    folder: Path, prompts: list[str], *, tokens: int, temperature: float, top_k: int, seed: int
) -> list[dict[str, str]]:
    """`[{prompt, text}]`: each prompt with the model's continuation. Raises BadInput when the folder has no tokenizer."""
    from tokenizers import Tokenizer

    from meshwright.train.generate import generate
    from meshwright.train.load import device_and_dtype, load_model

    places = [folder / "tokenizer.json", folder.parent.parent / "tokenizer.json"]
    file = next((place for place in places if place.exists()), None)
    if file is None:
        raise BadInput(f"{folder} has no tokenizer.json to read the prompt with")
    tokenizer = Tokenizer.from_file(str(file))
    stop = tokenizer.token_to_id("<|endoftext|>")
    model = load_model(folder, *device_and_dtype())
    samples = []
    for prompt in prompts:
        start = tokenizer.encode(prompt).ids or [stop or 0]
        made = generate(model, start, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, stop=stop)
        samples.append({"prompt": prompt, "text": tokenizer.decode(made)})
    return samples
