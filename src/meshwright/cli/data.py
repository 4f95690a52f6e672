"""`meshwright data`: prepares text for training, and shows what a training step reads."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.options import Json, say, show
from meshwright.spec.errors import BadInput

if TYPE_CHECKING:
    from meshwright.data.answer_ends import AnswerEnds
    from meshwright.data.left_out import LeftOut
    from meshwright.data.parts import PreparedPart
    from meshwright.data.prepare import PreparedCorpus
    from meshwright.data.source import DataSource
    from meshwright.spec.job import TrainSpec

app = typer.Typer(help="Prepare text for training, and show what a training step reads.", no_args_is_help=True)


class Unended(StrEnum):
    """What to do if answers of chats do not end with a special token."""

    refuse = "refuse"
    accept = "accept"


ChatOption = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Records are chats: messages, ShareGPT, Alpaca, or prompt and completion, and `tools` if there are any. The chat "
        "template of the tokenizer's folder makes their text; only what --train-roles write is trained on.",
    ),
]
PreferencesOption = Annotated[
    bool,
    typer.Option(
        "--preferences",
        help="Records are good and bad answers: prompt, chosen and rejected, or prompt, completion and label, among other forms. A run "
        "with `preference` trains on them.",
    ),
]
TemplateOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --chat or --preferences: template in place of the folder's.")
]
RolesOption = Annotated[
    str | None,
    typer.Option(
        metavar="ROLES",
        help="With --chat or --preferences: roles to train on, with commas between; assistant by default.",
    ),
]
UnendedOption = Annotated[
    Unended | None,
    typer.Option(
        help="With --chat or --preferences: refuse or accept answers that do not end with a special token; refuse by default."
    ),
]


OutOption = Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; `data.mix` in a run file names it.")]
EosOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN", help="Token that ends each document; default: the one that the tokenizer's folder names."
    ),
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Then read every file again and compare its digest with the manifest.")
]


class Encoder(StrEnum):
    """Which program encodes text."""

    auto = "auto"
    tokenizers = "tokenizers"


FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        metavar="FILE.py:FUNCTION",
        help="A function `def keep(text: str) -> bool` of yours: False removes a document. May be given several times.",
    ),
]
EvaluationOption = Annotated[
    list[str] | None,
    typer.Option(
        "--evaluation",
        metavar="FILE",
        help="File or folder of an evaluation: a document that has 13 words in a row of its text is removed. May be given several times.",
    ),
]
DeduplicateOption = Annotated[
    str | None,
    typer.Option(
        metavar="exact|near|near:SIMILARITY",
        help="exact: remove documents with the text of an earlier one; near: also those that have this share of "
        "their runs of 5 words in common with one, 0.75 by default.",
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Prepare part I of N on this host, for example 2/8, into an --out of its own; `data merge` joins all parts to the corpus.",
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of a Ray cluster that reads and encodes, for example auto. Its hosts must see inputs and --out under the same names.",
    ),
]
EncoderOption = Annotated[
    Encoder,
    typer.Option(help="auto: gigatoken where its ids are those of tokenizers. The output does not depend on it."),
]


class OnBad(StrEnum):
    """What to do with a document that cannot be used."""

    skip = "skip"
    refuse = "refuse"


@app.command("prepare")
def prepare_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files of text, .jsonl, .json, .csv, .tsv or .parquet, also compressed (.gz, .zst, .bz2, .xz, .lz4), directories "
            "of such files, or the word `stdlib` for Python's own standard library.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            # Without an explicit name, typer from 0.27 uses the option's name as its placeholder if both are one word.
            "--tokenizer",
            metavar="TOKENIZER",
            help="A tokenizer.json, a folder that has one, or train:SIZE to train one on these inputs, for example "
            "train:32000.",
        ),
    ],
    out: OutOption,
    held_out: Annotated[
        float,
        typer.Option(
            metavar="FRACTION",
            help="Share of the documents (not of their tokens) kept apart for validation, for example 0.01. They go to "
            "OUT/held_out, the others to OUT/train; training on OUT then validates on the first by itself.",
        ),
    ] = 0.0,
    text_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Key (or parquet column) that holds the text of a record, `text` by default; with --chat its "
            "messages, by default as the form of the records says.",
        ),
    ] = None,
    chat: ChatOption = False,
    preferences: PreferencesOption = False,
    chat_template: TemplateOption = None,
    train_roles: RolesOption = None,
    unended_answers: UnendedOption = None,
    on_bad: Annotated[
        OnBad,
        typer.Option(
            help="Documents that are not utf-8, not JSON, lack the key or are empty, and files that cannot be read: skip and "
            "name them at the end, or check all first and refuse to start."
        ),
    ] = OnBad.skip,
    eos: EosOption = None,
    filters: FilterOption = None,
    evaluations: EvaluationOption = None,
    deduplicate: DeduplicateOption = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that read and encode; threads for small inputs and chats. The output does not depend on it. "
            "Default: all cores.",
        ),
    ] = None,
    part: PartOption = None,
    ray: RayOption = None,
    encoder: EncoderOption = Encoder.auto,
    shard_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens after which a shard is closed; a killed preparation loses at most one shard."),
    ] = 1 << 27,
    verify: VerifyOption = False,
    as_json: Json = False,
) -> None:
    """Turn text into token shards that training reads.

    The work is done in parallel. When it is killed, the same command continues it, to the same bytes. A Ray cluster (--ray) and several
    hosts (--part) write the same bytes too.

    Example:

        meshwright data prepare docs/ posts.jsonl.gz --tokenizer train:32000 --held-out 0.01 --out data/mine
    """
    from meshwright.data.cleaning import Cleaning
    from meshwright.data.prepare import prepare
    from meshwright.data.request import ChatRequest, Preparation

    if chat and preferences:
        raise BadInput(
            "--chat and --preferences: records are one or the other; prepare them each with an --out of its own"
        )
    if preferences and text_key is not None:
        raise BadInput("--text-key: is for text and chats; the form of preferences shows in their keys")
    if not (chat or preferences) and any(
        option is not None for option in (chat_template, train_roles, unended_answers)
    ):
        raise BadInput("--chat-template, --train-roles and --unended-answers: are for chats; add --chat")
    roles = tuple(role.strip() for role in (train_roles or "assistant").split(","))
    request = ChatRequest(roles, chat_template, preferences) if chat or preferences else None
    cleaning = Cleaning(tuple(filters or ()), tuple(evaluations or ()), deduplicate)
    if part is not None:
        from meshwright.data.parts import CorpusPart, prepare_part

        if verify:
            raise BadInput("--verify: is for a whole corpus; `data merge` takes it")
        preparation = Preparation(
            tuple(inputs),
            tokenizer,
            out,
            held_out,
            text_key or "text",
            on_bad.value,
            eos,
            shard_tokens,
            request,
            cleaning=cleaning,
        )
        prepared_part = prepare_part(
            preparation,
            CorpusPart.parse(part),
            text_key=text_key,
            workers=workers,
            ray=ray,
            encoder=encoder.value,
            shown=True,
        )
        _say_left_out(prepared_part.left_out)
        if as_json:
            print(json.dumps(_part_summary(prepared_part)))
        else:
            show(_part_sentences(prepared_part))
        return

    prepared = prepare(
        inputs,
        tokenizer,
        out,
        held_out=held_out,
        text_key=text_key,
        on_bad=on_bad.value,
        eos=eos,
        shard_tokens=shard_tokens,
        chat=request,
        unended_answers="accept" if unended_answers is Unended.accept else "refuse",
        cleaning=cleaning,
        workers=workers,
        ray=ray,
        encoder=encoder.value,
        shown=True,
    )
    _show_prepared(prepared, verify, as_json)


@app.command("merge")
def merge_command(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PART_DIR...", help="The folders of all parts (`data prepare --part`).")
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory of the corpus; `data.mix` in a run file names it.")
    ],
    verify: VerifyOption = False,
    as_json: Json = False,
) -> None:
    """Join the parts of a corpus that several hosts prepared.

    The corpus is the one that a single `data prepare` makes, byte for byte; with --deduplicate this command finds the duplicates. The parts
    stay as they are. When it is killed, the same command continues.

    Example:

        meshwright data merge parts/1 parts/2 parts/3 --out corpus
    """
    from meshwright.data.parts import merge

    prepared = merge(parts, out, shown=True)
    _show_prepared(prepared, verify, as_json)


@app.command("import")
def import_command(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Token files of datatrove (.ds) or Megatron (.bin), their indices beside them, or folders of them.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", metavar="TOKENIZER", help="The tokenizer.json that made the tokens, or a folder that has it."
        ),
    ],
    out: OutOption,
    held_out: Annotated[
        float,
        typer.Option(metavar="FRACTION", help="Share of the documents kept apart for validation, for example 0.01."),
    ] = 0.0,
    eos: EosOption = None,
    shard_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens after which a shard is closed; a killed import loses at most one shard.")
    ] = 1 << 27,
    as_json: Json = False,
) -> None:
    """Take over tokens that another program made.

    Every document is checked: its ids are in the tokenizer, and it ends with the tokenizer's end token.

    Example:

        meshwright data import tokenized/ --tokenizer llama3/ --out corpus
    """
    from meshwright.data.token_files import import_tokens

    prepared = import_tokens(inputs, tokenizer, out, held_out=held_out, eos=eos, shard_tokens=shard_tokens, shown=True)
    _show_prepared(prepared, False, as_json)


@app.command("show")
def show_command(
    target: Annotated[
        Path,
        typer.Argument(metavar="RUN.yaml|RUN_DIR|DATA_DIR", help="A run file, the folder of a run, or prepared data."),
    ],
    step: Annotated[int, typer.Option(min=1, help="Training step, counted from 1 as in metrics.jsonl.")],
    text: Annotated[bool, typer.Option("--text", help="Also decode each sample's tokens.")] = False,
    seq_len: Annotated[
        int | None,
        typer.Option(min=1, help="Only for DATA_DIR: tokens in a sequence (default 2048). A run has its own."),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Only for DATA_DIR: sequences in a step (default 8). A run has its own.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Only for DATA_DIR: seed of the order (default 0). A run has its own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which documents a training step reads, of any step, past or future.

    Nothing is replayed: the order of the data is a function of the seed and the number of the sample.

    Example:

        meshwright data show runs/quickstart --step 120 --text
    """
    from meshwright.data.show import show_step
    from meshwright.launch.corpus import skipped_samples

    source, train = _open_target(target, seq_len, global_batch, seed)
    skipped = skipped_samples(target) if (target / "config.yaml").is_file() else ()
    shown = show_step(
        source,
        step,
        train.global_batch,
        text,
        skipped,
        global_batch_tokens=train.global_batch_tokens,
        batch_ramp=train.batch_ramp,
    )
    print(json.dumps(shown) if as_json else _step_lines(shown))


@app.command("lengths")
def lengths_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DATA_DIR", help="Prepared data; its training part if it has two.")
    ],
    as_json: Json = False,
) -> None:
    """Show how long documents are, and how many of the tokens are in long ones.

    Example:

        meshwright data lengths corpus
    """
    from meshwright.data.lengths import histogram_lines, length_histogram

    histogram = length_histogram(directory)
    print(json.dumps(histogram) if as_json else "\n".join(histogram_lines(histogram)))


def _open_target(
    target: Path, seq_len: int | None, global_batch: int | None, seed: int | None
) -> tuple[DataSource, TrainSpec]:
    """Open the data of a run file, a run folder or a data directory. The second value has the settings of a step, such as the batch."""
    from meshwright.data.source import open_data, preference_of
    from meshwright.spec.job import DataSpec, TrainSpec

    config = target if target.suffix in (".yaml", ".yml") else target / "config.yaml"
    if config != target and not config.is_file():
        mix = {str(target): 1.0}
        preference = preference_of(target)
        data = open_data(DataSpec(mix=mix), seq_len=seq_len or 2048, seed=seed or 0, preference=preference)
        return data, TrainSpec(steps=1, global_batch=global_batch or 8)
    options = {"--seq-len": seq_len, "--global-batch": global_batch, "--seed": seed}
    refused = [name for name, value in options.items() if value is not None]
    if refused:
        raise BadInput(f"{refused[0]}: is for data directories; {config} sets it for this run")
    from meshwright.config.load import load_run

    run = load_run(config)
    if run.rl is not None:
        raise BadInput(f"{config}: a run with rl trains on answers that it samples; show the folder of its questions")
    source = open_data(run.data, seq_len=run.train.seq_len, seed=run.seed, preference=run.preference)
    return source, run.train


def _show_prepared(prepared: PreparedCorpus, verify: bool, as_json: bool) -> None:
    """Print what was left out and what was written. With `verify`, compare the files with their digests first; raises Damaged."""
    from meshwright.data.manifest import verify as verify_directory
    from meshwright.spec.errors import Damaged

    _say_left_out(prepared.left_out)
    if verify and (faults := verify_directory(prepared.out)):
        raise Damaged("\n".join(faults))
    if as_json:
        print(json.dumps(_summary(prepared)))
    else:
        show(_sentences(prepared))
    asked = next(iter(prepared.manifests.values())).request.get("held_out", 0.0)
    if asked and (share := _held_out_share(prepared)) > 2 * asked:
        say(
            f"--held-out {asked:g} counts documents: those that it chose have {share:.1%} of all tokens; for fewer, choose a smaller "
            "fraction, or divide long documents"
        )


def _held_out_share(prepared: PreparedCorpus) -> float:
    """Return the share of the tokens of a corpus that are held out. 0 if none are."""
    from meshwright.data.manifest import HELD_OUT

    held_out = prepared.manifests.get(HELD_OUT)
    return 0.0 if held_out is None else held_out.tokens / sum(each.tokens for each in prepared.manifests.values())


def _say_left_out(left_out: LeftOut) -> None:
    """Print what was left out on stderr."""
    if lines := left_out.lines():
        sys.stderr.write("\n".join(["left out:", *lines, ""]))


def _part_summary(prepared: PreparedPart) -> dict[str, Any]:
    """Return the result of `data prepare --part` as JSON values."""
    left_out = prepared.left_out
    return {
        "out": str(prepared.out),
        "part": str(prepared.part),
        "documents": prepared.documents,
        "tokens": prepared.tokens,
        "bad": {"count": left_out.bad.count, "first": left_out.bad.first},
        "not_read": left_out.not_read,
        "reused": prepared.reused,
    }


def _part_sentences(prepared: PreparedPart) -> str:
    """Return the result of `data prepare --part` in lines of text."""
    number = prepared.part.number
    count = prepared.part.count
    first = "already prepared by this command: part" if prepared.reused else "prepared part"
    return (
        f"{first} {number} of {count}: {prepared.documents:,} documents, {prepared.tokens:,} tokens\n"
        f"When all {count} are there:  meshwright data merge PART_DIR... --out DIR"
    )


def _summary(prepared: PreparedCorpus) -> dict[str, Any]:
    """Return the result of a preparation as JSON values."""
    splits = {
        split: {"documents": manifest.documents, "tokens": manifest.tokens, "text_bytes": manifest.text_bytes}
        for split, manifest in prepared.manifests.items()
    }
    manifest = next(iter(prepared.manifests.values()))
    tokenizer = manifest.tokenizer
    text = manifest.text_format
    left_out = prepared.left_out
    answers = prepared.answers
    return {
        "out": str(prepared.out),
        "splits": splits,
        "vocab_size": tokenizer.vocab_size,
        "text_format": None if text is None else text.to_plain(),
        **({} if answers is None else {"answers": _ends(answers), "unended_answers": answers.unended}),
        **({} if (chats := prepared.chats) is None else {"chats": vars(chats)}),
        **({} if manifest.preferences is None else {"preferences": manifest.preferences.kind}),
        "bad": {"count": left_out.bad.count, "first": left_out.bad.first},
        "not_read": left_out.not_read,
        **({"removed": manifest.removed} if manifest.removed else {}),
        "reused": prepared.reused,
    }


def _ends(answers: AnswerEnds) -> dict[str, int]:
    """Return the number of answers that each token ends, by the token's text."""
    return {token.text: count for token, count in answers.counts.items()}


def _sentences(prepared: PreparedCorpus) -> str:
    """Return the result of a preparation in lines of text, ending with the line of a run file that uses the corpus."""
    from meshwright.data.left_out import not_read_words
    from meshwright.data.manifest import HELD_OUT
    from meshwright.data.removed import REPORT, removed_words

    first = "prepared" if prepared.chats is None else f"prepared {prepared.chats}"
    lines = ["already prepared by this command" if prepared.reused else first]
    for split, manifest in prepared.manifests.items():
        ratio = manifest.text_bytes / manifest.tokens
        size = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {ratio:.2f} bytes per token"
        if (counts := manifest.preferences) is not None:
            size += (
                f"; {counts.good:,} pairs"
                if counts.kind == "pairs"
                else f"; {counts.good:,} good and {counts.bad:,} bad answers"
            )
        if split == HELD_OUT:
            size += f", {_held_out_share(prepared):.1%} of all tokens"
        lines.append(f"  {split}: {size}")
    manifest = next(iter(prepared.manifests.values()))
    if manifest.not_read:
        lines.append(f"  not read: {not_read_words(manifest.not_read)}")
    if manifest.removed:
        lines.append(f"  removed: {removed_words(manifest.removed)} (examples: {prepared.out / REPORT})")
    if manifest.text_format is not None:
        end = manifest.text_format.document_end
        ends = [f"each document ends with {end.text}"] if end is not None and not manifest.masked else []
        lines += [f"  {line}" for line in (*ends, *manifest.text_format.sentences())]
    if prepared.chats is not None and (count := prepared.chats.without_reasoning):
        lines.append(f"  the chat template leaves out the reasoning of the last answer in {count:,} chats")
    if (answers := prepared.answers) is not None:
        counts = [f"{text} ({count:,})" for text, count in _ends(answers).items()]
        counts += [f"no special token ({answers.unended:,})"] if answers.unended else []
        lines.append(f"  answers end with {', '.join(counts)}")
    more = ""
    if manifest.preferences is not None:
        more = f"  preference: {{loss: {'dpo' if manifest.preferences.kind == 'pairs' else 'kto'}}}"
    lines.append(f"Train on it with  data: {{mix: {prepared.out}}}{more}")
    return "\n".join(lines)


def _step_lines(shown: dict[str, Any]) -> str:
    """Return the samples of a step in lines of text. `shown` is the result of `show_step`. Trained text is between « and »."""
    from meshwright.data.conversations import PackingCounts

    lines = [f"{name}: {PackingCounts(**counts)}" for name, counts in shown.get("packing", {}).items()]
    lines.append(f"step {shown['step']}")
    for sample in shown["samples"]:
        lines.append(f"sample {sample['global_index']} from {sample['source']}, {sample['tokens']} tokens")
        lines += [f"  {d['file']} [{d['id']}] tokens {d['start']}-{d['end']}" for d in sample["documents"]]
        if "trained" in sample:
            count = sum(stop - start for start, stop in sample["trained"])
            lines.append(f"  {count} tokens are trained on" + (", between « and »" if "parts" in sample else ""))
        if "parts" in sample:
            lines.append("".join(f"«{p['text']}»{_weight(p)}" if p["trained"] else p["text"] for p in sample["parts"]))
            if "predicted" in sample:
                lines.append(f"  the sequence ends here; the next token is trained on too: «{sample['predicted']}»")
        elif "text" in sample:
            lines.append(sample["text"])
    return "\n".join(lines)


def _weight(part: dict[str, Any]) -> str:
    """Return the weight of a trained part in the loss, as text. Empty if the weight is 1."""
    return f"×{part['weight']:g}" if part.get("weight", 1.0) != 1 else ""
