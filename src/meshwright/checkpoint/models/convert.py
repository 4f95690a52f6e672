"""Converts checkpoints to Hugging Face folders and back, in one process, with a part of a tensor in memory at a time."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from meshwright.checkpoint.format.contents import TensorChunk, TensorRecord
from meshwright.checkpoint.format.files import disk_space_error
from meshwright.checkpoint.format.header import TensorHeader
from meshwright.checkpoint.format.inventory import choose_newest
from meshwright.checkpoint.format.manifest import step_name, tensor_file
from meshwright.checkpoint.format.plain_files import encode_plain
from meshwright.checkpoint.models.adapters import BASE
from meshwright.checkpoint.models.hf import BASE_MODEL, export_hf, import_hf
from meshwright.checkpoint.models.initial import CheckpointWeights, checkpoint_weights
from meshwright.checkpoint.models.peft import write_peft
from meshwright.checkpoint.models.stored_model import open_model
from meshwright.checkpoint.models.towers import keep_towers, read_towers
from meshwright.checkpoint.read.reader import CheckpointReader
from meshwright.checkpoint.write.attempt import Provenance, SaveAttempt, new_attempt, recover
from meshwright.checkpoint.write.live_state import write_tensors
from meshwright.config.load import resolved_yaml
from meshwright.data.chat_template import TEMPLATE, TEXT_FILES, copy_chat_files
from meshwright.data.text_format import TEXT_FORMAT, TOKENIZER, TextFormat, known_text_format, tokenizer_file
from meshwright.durable.writes import write_durable
from meshwright.families.text_part import TOWERS
from meshwright.spec.errors import BadInput, OutOfResources
from meshwright.spec.fields import from_plain, to_plain
from meshwright.spec.folder_files import TOKENIZER_BYTES, read_folder_file
from meshwright.spec.job import TrainSpec
from meshwright.spec.model import ModelSpec, ParameterSpec, parameters, without_adapter
from meshwright.spec.run import ModelSection, RunSpec

log = logging.getLogger("meshwright")


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    dtype: str = "bf16",
    average: bool = False,
    text_only: bool = False,
    note: Callable[[str], object] = lambda sentence: None,
) -> Path:
    """Write the weights of a checkpoint as a Hugging Face folder at `out`, and return the path of the checkpoint.

    `source`: a checkpoint, or a run folder, of which the newest undamaged checkpoint is exported.
    `dtype`: "bf16" or "fp32".
    `average`: export the moving average of the weights (`train.ema_decay`).
    `text_only`: leave out the other tensors of the larger model from whose text part the run began. Otherwise they are
        written too.
    `note`: receives sentences about the text format for the user.

    The run folder's `tokenizer.json` and its files about texts are copied. The record of the text format decides which
    tokens end a generated text.

    Raises Damaged if the checkpoint differs from what was written. Raises BadInput if it has no model configuration or no
    average, or if the Hugging Face class of its family cannot represent it.
    """
    chosen = choose_newest(source)
    path = chosen.path
    if chosen.warning is not None:
        log.warning("%s", chosen.warning)
    with checkpoint_weights(path, "ema" if average else "model") as weights:
        reader = weights.reader
        config = _config(reader)
        spec = without_adapter(_model(config, path))
        if average and not weights.names:
            raise BadInput(f"{path} has no average of the weights: the run sets no train.ema_decay")
        tokenizer = tokenizer_file(path)
        text = known_text_format(path)
        if text is not None:
            for sentence in text.sentences():
                note(sentence)
        export_hf(
            out,
            spec,
            _CheckpointRows(weights, {parameter.name: parameter for parameter in parameters(spec)}),
            tokenizer=tokenizer,
            run_note=_note(config, reader, text),
            dtype=dtype,
            text=text,
            towers=None if text_only else read_towers(path),
            title=config.get("name"),
            limits=_limits(config, text),
        )
    return path


def export_adapter(source: Path, out: Path) -> Path:
    """Write the adapters of a run or a checkpoint as a folder that peft loads, and return the path of the checkpoint.

    Raises BadInput if it has no adapters, or if `out` exists and is not empty. Raises Damaged like `export_checkpoint`.
    """
    chosen = choose_newest(source)
    if chosen.warning is not None:
        log.warning("%s", chosen.warning)
    with CheckpointReader(chosen.path) as reader:
        config = _config(reader)
        spec = _model(config, chosen.path)
        if spec.adapter is None:
            raise BadInput(f"{chosen.path} has no adapters: the run has no model.adapter")
        kind, _, folder = str(config["model"].get("init")).partition(":")
        write_peft(
            out,
            spec,
            lambda name: reader.read(f"model.{name}"),
            base_name=folder or kind,
            base=reader.state().get(BASE),
        )
    return chosen.path


def merge_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    dtype: str = "bf16",
    note: Callable[[str], object] = lambda sentence: None,
) -> None:
    """Merge the adapters in `adapter` into the model in `base`, and write it as a Hugging Face folder at `out`.

    `base` and `adapter` are folders that `stored_model.open_model` takes. W + s · B · A is computed in fp32 and rounded
    once to `dtype`. Raises errors like `export_checkpoint`.
    """
    with open_model(base, adapter=adapter) as stored:
        note(f"sums in fp32, rounded once to {dtype}")
        tokenizer = tokenizer_file(base)
        text = None if tokenizer is None else known_text_format(base)
        specs = {parameter.name: parameter for parameter in parameters(stored.spec)}
        export_hf(
            out,
            stored.spec,
            lambda name: stored.read_rows(specs[name], 0, specs[name].shape[0]),
            tokenizer=tokenizer,
            run_note=f"The adapters of `{adapter.name}` merged into the weights of `{base.name}`.",
            dtype=dtype,
            text=text,
            towers=import_hf(base)[1].towers() if (base / "config.json").exists() else read_towers(base),
            limits=f"Exported by Meshwright: the model of `{base.name}` with adapters.",
        )


def import_checkpoint(
    source: Path, out: Path, *, text_only: bool = False, note: Callable[[str], object] = lambda sentence: None
) -> Path:
    """Write the weights of a Hugging Face folder as a committed checkpoint of step 0 in `out`, and return its path.

    Weights are stored in fp32, as training stores them. There is no optimizer state. The folder's `tokenizer.json` and
    chat template are copied to `out` unless it has a tokenizer. The tensors that do not belong to the text model are
    copied too, unless `text_only`. `note` receives sentences about settings that are not used.

    Raises BadInput if `out` already has a checkpoint of step 0, or if the model's family is unknown. A failed import leaves
    no files in `out`.
    """
    spec, weights = import_hf(source)
    for sentence in weights.notes:
        note(f"{source}: {sentence}")
    checkpoints = out if out.name == "checkpoints" else out / "checkpoints"
    attempt = SaveAttempt(checkpoints, 0, new_attempt())
    if attempt.target.exists():
        raise BadInput(f"{attempt.target} already exists; choose another folder or remove it")
    recover(checkpoints)
    parameter_of = {f"model.{parameter.name}": parameter for parameter in parameters(spec)}
    headers = [TensorHeader(name, "F32", parameter.shape) for name, parameter in parameter_of.items()]
    contents = {header.key: _single_chunk_record(header) for header in headers}
    state = {"step": 0, "next_sample": 0, "tokens": 0}
    texts = {"config.yaml": _run_yaml(spec, checkpoints.absolute().parent.name)}
    text = known_text_format(source)
    plain = encode_plain(state, texts if text is None else {**texts, TEXT_FORMAT: text.to_json()})
    home = checkpoints.parent
    home.mkdir(parents=True, exist_ok=True)
    beside = (TOWERS, TOKENIZER, TEXT_FORMAT, *TEXT_FILES)
    missing = [name for name in beside if not (home / name).exists()]
    attempt.create()
    try:
        space_error = disk_space_error(checkpoints, sum(header.bytes for header in headers))
        if space_error is not None:
            raise OutOfResources(space_error)
        values = (weights.read(parameter).to(torch.float32) for parameter in parameter_of.values())
        shard = write_tensors(attempt.folder / tensor_file(0), headers, values)
        # These come before the commit, because a committed checkpoint without them would be exported without them.
        if weights.nesting is not None and not text_only and TOWERS in missing:
            keep_towers(source, weights.others, weights.other, home)
        if text is not None and TOKENIZER in missing:
            copy_chat_files(source, home)
            text.write(home)
            write_durable(home / TOKENIZER, read_folder_file(source / TOKENIZER, TOKENIZER_BYTES))
        attempt.commit({tensor_file(0): shard}, contents, plain, Provenance(1, str(torch.__version__)))
    except BaseException:
        attempt.abandon()
        if not attempt.target.exists():
            _remove_new(home, missing)
        raise
    return attempt.target


def _remove_new(folder: Path, missing: Collection[str]) -> None:
    """Remove what a failed import has written beside the checkpoint. `missing` names what was not there before."""
    for name in missing:
        path = folder / name
        with suppress(OSError):  # the first error counts
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _CheckpointRows:
    """The weights of a checkpoint as a `RowSource` (`checkpoint.models.hf`)."""

    weights: CheckpointWeights
    parameters: Mapping[str, ParameterSpec]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shapes[name]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.weights.read_rows(self.parameters[name], start, stop)


def _config(reader: CheckpointReader) -> dict[str, Any]:
    """Return the contents of the checkpoint's `config.yaml`: the run file with all defaults filled in."""
    try:
        config = yaml.safe_load(reader.text("config.yaml"))
    except yaml.YAMLError as error:
        raise BadInput(f"{reader.path / 'config.yaml'} is not YAML: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise BadInput(f"{reader.path / 'config.yaml'} has no section `model` with the model's dimensions")
    return config


def _model(config: dict[str, Any], path: Path) -> ModelSpec:
    """Return the model in section `model` of a run file. Raises BadInput if it is invalid."""
    try:
        return from_plain(ModelSection, config["model"])
    except (TypeError, KeyError, ValueError) as error:
        raise BadInput(f"{path / 'config.yaml'}: model: expected the dimensions of a model: {error}") from error


def _run_yaml(spec: ModelSpec, name: str) -> str:
    """Return a valid `config.yaml` for imported weights: the model's dimensions, and placeholders in section `train`."""
    model = from_plain(ModelSection, to_plain(spec))
    train = TrainSpec(steps=1, global_batch=1, seq_len=min(TrainSpec.seq_len, spec.max_seq_len))
    return resolved_yaml(RunSpec(name=name or step_name(0), model=model, train=train))


def _single_chunk_record(header: TensorHeader) -> TensorRecord:
    """Return the record of a tensor that is stored as one chunk."""
    return TensorRecord(
        header.shape, header.dtype, (TensorChunk((0,) * len(header.shape), header.shape, tensor_file(0), header.key),)
    )


def _note(config: dict[str, Any], reader: CheckpointReader, text: TextFormat | None) -> str:
    """Return the model card's text on the training: initial weights, data, chat template, steps and trained weights.

    It has only the names of folders, not their paths.
    """
    state = reader.state()
    step = reader.manifest.step
    tokens = state.get("tokens")
    token_note = f" over {tokens:,} tokens" if isinstance(tokens, int) and tokens else ""
    sentence = f"Run `{config.get('name', 'unnamed')}`, checkpoint of step {step:,}{token_note}."
    data = config.get("data")
    train = config.get("train")
    if not step or not isinstance(data, dict) or not isinstance(train, dict):
        return sentence
    rows = [("Began with", _began_with(config)), ("Data", _mix(data.get("mix"))), *_trained_on(text)]
    names = ("steps", "global_batch", "global_batch_tokens", "seq_len", "learning_rate")
    settings = [f"{name} {train[name]}" for name in names if isinstance(train.get(name), (int, float, str))]
    rows += [("Trained weights", _trained_weights(config)), ("Settings", ", ".join(settings))]
    return "\n".join([sentence, "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _began_with(config: dict[str, Any]) -> str:
    init = str(config["model"].get("init") or "scratch")
    kind, _, where = init.partition(":")
    if where:
        return f"the weights of `{Path(where).name}`"
    return "random weights" if kind == "scratch" else f"`{init}`"


def _trained_weights(config: dict[str, Any]) -> str:
    adapter = config["model"].get("adapter")
    if not isinstance(adapter, dict):
        return "all"
    targets = ", ".join(map(str, adapter.get("targets", ())))
    return f"adapters ({adapter.get('kind')}) of rank {adapter.get('rank')} on {targets}, merged into the weights"


def _mix(mix: object) -> str:
    """Return the sources of the training data and the share of each, as a text."""
    if not isinstance(mix, dict) or not mix:
        return "unknown"
    total = sum(mix.values())
    shares = [f" ({weight / total:.0%})" if len(mix) > 1 else "" for weight in mix.values()]
    return ", ".join(f"`{Path(name).name}`{share}" for name, share in zip(mix, shares, strict=True))


def _trained_on(text: TextFormat | None) -> list[tuple[str, str]]:
    if text is None or not text.answer_ends:
        return [("Trained on", "every token")]
    ends = ", ".join(f"`{token.text}`" for token in text.answer_ends)
    template = f"`{TEMPLATE}` of this folder, digest {text.template}"
    return [("Trained on", f"the answers of chats with their end, {ends}"), ("Chat template", template)]


def _limits(config: dict[str, Any], text: TextFormat | None) -> str:
    if config["model"].get("head") == "score":
        return "A reward model, exported by Meshwright."
    if text is not None and text.answer_ends:
        return "Tuned on chats, exported by Meshwright: it answers messages in the form of its chat template."
    began = _began_with(config)
    return (
        BASE_MODEL
        if began == "random weights"
        else f"Exported by Meshwright: it continues text. Training began with {began}."
    )
