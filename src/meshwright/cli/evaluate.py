"""`meshwright eval`: measures the loss, perplexity and bits per byte of a model on held-out text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.options import Json, model_folder, say, show
from meshwright.cli.spread import PlanFile, ask_ranks, found_weights, model_in
from meshwright.data.inputs import STDLIB
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.data.loader import MicroBatch
    from meshwright.models.decoder import Decoder
    from meshwright.spec.job import DataSpec
    from meshwright.spec.run import RunSpec
    from meshwright.training.evaluate import Evaluation

Model = Annotated[
    Path,
    typer.Argument(
        help="A run's folder or its name under `runs/` (the newest good checkpoint), one checkpoint, or a Hugging Face folder."
    ),
]

AdapterFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Adapters to merge into the weights: a folder in peft's files, or a run with adapters."
    ),
]

_OF_MODELS = ("config.yaml", "config.json", "checkpoints")
"""Files and folders that identify the folder of a model: it has at least one of them."""


def evaluate(
    model: Model,
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Prepared data directory; default: the held-out text of the run.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per sequence (data.packing none: at most); default: that of the run, else 2048 or the model's context if shorter.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences read at a time.")] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens read, spread evenly over sources and documents; default: data.validation_tokens of the run.",
        ),
    ] = None,
    adapter: AdapterFolder = None,
    plan: PlanFile = None,
    as_json: Json = False,
) -> None:
    """Measure a model on held-out text: loss in nats per token, perplexity, and bits per byte of the text.

    On held-out pairs of answers: how often the chosen one is likelier, by a reward model how often it has the higher score.

    Runs on one device (a GPU if there is one), or over several devices with --plan.

    Examples:

        meshwright eval runs/quickstart

        meshwright eval exported-model --data corpus/held_out --seq-len 1024 --json
    """
    folder = model_folder(model)
    if not any((folder / name).exists() for name in _OF_MODELS):
        expected = "expected the folder of a run, a checkpoint of one, or a Hugging Face folder"
        prepared = any((folder / name).exists() for name in ("manifest.json", "train/manifest.json"))
        hint = f"; prepared data are --data {folder}" if prepared else ""
        raise BadInput(f"{folder} is no model: {expected}{hint}")
    weights, facts = found_weights(folder)
    if adapter is not None and plan is not None:
        raise BadInput("--adapter is for one device: leave out --plan, or merge it first (meshwright checkpoint merge)")
    result = _evaluate(folder, weights, data, seq_len, batch, tokens, plan, adapter)
    if not result.tokens:
        raise BadInput("the samples have no token that is trained on; raise --tokens or --seq-len")
    if result.preferences:
        print(json.dumps({**result.preferences, **facts}) if as_json else _of_pairs(result))
        return
    answer = {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        **({"by_source": result.by_source} if result.by_source else {}),
        **({"bits_per_byte_by_source": result.bits_by_source} if result.bits_by_source else {}),
        **facts,
    }
    if as_json:
        print(json.dumps(answer))
        return
    bits = f", {result.bits_per_byte:.4f} bits per byte" if result.bits_per_byte else ""
    show(f"loss {result.loss:.4f} nats per token, perplexity {result.perplexity:.2f}{bits} ({result.tokens:,} tokens)")
    for name, loss in result.by_source.items():
        bits = f", {result.bits_by_source[name]:.4f} bits per byte" if result.bits_by_source else ""
        print(f"  {name}: loss {loss:.4f}{bits}")


def _of_pairs(result: Evaluation) -> str:
    """Return the result of comparing pairs of answers, in words. A reward model is compared by scores, others by log-probabilities."""
    figures = result.preferences
    lengths = f"{figures['chosen_tokens']:.1f} and {figures['rejected_tokens']:.1f} tokens"
    if "calibration_error" in figures:
        rewards = f"{figures['chosen_reward']:.3f} and {figures['rejected_reward']:.3f}, {lengths}"
        return (
            f"the chosen answer has the higher score in {figures['accuracy']:.1%} of {figures['pairs']:,.0f} pairs, loss "
            f"{result.loss:.4f}, calibration error {figures['calibration_error']:.3f}\n  chosen and rejected answers: mean score {rewards}"
        )
    logprobs = f"{figures['chosen_logprob']:.4f} and {figures['rejected_logprob']:.4f} nats per token"
    return (
        f"the chosen answer is likelier per token in {figures['likelier']:.1%} of {figures['pairs']:,.0f} pairs\n"
        f"  chosen and rejected answers: log-probability {logprobs}, {lengths}"
    )


def _evaluate(
    model: Path,
    weights: Path,
    data: str | None,
    seq_len: int | None,
    batch: int,
    tokens: int | None,
    plan: Path | None,
    adapter: Path | None,
) -> Evaluation:
    """Evaluate `weights`, which is a checkpoint of the run in `model`, or the Hugging Face folder `model` itself."""
    from meshwright.checkpoint.models.single_device import device_and_dtype, load_model
    from meshwright.config.load import load_resolved
    from meshwright.data.loader import open_data
    from meshwright.serve import text_losses
    from meshwright.spec.job import DataSpec, TrainSpec
    from meshwright.training.evaluate import HeldOut, evaluate_plain
    from meshwright.training.preferences import PAIRS, SCORED_PAIRS, evaluate_pairs

    config = model / "config.yaml"
    run = load_resolved(config) if config.exists() else None
    if run is None and data is None:
        raise BadInput(f"{model} has no record of its training data; give --data DIR")
    spec = run.data if run else DataSpec()
    if data is not None:
        spec = replace(spec, validation=data)
    if tokens is not None:
        spec = replace(spec, validation_tokens=tokens)
    longest = model_in(weights)[0].max_seq_len
    length = seq_len or (run.train.seq_len if run else min(TrainSpec.seq_len, longest))
    if length > longest:
        raise BadInput(f"--seq-len {length}: expected at most {longest}, the context of {model} (model.max_seq_len)")
    pairs = _has_pairs(run, spec)
    if pairs and plan is not None:
        raise BadInput("--plan: pairs are compared on one device; leave it out")
    if data is not None and not pairs:
        check_format(model, spec, length)
    if plan is not None:
        from meshwright.training.spread import Measurement

        measurement = Measurement(data=spec, seq_len=length, micro_batch=batch)
        measured = ask_ranks(weights, plan, measurement=measurement).evaluation
        assert measured is not None
        return measured
    device, dtype = device_and_dtype()
    decoder = load_model(weights, device, dtype, contents=False, adapter=adapter, scores=None if pairs else False)
    form = SCORED_PAIRS if decoder.spec.head == "score" else PAIRS
    preference = form if pairs else None
    source = open_data(
        spec, seq_len=length, seed=0, vocab_size=decoder.spec.vocab_size, split="validation", preference=preference
    )
    print(f"evaluating on {device}", file=sys.stderr)
    if pairs:
        return evaluate_pairs(decoder, HeldOut.of(source, spec.validation_tokens), micro_batch=batch, device=device)
    long = length > text_losses.CHUNK_TOKENS and not source.document_mask and spec.packing != "none"
    loss = _loss_in_chunks(decoder, length) if long else None
    held_out = HeldOut.of(source, spec.validation_tokens, batch * length if spec.packing == "none" else None)
    return evaluate_plain(decoder, held_out, micro_batch=batch, device=device, loss=loss)


def _has_pairs(run: RunSpec | None, spec: DataSpec) -> bool:
    """Return whether the validation data are pairs of answers. Raises BadInput if they are labelled answers, which cannot be compared."""
    from meshwright.data.manifest import held_out_beside
    from meshwright.data.source import preference_of

    of_run = [] if run is None or run.preference is None else list(run.data.mix)
    names = [spec.validation] if spec.validation is not None else of_run
    paths = [Path(name) for name in names if name != STDLIB and name not in spec.streams]
    found = [each for path in paths if (each := preference_of(held_out_beside(path) or path))]
    if any(not each.paired for each in found):
        raise BadInput(
            "the held-out answers have labels: expected pairs, whose two answers are compared, or text or chats"
        )
    return bool(found)


def check_format(model: Path, spec: DataSpec, seq_len: int) -> None:
    """Raise BadInput if the text format of the validation data differs from that of the model."""
    from meshwright.data.source import open_data
    from meshwright.data.text_format import known_text_format

    text = known_text_format(model)
    if text is None:
        say(f"{model} has no tokenizer.json, so the tokenizers of model and data are not compared")
        return
    source = open_data(spec, seq_len=seq_len, seed=0, split="validation")
    for name, each in source.sources.items():
        corpus = each.directory.text_format
        if corpus is None:
            continue
        masked = each.stream.masked
        if difference := text.difference(corpus, str(model), str(each.directory.path), tokenizer_only=masked):
            raise BadInput(f"--data {name}: {difference}; prepare it with the tokenizer and --eos of the model")


def _loss_in_chunks(model: Decoder, length: int) -> Callable[[MicroBatch], Tensor]:
    """Return a function that returns the summed loss of a micro-batch of sequences with `length` tokens.

    It evaluates the sequences in chunks, because whole ones would need much memory.
    """
    from meshwright.serve import text_losses

    losses = text_losses.TextLosses(model, context=length, chunk=text_losses.CHUNK_TOKENS)

    def loss(texts: MicroBatch) -> Tensor:
        assert texts.targets is not None
        return losses.sum(texts.tokens, texts.targets)

    return loss
