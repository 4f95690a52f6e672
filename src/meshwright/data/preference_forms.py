"""Knows the forms in which data sets store preferences, and turns a record of each form into a prompt and its answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshwright.data.chat_forms import BadChat, listed, message, text_of
from meshwright.spec.errors import nearest

Messages = list[Any]
"""A list of messages of a chat."""
Kind = Literal["pairs", "labels"]
"""`pairs`: a good and a bad answer. `labels`: one answer that is good or bad."""
SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"))
"""Pairs of keys under which data sets store the scores of the two answers, the better answer's first."""
_TURN = re.compile(r"\n\n(Human|Assistant):")


class Preference(NamedTuple):
    """A prompt and the answers to it. Prompt and answers are lists of messages."""

    prompt: Messages
    """Messages before the answers."""
    answers: list[tuple[Messages, int]]
    """Each answer with 1 if it is good and -1 if it is bad. Of a pair, the good answer is first."""
    tools: Any = None
    """Definitions of the tools that the model may call."""
    scores: tuple[float, float] | None = None
    """Scores of the good and the bad answer of a pair, if the data has scores."""


@dataclass(frozen=True)
class PreferenceForm:
    """A form of records, which is recognised by its keys."""

    name: str
    """Name for people."""
    kind: Kind
    """Whether a record has a pair of answers, or one answer with a label."""
    keys: tuple[str, ...]
    """Keys that each record has."""
    meaning: str
    """Explanation for the documentation."""
    read: Callable[[Mapping[str, Any]], Preference]
    """Turns a record into a preference. Raises BadChat if the record does not have this form."""
    also: tuple[str, ...] = tuple(key for pair in SCORES for key in pair)
    """Further keys that a record may have."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.keys)})"

    def preference(self, record: Mapping[str, Any]) -> Preference:
        """Turn a record into a preference. The text under `system` becomes its first message.

        Raises BadChat if the record is malformed, and if its scores contradict the order of its answers.
        """
        found = self.read(record)
        found = found._replace(scores=_scores(record) if self.kind == "pairs" else None)
        if any(_role(answer[0]) != "assistant" for answer, _ in found.answers):
            raise BadChat("expected an answer that begins with a message of the assistant")
        if len(found.answers) == 2 and found.answers[0][0] == found.answers[1][0]:
            raise BadChat("chosen and rejected are the same")
        if record.get("system"):
            found = found._replace(prompt=[message("system", text_of(record, "system")), *found.prompt])
        return found


def _scores(record: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the scores of the chosen and the rejected answer; None if the record has none.

    Raises BadChat if they contradict the order.
    """
    for better, worse in SCORES:
        scores = [record.get(better), record.get(worse)]
        if None in scores:
            continue
        if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
            raise BadChat(f"{better}, {worse}: expected numbers, got {json.dumps(scores, default=str)}")
        above, below = map(float, scores)  # type: ignore[arg-type]
        if above <= below:
            raise BadChat(f"{better} {above:g} is not above {worse} {below:g}")
        return above, below
    return None


def _answer(value: Any, key: str) -> Messages:
    """Return the messages of an answer, which is a text, one message, or a list of messages."""
    if isinstance(value, str):
        return [message("assistant", value)]
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if isinstance(value, list):
        return listed({key: value}, key)
    raise BadChat(f"{key}: expected text, a message, or a list of messages")


def _prompt(record: Mapping[str, Any], key: str) -> Messages:
    return listed(record, key) if isinstance(record.get(key), list) else [message("user", text_of(record, key))]


def _pair(prompt: Messages, chosen: Messages, rejected: Messages, tools: Any = None) -> Preference:
    return Preference(prompt, [(chosen, 1), (rejected, -1)], tools)


def _asked(record: Mapping[str, Any]) -> Preference:
    """Reads `prompt`, `chosen` and `rejected`. The two answers may begin with the prompt."""
    prompt = _prompt(record, "prompt")
    answers = [_answer(record.get(key), key) for key in ("chosen", "rejected")]
    if all(_role(answer[0]) == "assistant" for answer in answers):
        return _pair(prompt, *answers)
    whole = _parted(*answers)
    repeated = whole.prompt[-len(prompt) :]
    if [_words(each) for each in repeated] != [_words(each) for each in prompt]:
        raise BadChat("prompt: the prompts differ: chosen and rejected begin with another one")
    return whole


def _conversations(record: Mapping[str, Any]) -> Preference:
    """Reads `conversations`, which is the prompt, and two answers."""
    return _pair(listed(record, "conversations"), *(_answer(record.get(key), key) for key in ("chosen", "rejected")))


def _whole(record: Mapping[str, Any]) -> Preference:
    """Reads two whole conversations. The messages with which both begin are the prompt."""
    values = [record.get(key) for key in ("chosen", "rejected")]
    if all(isinstance(value, str) for value in values):
        return _parted(*(_turns(str(value), key) for value, key in zip(values, ("chosen", "rejected"), strict=True)))
    return _parted(*(_answer(value, key) for value, key in zip(values, ("chosen", "rejected"), strict=True)))


def _turns(text: str, key: str) -> Messages:
    """Return the messages of a text in which `Human:` and `Assistant:` begin the turns."""
    parts = _TURN.split(text)
    if parts[0].strip() or len(parts) < 3:
        raise BadChat(f"{key}: a text without a prompt: expected the key prompt, or turns of Human: and Assistant:")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [message(roles[who], said.strip()) for who, said in zip(parts[1::2], parts[2::2], strict=True)]


def _parted(chosen: Messages, rejected: Messages) -> Preference:
    """Divide two conversations into the prompt with which both begin and the answers that follow.

    Raises BadChat if the prompts differ.
    """
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if _words(one) != _words(other):
            break
        same += 1
    answers = chosen[same:], rejected[same:]
    if not answers[0] and not answers[1]:
        raise BadChat("chosen and rejected are the same")
    if same == 0 or any(not answer or _role(answer[0]) != "assistant" for answer in answers):
        at = f"from message {same + 1} on" if same else "from the first message on"
        raise BadChat(
            f"the prompts of chosen and rejected differ {at}; expected an answer of the assistant to the same prompt"
        )
    return _pair(chosen[:same], *answers)


def _role(item: Any) -> Any:
    return item.get("role") if isinstance(item, dict) else None


def _words(item: Any) -> Any:
    return (_role(item), item.get("content"), item.get("tool_calls")) if isinstance(item, dict) else item


def _rated(record: Mapping[str, Any]) -> Preference:
    """Reads a prompt, an answer, and whether the answer is good."""
    label = record.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        raise BadChat(f"label: expected true or false, got {json.dumps(label, default=str)}")
    return Preference(
        _prompt(record, "prompt"), [(_answer(record.get("completion"), "completion"), 1 if label else -1)]
    )


def _preferred(record: Mapping[str, Any]) -> Preference:
    """Reads the form that OpenAI documents for preference fine-tuning."""
    given = record.get("input")
    if not isinstance(given, dict):
        raise BadChat("input: expected an object with messages")
    answers = [_answer(record.get(key), key) for key in ("preferred_output", "non_preferred_output")]
    return _pair(listed(given, "messages"), *answers, tools=given.get("tools"))


def _ranked(record: Mapping[str, Any]) -> Preference:
    """Reads completions with ranks. The completions of best and of worst rank become the pair; others are not used."""
    given = record.get("completions")
    if not isinstance(given, list) or not all(
        isinstance(each, dict) and isinstance(each.get("rank"), int) for each in given
    ):
        raise BadChat("completions: expected a list of objects with rank and completion")
    ranks = sorted(given, key=lambda each: each["rank"])
    if len(ranks) < 2 or ranks[0]["rank"] == ranks[-1]["rank"]:
        raise BadChat("completions: expected two of different rank")
    answers = [_answer(each.get("completion"), "completions.completion") for each in (ranks[0], ranks[-1])]
    return _pair(listed(record, "context"), *answers)


def _replaced(record: Mapping[str, Any]) -> Preference:
    """Reads a conversation, and an answer that is worse than the conversation's last message."""
    whole = listed(record, "messages")
    if len(whole) < 2 or _role(whole[-1]) != "assistant":
        raise BadChat("messages: expected a prompt and, last, an answer of the assistant")
    return _pair(whole[:-1], whole[-1:], _answer(record.get("rejected_response"), "rejected_response"))


FORMS = (
    PreferenceForm(
        "OpenAI's",
        "pairs",
        ("input", "preferred_output", "non_preferred_output"),
        "`input.messages` is the prompt, `input.tools` its tools; the outputs are lists of messages",
        _preferred,
    ),
    PreferenceForm(
        "ranked completions",
        "pairs",
        ("context", "completions"),
        "`context` is the prompt; each completion has a `rank`, 0 the best, and messages: the first and the last are a pair",
        _ranked,
    ),
    PreferenceForm(
        "prompt and pair",
        "pairs",
        ("prompt", "chosen", "rejected"),
        "each a text or a list of messages; the answers may repeat the prompt",
        _asked,
    ),
    PreferenceForm(
        "conversation and pair",
        "pairs",
        ("conversations", "chosen", "rejected"),
        "the conversation is the prompt; each answer a message with `from` and `value`",
        _conversations,
    ),
    PreferenceForm(
        "pair of conversations",
        "pairs",
        ("chosen", "rejected"),
        "the messages that both have in common are the prompt; texts with turns of `Human:` and `Assistant:` too",
        _whole,
    ),
    PreferenceForm(
        "conversation and rejected answer",
        "pairs",
        ("messages", "rejected_response"),
        "the last message is the chosen answer",
        _replaced,
    ),
    PreferenceForm(
        "labelled answers",
        "labels",
        ("prompt", "completion", "label"),
        "each a text or a list of messages; `label` is true for a good answer",
        _rated,
        also=(),
    ),
)
"""The known forms. A record has the first form whose keys it all has."""


def preference_form_of(names: Collection[str]) -> PreferenceForm | None:
    """Return the form of records with the keys `names`; None if it is not known."""
    return next((form for form in FORMS if set(form.keys) <= set(names)), None)


def no_preference_form(record: Mapping[str, Any]) -> str:
    """Return a sentence for people: which keys the record has, and which forms are known."""
    known: Sequence[str] = [key for form in FORMS for key in form.keys]
    pairs = ((nearest(key, record, 0.8), key) for key in known if key not in record)
    near = next((f" ({found!r} is near {key!r})" for found, key in pairs if found), "")
    return (
        f"its records have {', '.join(map(repr, record))}"
        + near
        + f", which is no known form of preferences: {', '.join(map(str, FORMS))}"
    )
