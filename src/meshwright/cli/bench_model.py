"""Presents a model of this project to lm-eval.

The decoder computes scores and the inference engine texts, both in this process.

The module imports lm-eval, which is an optional dependency.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from meshwright.checkpoint.models.single_device import device_and_dtype, load_model
from meshwright.cli.chat_prompts import ChatPrompts
from meshwright.models.decoder import Decoder
from meshwright.serve.engine import Engine
from meshwright.serve.sampling_options import SamplingOptions
from meshwright.serve.scoring import score
from meshwright.server.model_files import ModelFiles
from meshwright.spec.engine import EngineOptions

NEW_TOKENS = 256
"""Maximum number of new tokens of an answer, if the task does not say."""
TEXTS_AT_ONCE = 64
"""Texts that the engine generates at the same time."""


class BenchModel(TemplateLM):
    """The model in a folder. With `chats`, lm-eval receives its questions as chats, already written by the chat template."""

    def __init__(self, folder: Path, files: ModelFiles, chats: ChatPrompts | None = None) -> None:
        super().__init__()
        self._folder = folder
        self._files = files
        self._chats = chats
        self._loaded: Decoder | Engine | None = None

    @property
    def eot_token_id(self) -> int:
        """The token before a text that has no context."""
        return self._files.text.prompt(())[0]

    @property
    def tokenizer_name(self) -> str:
        """The name of the model in lm-eval's cache of prompts."""
        return self._folder.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the chat template, which lm-eval stores in its results."""
        return (self._files.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat up to the beginning of the next answer.

        Without `add_generation_prompt`, the last message is left open.
        """
        assert self._chats is not None, "lm-eval asks for chats with --chat only"
        return self._chats.text(chat_history, continues=not add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text.

        The tokens that begin every text come first, unless `add_special_tokens` is False or the text is a chat, whose
        template writes them.
        """
        ids = self._files.tokenizer.encode(string, add_special_tokens=False).ids
        return ids if add_special_tokens is False or self._chats is not None else self._files.text.begun(ids)

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        scores = score(self._decoder(), [(context, continuation) for _, context, continuation in requests])
        return [(found.loglikelihood, found.greedy) for found in scores]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in nats. A text longer than the model's context is scored in several windows."""
        longest = self._decoder().spec.max_seq_len
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=longest,
                context_len=1,
            )
            found = score(self._decoder(), [make_disjoint_window(window) for window in windows])
            sums.append(sum(window.loglikelihood for window in found))
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt. An answer ends at a string that the task names, or at an end token of the model."""
        engine = self._engine()
        texts: dict[int, list[str]] = {}
        for request in requests:
            prompt, how = request.args
            ids = self.tok_encode(prompt)
            ids = ids if self._chats is not None else list(self._files.text.prompt(ids))
            new = int(how.get("max_gen_toks", NEW_TOKENS))
            until = how.get("until") or []
            number = engine.submit(
                ids[-max(1, engine.context - new) :],
                new_tokens=new,
                sampling=SamplingOptions(
                    temperature=float(how.get("temperature", 0.0)) if how.get("do_sample") else 0.0
                ),
                stop_ids=self._files.stop_ids,
                stop_strings=[until] if isinstance(until, str) else list(until),
            )
            texts[number] = []
        for update in engine.run():
            if update.error is not None:
                raise RuntimeError(update.error)
            texts[update.number].append(update.text)
        return ["".join(pieces) for pieces in texts.values()]

    def _decoder(self) -> Decoder:
        """Return the model as it was trained.

        An engine that was loaded is dropped first, because it has changed the model's attention.
        """
        if not isinstance(self._loaded, Decoder):
            self._loaded = None
            self._loaded = load_model(self._folder, *device_and_dtype())
        return self._loaded

    def _engine(self) -> Engine:
        if not isinstance(self._loaded, Engine):
            decoder = self._decoder()
            self._loaded = Engine(decoder, self._files.tokenizer, EngineOptions(sequences=TEXTS_AT_ONCE))
        return self._loaded
