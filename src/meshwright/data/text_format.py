"""The record of a model's text format: its tokenizer, and which tokens begin a text, end a document, and end a generated text. No torch.

`derive` decides all of this from the files of a tokenizer's folder. `data prepare` calls it once, and adds the tokens that end trained
answers. The record is then stored in the manifest of the corpus, in the folder of the run (`text_format.json`, where `launch.text_files`
adds what the initial weights say) and in each checkpoint. Every other command reads the record. If a folder has no record, such as a folder
of Hugging Face, the command calls `derive`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.data.chat_template import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    ChatTemplate,
    TemplateRefusal,
    copy_chat_files,
    folder_template,
    folder_tool_template,
    read_object,
    special_tokens,
)
from meshwright.data.tokenizer_file import tokenizer_in
from meshwright.durable.writes import digest, write_durable
from meshwright.spec.errors import BadInput, Damaged, nearest
from meshwright.spec.folder_files import JSON_BYTES, TOKENIZER_BYTES, read_folder_file
from meshwright.spec.folders import homes_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXT_FORMAT = "text_format.json"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
MANIFEST = "manifest.json"
VERSION = 1
END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")
"""Usual names of end tokens, the preferred ones first. They are used for folders whose files do not name the token that ends a document."""
PROBE = "a"
"""A text that is encoded to find which tokens the tokenizer puts around each text."""
TURNS = ("meshwrightquestion", "meshwrightanswer", "meshwrightagain", "meshwrightlast")
"""Messages of a chat of two turns. In the rendered chat, the tokens between these messages are the tokens that end a turn."""


class Token(NamedTuple):
    """A token of the vocabulary."""

    id: int
    text: str


@dataclass(frozen=True)
class TextFormat:
    """Which tokens begin and end the texts of a model."""

    tokenizer: str
    """Digest of the tokenizer (`tokenizer_identity`). It does not depend on the layout of the tokenizer's file."""
    document_end: Token | None
    """Token that ends a document; None if none is known."""
    begin: tuple[Token, ...] = ()
    """Tokens that the tokenizer's post-processor puts before every text. Most tokenizers have none."""
    answer_ends: tuple[Token, ...] = ()
    """Tokens that end the answers of chats in the training data; empty for text."""
    stops: tuple[Token, ...] = ()
    """Tokens that end a generated text: `document_end` first, then the end tokens named in files of the folder, then `answer_ends`."""
    pad: Token | None = None
    """Token for padding."""
    template: str | None = None
    """Digest of the chat template; None without one."""
    notes: tuple[str, ...] = ()
    """One sentence for each contradiction between files of the folder."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of `stops`, ascending."""
        return tuple(sorted(token.id for token in self.stops))

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Ids of `begin`."""
        return tuple(token.id for token in self.begin)

    def begun(self, ids: Sequence[int]) -> list[int]:
        """`ids` with `begin_ids` in front. If `ids` start with them already, they are not added again."""
        return _prepended(self.begin_ids, ids)

    def prompt(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The token ids that the model reads for a prompt with `ids`.

        An empty prompt becomes the id of `document_end` if no token begins a text. Raises BadInput if no document end is known either.
        """
        if begun := self.begun(ids):
            return tuple(begun)
        if self.document_end is None:
            raise BadInput("an empty prompt: the model has no token that begins or ends a text; give a text")
        return (self.document_end.id,)

    def with_answer_ends(self, ends: Iterable[Token]) -> TextFormat:
        """This format with `ends` as the tokens that end trained answers. They are added to `stops` too."""
        ends = tuple(ends)
        return replace(self, answer_ends=ends, stops=_distinct([*self.stops, *ends]))

    def difference(self, other: TextFormat, here: str, there: str, *, tokenizer_only: bool = False) -> str | None:
        """A sentence about how the texts of two formats differ; None if they do not. `here` and `there` are names for them in the sentence.

        With `tokenizer_only`, the tokens that begin and end a document are not compared.
        """
        if self.tokenizer != other.tokenizer:
            return f"{here} and {there} have different tokenizers (digests {self.tokenizer} and {other.tokenizer})"
        if tokenizer_only:
            return None
        for verb, ours, theirs in (
            ("end", (self.document_end,), (other.document_end,)),
            ("begin", self.begin, other.begin),
        ):
            if ours != theirs:
                names = [_texts(filter(None, tokens)) or "nothing" for tokens in (ours, theirs)]
                return f"documents of {here} {verb} with {names[0]}, those of {there} with {names[1]}"
        return None

    def sentences(self) -> list[str]:
        """What a command prints about the record: which tokens begin each text, and contradictions between files."""
        begins = [f"each text begins with {_texts(self.begin)}"] if self.begin else []
        return [*begins, *self.notes]

    def to_plain(self) -> dict[str, Any]:
        """The record as values for JSON."""
        return {"version": VERSION, **{name: getattr(self, name) for name in self.__dataclass_fields__}}

    @classmethod
    def from_plain(cls, value: Any, where: str) -> TextFormat:
        """The record from the values that `to_plain` returned. Raises Damaged, naming `where`, for other values and unknown keys."""
        try:
            fields: dict[str, Any] = dict(value)
            if (version := fields.pop("version")) != VERSION:
                raise Damaged(
                    f"{where}: a text format of version {version}; this release reads version {VERSION}, use the release that wrote it"
                )
            if unknown := sorted(fields.keys() - cls.__dataclass_fields__.keys()):
                near = nearest(unknown[0], cls.__dataclass_fields__)
                raise ValueError(f"unknown key {unknown[0]!r}" + (f" (nearest: {near!r})" if near else ""))
            for name in ("document_end", "pad"):
                fields[name] = None if fields[name] is None else _token(fields[name])
            for name in ("begin", "answer_ends", "stops"):
                fields[name] = tuple(map(_token, fields[name]))
            for name, kinds in (("tokenizer", str), ("template", str | None)):
                if not isinstance(fields[name], kinds):
                    raise ValueError(f"{name}: expected text, got {fields[name]!r}")
            fields["notes"] = tuple(map(str, fields["notes"]))
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(
                f"{where}: not a record of a text format ({type(error).__name__}: {error}); "
                "without it the files of the folder decide, which may not name the token of --eos and the ends of answers"
            ) from error

    def to_json(self) -> str:
        """The content of `text_format.json`."""
        return json.dumps(self.to_plain(), indent=1, ensure_ascii=False) + "\n"

    def write(self, folder: Path) -> None:
        """Write `text_format.json`."""
        write_durable(folder / TEXT_FORMAT, self.to_json())


def derive(
    folder: Path | None,
    tokenizer: Tokenizer,
    *,
    eos: str | None = None,
    content: bytes | None = None,
    where: str | None = None,
    template: str | None = None,
) -> TextFormat:
    """The text format that the files of a tokenizer's folder describe. No other function reads it from these files.

    The token that ends a document is the first of these that exists:

    1. `eos`, the flag of `data prepare`,
    2. the end in `tokenizer_config.json`, then in `special_tokens_map.json`, then in `config.json`,
    3. the first of `KNOWN_ENDS` that the tokenizer has and that is not a padding token.

    There is one exception to 2: if the chat template ends a turn with this token and a file names another end, the other end is used. Llama
    3, for example, ends a turn with `<|eot_id|>` and a document with `<|end_of_text|>`. Every named end, including those in
    `generation_config.json`, ends a generated text.

    `folder` is None for a tokenizer without a folder. `content` is the tokenizer's file, by default the `tokenizer.json` in `folder`.
    `where` is its name in messages. `template` replaces the folder's chat template. `tokenizer` must neither pad nor truncate. Raises
    BadInput if a file is not JSON, and if the tokenizer has no token `eos`.
    """
    file = None if folder is None else folder / TOKENIZER
    files = _FolderFiles(folder, tokenizer, where or str(file or "the tokenizer"), template)
    if content is None:
        known = file is not None and file.is_file()
        content = read_folder_file(file, TOKENIZER_BYTES) if known else tokenizer.to_str().encode("utf-8")
    end, notes = files.document_end(eos)
    begin, begin_notes = files.begin()
    stops = _distinct([*([] if end is None else [end]), *files.ends()])
    return TextFormat(
        tokenizer_identity(content),
        end,
        begin,
        stops=stops,
        pad=next(files.pads(), None),
        template=files.template_digest(),
        notes=(*notes, *begin_notes),
    )


def read_text_format(folder: Path, tokenizer: Tokenizer | None = None) -> TextFormat:
    """The text format of a run's folder, a checkpoint, a prepared corpus or a Hugging Face folder.

    If the folder has a record, it is returned; otherwise `derive` reads the files of the folder. `tokenizer` is the folder's tokenizer if
    the caller has loaded it. Raises BadInput if there is neither a record nor a tokenizer.json, and Damaged if the record cannot be read.
    """
    for home in homes_of(folder):
        if (recorded := recorded_text_format(home)) is not None:
            return recorded
    file = tokenizer_file(folder)
    if file is None:
        raise no_tokenizer(folder)
    content = read_folder_file(file, TOKENIZER_BYTES)
    tokenizer = tokenizer or tokenizer_in(content, file)
    return derive(file.parent, tokenizer, content=content)


def recorded_text_format(folder: Path) -> TextFormat | None:
    """The record in a folder's `text_format.json`, or in its manifest if it is a prepared corpus; None without one. Raises Damaged."""
    file = folder / TEXT_FORMAT
    if file.is_file():
        try:
            value = json.loads(read_folder_file(file, JSON_BYTES))
        except ValueError as error:
            raise Damaged(
                f"{file}: not JSON ({error}); without it the files of the folder decide, which may not name the token of --eos "
                "and the ends of answers"
            ) from None
        return TextFormat.from_plain(value, str(file))
    manifest = _object(folder / MANIFEST)
    text = manifest.get("text_format") if "tokenizer" in manifest else None
    return None if text is None else TextFormat.from_plain(text, str(folder / MANIFEST))


def tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer.json in the folder of a model or corpus; for a checkpoint without one, the tokenizer.json of its run."""
    return next((file for home in homes_of(folder) if (file := home / TOKENIZER).is_file()), None)


def no_tokenizer(folder: Path) -> BadInput:
    """The error to raise for a model's folder that has no tokenizer."""
    return BadInput(
        f"{folder} has no tokenizer.json; expected the folder of a run, a checkpoint of one, or a Hugging Face folder"
    )


def known_text_format(folder: Path) -> TextFormat | None:
    """Like `read_text_format`, but None for a folder that has neither a record nor a tokenizer.json."""
    recorded = any(recorded_text_format(home) is not None for home in homes_of(folder))
    return read_text_format(folder) if recorded or tokenizer_file(folder) is not None else None


def exported_ids(text: TextFormat, bos: int | None = None) -> dict[str, int | list[int] | None]:
    """The ids of special tokens for the config.json of a Hugging Face folder. `bos` is used if no token begins every text."""
    ends = [token.id for token in text.stops]
    return {
        "bos_token_id": text.begin[0].id if text.begin else bos,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": None if text.pad is None else text.pad.id,
    }


def config_pad(folder: Path) -> int | None:
    """The padding token's id in config.json of a Hugging Face folder. transformers takes it for the end of a text that it scores."""
    pad = read_object(folder / CONFIG).get("pad_token_id")
    return pad if isinstance(pad, int) else None


def named_bos(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The id of the token that a folder names as the beginning of a text, even if its texts do not begin with it."""
    text = folder_special_tokens(folder).get("bos_token")
    return None if text is None else tokenizer.token_to_id(text)


def export_text_files(
    text: TextFormat, source: Path, folder: Path, tokenizer: Tokenizer, defaults: Mapping[str, Any]
) -> None:
    """Write the files of a Hugging Face folder that are about texts: the files of `source` with the special tokens of `text`.

    `folder` already has its config.json and tokenizer.json. `defaults` are values of tokenizer_config.json that `source` does not set.
    generation_config.json gets all stops as `eos_token_id`. The `eos_token` of `source` is kept if `derive` on the new folder then finds
    the right document end. For an instruct model, `eos_token` thus remains the token that ends a turn.
    """
    values = {**defaults, **read_object(source / TOKENIZER_CONFIG)}
    end = text.document_end
    named = folder_special_tokens(source)
    if "bos_token" not in named and text.begin:
        values["bos_token"] = text.begin[0].text
    if "eos_token" not in named and end is not None:
        values["eos_token"] = end.text
    ids = exported_ids(text, named_bos(source, tokenizer))
    generation = {**read_object(source / GENERATION_CONFIG), **ids}
    _write(folder / GENERATION_CONFIG, generation)
    _write(folder / TOKENIZER_CONFIG, values)
    copy_chat_files(source, folder)
    usable = "eos_token" not in named or tokenizer.token_to_id(named["eos_token"]) is not None
    if end is None or (usable and derive(folder, tokenizer).document_end == end):
        return
    # Always correct tokenizer_config.json; correct special_tokens_map.json only if it names an end.
    for file in (folder / TOKENIZER_CONFIG, folder / SPECIAL_TOKENS_MAP):
        if "eos_token" in (values := read_object(file)) or file.name == TOKENIZER_CONFIG:
            _write(file, {**values, "eos_token": end.text})


def folder_special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a folder names, such as `bos_token`. tokenizer_config.json has priority over special_tokens_map.json."""
    return special_tokens({**read_object(folder / SPECIAL_TOKENS_MAP), **read_object(folder / TOKENIZER_CONFIG)})


def tokenizer_identity(content: bytes) -> str:
    """Digest of the tokenizer in a `tokenizer.json`, independent of the file's layout.

    It does not change with white space, the order of keys, the notation of merges, or settings of padding and truncation. Raises BadInput
    if `content` is not a JSON object.
    """
    value = canonical_tokenizer(content)
    model = value.get("model")
    if isinstance(model, dict):  # the lists are long, and one joined text takes a third of the time
        vocab = model.get("vocab")
        merges = model.get("merges")
        if isinstance(vocab, dict):
            tokens = sorted(vocab, key=lambda token: (vocab[token], token))
            model["vocab"] = [_list_digest(tokens), digest(json.dumps([vocab[token] for token in tokens]).encode())]
        if isinstance(merges, list):
            model["merges"] = _list_digest(merges)
    return digest(json.dumps(value, sort_keys=True).encode())


def _list_digest(texts: Sequence[str]) -> str:
    """Digest of a list of texts that do not contain a zero character."""
    return digest("\0".join(texts).encode("utf-8", "surrogatepass"))


def canonical_tokenizer(content: bytes) -> dict[str, Any]:
    """The values of a `tokenizer.json` that decide its tokens, without padding, truncation and defaults. Raises BadInput."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise BadInput(f"not a tokenizer.json: {error}") from None
    if not isinstance(value, dict):
        raise BadInput("not a tokenizer.json: expected a JSON object")
    kept = {name: part for name, part in value.items() if name not in ("version", "truncation", "padding") and part}
    model = kept.get("model")
    if isinstance(model, dict):
        # Older files leave out the type, and settings that are turned off.
        model = {name: part for name, part in model.items() if name != "type" and part not in (None, False, "")}
        if isinstance(merges := model.get("merges"), list):
            model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        kept["model"] = model
    return kept


def different_parts(first: bytes, second: bytes) -> list[str]:
    """Names of the parts in which two `tokenizer.json` differ, such as `normalizer`; empty if they are the same tokenizer."""
    ours = canonical_tokenizer(first)
    theirs = canonical_tokenizer(second)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def encode_prompt(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of a prompt for a tokenizer without a folder. They begin with the tokens that its post-processor puts before a text."""
    begin = _FolderFiles(None, tokenizer, "the tokenizer", None).begin()[0]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return tuple(_prepended(tuple(token.id for token in begin), ids))


class _FolderFiles:
    """The tokens that the files of a folder name. Tokens that the tokenizer does not have are ignored."""

    def __init__(self, folder: Path | None, tokenizer: Tokenizer, where: str, template: str | None) -> None:
        self._folder = folder or Path()
        self._tokenizer = tokenizer
        self._where = where
        names = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, CONFIG, GENERATION_CONFIG)
        values = {name: {} if folder is None else read_object(folder / name) for name in names}
        self._config = values[TOKENIZER_CONFIG]
        self._texts = {name: special_tokens(values[name]) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)}
        inner = values[CONFIG].get("text_config")  # of a model that also reads images
        self._ids = {
            CONFIG: {**(inner if isinstance(inner, dict) else {}), **values[CONFIG]},
            GENERATION_CONFIG: values[GENERATION_CONFIG],
        }
        templates = (folder_template, folder_tool_template)
        own = [None if folder is None else read(folder, self._config) for read in templates]
        self._templates = own if template is None else [template, None]

    def document_end(self, eos: str | None) -> tuple[Token | None, list[str]]:
        """The token that ends a document, and one sentence for each contradiction between files about it."""
        if eos is not None:
            return self._flag(eos), []
        by_file = self._named("eos")
        documents = [token for file, tokens in by_file if file != GENERATION_CONFIG for token in tokens]
        if not documents:
            # generation_config.json also names tokens that end turns, so it does not decide. But a padding token that it lists is an end.
            listed = set(self.ends())
            pads = set(self.pads()) - listed
            documents = [token for name in KNOWN_ENDS if (token := self._by_text(name)) and token not in pads][:1]
        end = documents[0] if documents else None
        notes = [
            f"{self._folder / file} names {_texts(tokens)} as the end of a text, and {self._folder / by_file[0][0]} "
            f"{_texts(by_file[0][1])}"
            for file, tokens in by_file[1:]
            if file != GENERATION_CONFIG and not set(tokens) & set(by_file[0][1])
        ]
        others = [token for token in self.ends() if token != end]
        if end is None or not others or end not in (turn_ends := self._turn_ends()):
            return end, [f"{note}; a document ends with {end.text}" for note in notes if end]
        known = [token for token in others if token.text in KNOWN_ENDS and token not in turn_ends]
        other = next((token for token in (*known, *others) if token not in turn_ends), end)
        if other != end:
            notes.append(
                f"{end.text} ends a turn of the chat template of {self._folder}, and its files name {_texts(others)} too"
            )
        return other, [f"{note}; a document ends with {other.text}" for note in notes]

    def ends(self) -> Iterator[Token]:
        """The tokens that any file names as an end. Tokens of the most trusted file come first."""
        return (token for _, tokens in self._named("eos") for token in tokens)

    def pads(self) -> Iterator[Token]:
        """The tokens that a file names as padding, the most trusted file first."""
        return (token for _, tokens in self._named("pad") for token in tokens)

    def begin(self) -> tuple[tuple[Token, ...], list[str]]:
        """The tokens that the tokenizer puts before each text, and one sentence for each file that says otherwise.

        `tokenizer.json` decides: transformers 5 reads `add_bos_token` only for a tokenizer without this file.
        """
        plain, ids = self._probed()
        starts = range(len(ids) - len(plain) + 1)
        count = next((start for start in starts if ids[start : start + len(plain)] == plain), 0)
        begin = tuple(self._token(id) for id in ids[:count])
        notes = []
        said = self._config.get("add_bos_token")
        if isinstance(said, bool) and said != bool(begin):
            notes.append(
                f"{self._folder / TOKENIZER_CONFIG} has add_bos_token {json.dumps(said)}, but {TOKENIZER} decides: "
                + (f"it begins each text with {_texts(begin)}" if begin else "it puts nothing before a text")
            )
        bos = next((token for _, tokens in self._named("bos") for token in tokens), None)
        if begin and bos is not None and bos not in begin:
            notes.append(
                f"{self._folder} names {bos.text} as the beginning of a text, but {TOKENIZER} begins each with {_texts(begin)}"
            )
        if after := ids[count + len(plain) :]:
            put = _texts([self._token(id) for id in after])
            notes.append(f"{self._folder / TOKENIZER} puts {put} behind each text; it is left out behind prompts")
        return begin, notes

    def _probed(self) -> tuple[list[int], list[int]]:
        """The ids of a short text, without and with the tokens that the tokenizer puts around it."""
        for probe in chain([PROBE], self._tokenizer.get_vocab()):
            if plain := self._tokenizer.encode(probe, add_special_tokens=False).ids:
                return plain, self._tokenizer.encode(probe, add_special_tokens=True).ids
        return [], []

    def template_digest(self) -> str | None:
        """Digest of the chat template and, if it differs, of the template for tools. None without a chat template."""
        sources = [source for source in self._templates if source is not None]
        return None if self._templates[0] is None else digest("\n".join(sources).encode())

    def _turn_ends(self) -> set[Token]:
        """The tokens with which the chat template ends a message that another message follows."""
        if (source := self._templates[0]) is None:
            return set()
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": text} for role, text in zip(roles, TURNS, strict=True)]
        variables = {**self._texts[SPECIAL_TOKENS_MAP], **self._texts[TOKENIZER_CONFIG]}
        try:
            text = ChatTemplate(source, variables).render(messages, add_generation_prompt=False)
        except (BadInput, TemplateRefusal):  # whoever uses the template reports it
            return set()
        added = {token.content: id for id, token in self._tokenizer.get_added_tokens_decoder().items()}
        ends = set()
        for message, following in pairwise(TURNS):
            between = text.partition(message)[2].partition(following)[0]
            # Take the first added token between two messages; of several at one position, the longest.
            found = [(between.index(name), -len(name), name) for name in added if name and name in between]
            if found:
                name = min(found)[2]
                ends.add(Token(added[name], name))
        return ends

    def _named(self, kind: str) -> list[tuple[str, list[Token]]]:
        """(file, tokens) for each file that names tokens of a kind such as "eos", the most trusted file first."""
        named: list[tuple[str, list[Token]]] = []
        for file, texts in self._texts.items():
            token = self._by_text(texts.get(f"{kind}_token"))
            named.append((file, [] if token is None else [token]))
        for file, values in self._ids.items():
            named.append((file, [self._token(id) for id in self._ids_of(values, f"{kind}_token_id")]))
        return [(file, tokens) for file, tokens in named if tokens]

    def _ids_of(self, values: Mapping[str, Any], key: str) -> Iterator[int]:
        """The valid ids under `key`, which may be one id or a list. Ids that the tokenizer does not have are left out."""
        value = values.get(key)
        ids = value if isinstance(value, list) else [value]
        for id in ids:
            whole = isinstance(id, int) and not isinstance(id, bool) and 0 <= id < 2**31
            if whole and self._tokenizer.id_to_token(id) is not None:
                yield id

    def _flag(self, eos: str) -> Token:
        """The token that `--eos` names. Raises BadInput if the tokenizer does not have it."""
        token = self._by_text(eos)
        if token is None:
            near = nearest(eos, [text for text in self._tokenizer.get_vocab() if len(text) > 2])
            raise BadInput(f"{self._where}: has no token {eos!r}" + (f" (nearest: {near!r})" if near else ""))
        return token

    def _by_text(self, text: str | None) -> Token | None:
        id = None if text is None else self._tokenizer.token_to_id(text)
        return None if id is None or text is None else Token(id, text)

    def _token(self, id: int) -> Token:
        return Token(id, self._tokenizer.id_to_token(id) or "")


def _prepended(begin: Sequence[int], ids: Sequence[int]) -> list[int]:
    """`ids` with `begin` in front, unless `ids` start with `begin` already."""
    return list(ids) if list(ids[: len(begin)]) == list(begin) else [*begin, *ids]


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist or has no JSON object."""
    try:
        return read_object(file)
    except BadInput:
        return {}


def _write(file: Path, value: Mapping[str, Any]) -> None:
    write_durable(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _token(value: Any) -> Token:
    id, text = value
    if not isinstance(id, int) or isinstance(id, bool) or not isinstance(text, str):
        raise ValueError(f"expected [id, text] of a token, got {value!r}")
    return Token(id, text)


def _distinct(tokens: Iterable[Token]) -> tuple[Token, ...]:
    return tuple(dict.fromkeys(tokens))


def _texts(tokens: Iterable[Token]) -> str:
    return ", ".join(token.text for token in tokens)
