"""Turns preferences into documents. Each answer becomes a document together with its prompt.

The tokens of the answer have the weight 1 if it is good and -1 if it is bad. The prompt has the weight 0.

The documents of one prompt follow each other and begin with the same tokens. Two facts ensure that: the template writes
the prompt of all answers alike, and a text is encoded such that the tokens before an answer do not depend on the answer
(`encode_chat`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.data.chat import Chat, ChatReader, checked_message
from meshwright.data.chat_forms import COMMON_KEYS, BadChat
from meshwright.data.corpus import CorpusDocument
from meshwright.data.indexed import IndexedFile
from meshwright.data.inputs import InputFile
from meshwright.data.manifest import PreferenceCounts, Shard
from meshwright.data.preference_forms import FORMS, Kind, PreferenceForm, no_preference_form, preference_form_of
from meshwright.data.records import BadDocument, DataRecord
from meshwright.data.token_weights import WeightFile
from meshwright.spec.errors import BadInput


class PreferenceReader(ChatReader):
    """Reads the preferences of files. Raises BadInput if pairs and labelled answers are mixed."""

    unknown_form = "no preferences"
    default_form = FORMS[0]

    kind: Kind | None = None
    """What the records read so far have: pairs of answers, or labelled answers."""

    def form_of(self, names: Collection[str], key: str | None) -> PreferenceForm | None:
        """Return the form of records with the keys `names`; None if it is not known."""
        del key
        return preference_form_of(names)

    def no_form(self, record: Mapping[str, Any], key: str | None) -> str:
        """Return a sentence for people: why the record has no known form."""
        del key
        return no_preference_form(record)

    def _documents(
        self, file: InputFile, record: DataRecord, form: PreferenceForm
    ) -> Iterator[CorpusDocument | BadDocument]:
        """Yield the documents of one record. If one of its answers is unusable, only that BadDocument is yielded."""
        self._check_record(record, (*form.keys, *form.also, *COMMON_KEYS, "id"))
        if record.fields.get("weight") is not None:
            raise BadChat("weight: preferences have none")
        found = form.preference(record.fields)
        tools = self._tools(found.tools or record.fields.get("tools"))
        chats = [self._answered(found.prompt, answer, sign, tools) for answer, sign in found.answers]
        documents = [self._document(file, record, chat) for chat in chats]
        for document in documents:
            if isinstance(document, BadDocument):
                yield document
                return
        whole = [document for document in documents if isinstance(document, CorpusDocument)]
        prompts = {document.text[: document.spans[0][0]] for document in whole if document.spans}
        if len(prompts) > 1:
            raise BadChat("the chat template writes the prompt of the two answers differently")
        if self.kind not in (None, form.kind):
            raise BadInput(
                f"{record.where}: {form.name}, and those before are {self.kind}: prepare pairs and labelled answers each with an --out of "
                "its own"
            )
        self.kind = form.kind
        self.counts.forms[form.name] += 1
        for chat, document in zip(chats, whole, strict=True):
            self._count(chat, document)
        if found.scores is not None:
            whole = [replace(document, score=score) for document, score in zip(whole, found.scores, strict=True)]
        yield from (replace(document, goes_on=True) for document in whole[:-1])
        yield whole[-1]

    def _answered(self, prompt: list[Any], answer: list[Any], sign: int, tools: list[dict[str, Any]] | None) -> Chat:
        """Join the prompt and one answer to a chat. `sign` becomes the weight of the answer's messages. Raises BadChat."""
        messages = []
        weights = []
        for part, weight in ((prompt, 0.0), (answer, float(sign))):
            for index, value in enumerate(part):
                where = f"message {index + 1} of the {'answer' if weight else 'prompt'}"
                messages.append(checked_message(value, where))
                for name in ("weight", "train"):
                    if messages[-1].pop(name, None) is not None:
                        raise BadChat(f"{where}: {name}: preferences have none")
                self._check_keys(messages[-1], where, bool(tools))
                weights.append(weight)
        return Chat(messages, weights, tools)


def count_preferences(kind: Kind, shards: Iterable[tuple[Path, Shard]]) -> PreferenceCounts:
    """Count the good and the bad answers in the shards of a directory."""
    counts: Counter[bool] = Counter()
    for directory, shard in shards:
        assert shard.weights is not None, "a shard of preferences has weights"
        file = IndexedFile(directory / shard.name)
        weights = WeightFile(directory / shard.name, file.tokens, shard.weights)
        bounds = file.document_bounds()
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            counts[bool(weights.read(start, stop).min() < 0)] += 1
    return PreferenceCounts(kind, counts[False], counts[True])
