"""Scores of sequences by a reward model on one device. Sequences of similar length share a forward pass, padded at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from meshwright.checkpoint.models.single_device import load_model
from meshwright.data.chat_template import TOKENIZER_CONFIG, ChatTemplate, TemplateRefusal, folder_template, read_object
from meshwright.data.text_format import config_pad, folder_special_tokens, known_text_format, tokenizer_file
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.kernels.score import scores
from meshwright.models.decoder import Decoder
from meshwright.serve.weights import check_same_model, open_newer
from meshwright.spec.model import SCORE, ModelSpec
from meshwright.workload.rollout_memory import SCORED_TOKENS


class RewardScorer:
    """A reward model. The score of a sequence is computed at its last token.

    A chat template may write more tokens after an answer and its end token, for example a line break. The reward model
    was trained on scores after those tokens. They are `after_answer`: a caller that has only the tokens of an answer
    appends them.

    As in transformers, `pad` tokens at the end of a sequence are ignored (`pad_token_id` of a Hugging Face folder).
    """

    def __init__(
        self, model: Decoder, after_answer: tuple[int, ...], pad: int | None, tokenizer_digest: str | None
    ) -> None:
        """`tokenizer_digest` identifies the tokenizer, as `TextFormat.tokenizer` does; None if the folder has no tokenizer."""
        self._model = model
        self._whole = True
        """Whether the weights are complete: false if reading newer weights failed midway."""
        self.after_answer = after_answer
        self.pad = pad
        self.tokenizer_digest = tokenizer_digest

    @property
    def spec(self) -> ModelSpec:
        """The model's dimensions."""
        return self._model.spec

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence of token ids.

        Raises ValueError for a sequence that is empty or longer than the model's context, and for a token outside the
        vocabulary.
        """
        for number, sequence in enumerate(sequences):
            if not 0 < len(sequence) <= self.spec.max_seq_len:
                raise ValueError(f"text {number} has {len(sequence)} tokens: expected 1 to {self.spec.max_seq_len}")
            if min(sequence) < 0 or max(sequence) >= self.spec.vocab_size:
                raise ValueError(f"text {number} has token {max(sequence)}: expected 0 to {self.spec.vocab_size - 1}")
        if not self._whole:
            raise ValueError("the weights were not read to their end; load weights again")
        found = [0.0] * len(sequences)
        device = self._model.embed.weight.device
        for batch in _batches([len(sequence) for sequence in sequences]):
            longest = len(sequences[batch[0]])
            rows = [[*sequences[index], *[0] * (longest - len(sequences[index]))] for index in batch]
            hidden = self._model.hidden(torch.tensor(rows, device=device))
            last = torch.tensor([self._last(sequences[index]) for index in batch], device=device)
            ends = hidden[torch.arange(len(batch), device=device), last]
            values = scores(ends, self._model.get_parameter(SCORE)).tolist()
            for index, value in zip(batch, values, strict=True):
                found[index] = value
        return found

    def load_weights(self, folder: Path) -> None:
        """Load newer weights of the same model. Raises BadInput for another model, Damaged for damaged files.

        All files are verified first. If reading them fails after that, `score` raises ValueError until weights are
        loaded.
        """
        with open_newer(folder) as stored:
            check_same_model(self.spec, stored.spec, folder)
            stored.verify()
            self._whole = False
            stored.copy_to(self._model)
            self._whole = True

    def _last(self, sequence: Sequence[int]) -> int:
        """Return the index of the last token that is not padding; 0 if there is none."""
        return next((place for place in reversed(range(len(sequence))) if sequence[place] != self.pad), 0)


def open_scorer(
    folder: Path, device: torch.device, dtype: torch.dtype, *, adapter: Path | None = None, contents: bool = True
) -> RewardScorer:
    """Open the reward model in `folder`: a run, a checkpoint, or a Hugging Face folder of a classifier with one label.

    `adapter` and `contents` are passed to `load_model`. Raises BadInput if the model is not a reward model.
    """
    model = load_model(folder, device, dtype, adapter=adapter, contents=contents, scores=True)
    file = tokenizer_file(folder)
    text = known_text_format(folder)
    after = () if file is None or text is None else _after_answer(file.parent, open_tokenizer(file), text.stop_ids)
    return RewardScorer(model, after, config_pad(folder), None if text is None else text.tokenizer)


def _after_answer(home: Path, tokenizer: Tokenizer, stops: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that the chat template writes after the end token of a final answer; none without a template."""
    source = folder_template(home, read_object(home / TOKENIZER_CONFIG))
    if source is None:
        return ()
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    try:
        text = ChatTemplate(source, folder_special_tokens(home)).render(chat, add_generation_prompt=False)
    except TemplateRefusal:
        return ()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    end = next((place for place in reversed(range(len(ids))) if ids[place] in stops), len(ids))
    return tuple(ids[end + 1 :])


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of sequences that share a forward pass, the longest first.

    A batch has at most `SCORED_TOKENS` tokens with padding, unless a single sequence has more.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > SCORED_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
