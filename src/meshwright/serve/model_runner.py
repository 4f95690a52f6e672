"""The forward pass of one step: the logits from which new tokens are drawn.

On CUDA a step that has only decodes is replayed from a CUDA graph, because the host launches its kernels more slowly than the device runs
them. There is a graph for some batch sizes; steps are padded to the next. Decodes with drafts have graphs of their own. In steps with
prompts, attention is launched and the rest is graphs (`serve.prompt_graphs`).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.expert_decode import most_tokens
from meshwright.models.block import Block
from meshwright.models.decoder import Decoder
from meshwright.models.latent_attention import LatentAttention
from meshwright.models.moe import MoELayer
from meshwright.models.prediction import PredictionModule
from meshwright.policies.drafting import most_drafting
from meshwright.serve.batch_inputs import BatchInputs, PackedStep, StepInputs
from meshwright.serve.blocks import Delta, add_and_norm, block_forward, residual_stream, selected
from meshwright.serve.cached_attention import use_cached_attention
from meshwright.serve.graphs import Graphs
from meshwright.serve.host_decode import HostDecode
from meshwright.serve.kv_cache import KVCache
from meshwright.serve.prompt_graphs import PromptGraphs
from meshwright.spec.errors import BadInput

log = logging.getLogger("meshwright.server")


class ModelRunner:
    """Runs the model on steps. It replaces the model's attention, so the model can be used by the engine only."""

    uniform_drafts = True
    """Whether decodes with drafts may be padded to one number of tokens."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        inputs: BatchInputs,
        *,
        context: int,
        graph_sizes: tuple[int, ...] = (),
        prompt_sizes: tuple[int, ...] = (),
        invariant: bool = False,
        predictions: int = 0,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._predictions = predictions
        self._step = use_cached_attention(model, cache, context, invariant=invariant, predictions=predictions)
        usual = not invariant and not predictions and not prompt_sizes and HostDecode.supports(model, cache)
        self._host_decode = HostDecode(model, cache, context) if usual else None
        self.decode_sizes = graph_sizes
        """Batch sizes with a CUDA graph, ascending."""
        self.prompt_sizes = prompt_sizes
        """Numbers of tokens to which steps with prompts are padded for their graphs, ascending."""
        weight = model.embed.weight
        normed = weight.new_empty(1, max(prompt_sizes, default=0), model.spec.hidden)
        self._prompt_graphs = PromptGraphs(self._step, self._compute_normed, prompt_sizes, inputs.groups, normed)
        self._graphs = Graphs()
        self._graph_logits = torch.empty(0)
        self.normed = self._graph_normed = torch.empty(0)
        """`(1, tokens, hidden)`: the normed output of the last step. Kept for prediction modules and for log probabilities of prompts."""

    def expand_latents(self) -> None:
        """Let decodes expand keys and values from the cached latents. Raises BadInput for a model without latent attention."""
        if not any(isinstance(module, LatentAttention) for module in self._model.modules()):
            raise BadInput("absorb: only latent attention has a form that does not absorb", key="absorb")
        self._step.absorbs = False

    def logits(self, packed: PackedStep) -> Tensor:
        """Logits `(samples, vocab)` of a packed step, valid until the next call."""
        size = packed.decode_size
        queries = packed.decode_queries
        if size is not None and self._graphs.replay((size, queries)):
            logits = self._graph_logits[: size * queries]
            if self._predictions:
                self.normed = self.graph_normed(size * queries)
        elif self._host_decode is not None and size == queries == 1:
            return self._host_decode.logits(self._inputs, packed)
        else:
            logits = self.forward(self._inputs.resolve(packed))
        return logits[: len(packed.sampled_rows)] if packed.sampled_tokens is None else logits[packed.sampled_tokens]

    def fill_cache(self, packed: PackedStep) -> None:
        """Write keys and values of a packed step into the cache; compute no logits."""
        self.write_cache(self._inputs.resolve(packed))

    def write_cache(self, inputs: StepInputs) -> None:
        """Write keys and values of a step's tokens into the cache; compute no logits."""
        self._residual(inputs)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture the graphs: of steps with prompts, and of decodes without and with drafts for each batch size.

        The captured steps have only padding, so they write nothing into the cache.
        """
        self._capture_prompts()
        shapes = [(size, 1) for size in self.decode_sizes]
        drafts = self._inputs.drafts
        if drafts:
            shapes += [(size, 1 + drafts) for size in drafted_sizes(self.decode_sizes, drafts)]
        for size, queries in sorted(shapes, key=math.prod, reverse=True):
            packed = self._inputs.pack_padding(size, queries)
            if not self._graph_logits.numel():
                self._graph_logits = torch.empty_like(self.forward(self._inputs.resolve(packed)))
                if self._predictions:
                    self._graph_normed = torch.empty_like(self.normed)
            # All graphs write into one tensor. If each had its own logits, they would stay allocated.
            self._graphs.capture((size, queries), partial(self._compute_into_graph_logits, packed, size * queries))

    def _capture_prompts(self) -> None:
        """Capture the graphs of steps with prompts. If that fails, an engine of one rank works without them and says why."""
        try:
            self._prompt_graphs.capture(self._graphs)
        except RuntimeError as error:  # of CUDA, or out of memory
            if dist.is_initialized():
                raise  # the other ranks would wait for this one
            self._prompt_graphs.clear()
            self.prompt_sizes = ()
            log.warning("the host launches prompts without CUDA graphs: %s", str(error).partition("\n")[0])

    def _compute_into_graph_logits(self, packed: PackedStep, count: int) -> None:
        self._graph_logits[:count].copy_(self.forward(self._inputs.resolve(packed)))
        if self._predictions:
            self._graph_normed[:, :count].copy_(self.normed)

    def graph_normed(self, count: int) -> Tensor:
        """The memory where the graph of a step of `count` tokens writes `normed`, for a model with prediction modules."""
        return self._graph_normed[:, :count]

    def release_graphs(self) -> None:
        """Free the graphs. When a process group is destroyed, NCCL waits for the graphs that have its collectives."""
        self._prompt_graphs.clear()
        self._graphs.clear()

    @property
    def few_tokens(self) -> tuple[int, ...]:
        """Numbers of tokens at which the kernel of MoE layers for few tokens changes, on a GPU.

        With at most 24 tokens: 1, 2, 4, 8, 16, 24. Up to each of them another kernel runs than up to the one before. Empty without one.
        """
        moe_layers = [module for module in self._model.modules() if isinstance(module, MoELayer)]
        if not self._model.embed.weight.is_cuda or not moe_layers:
            return ()
        most = most_tokens(moe_layers[0].count, moe_layers[0].per_token)
        return (*(size for size in map((2).__pow__, range(most.bit_length())) if size < most), most)

    @torch.inference_mode()
    def warm_prompt(self, tokens: int) -> None:
        """Run the first block, and the first block with experts, on a prompt of so many tokens of padding, without the cache.

        This compiles kernels and lets cuDNN plan for this number of tokens, before a request needs them.
        """
        inputs = self._inputs
        device = self._model.embed.weight.device
        positions = torch.arange(tokens, dtype=torch.int32, device=device)
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self._step.inputs = StepInputs(
            tokens=positions,
            positions=positions,
            slots=torch.full((inputs.groups, tokens), -1, dtype=torch.int32, device=device),
            block_tables=tuple(table[:1] for table in inputs.tables),
            context_lengths=ends[1:],
            query_starts=ends,
            decodes=0,
            prompts=(tokens,),
            sampled=None,
        )
        blocks = cast("list[Block]", list(self._model.layers.values()))
        routed = next((block for block in blocks if block.routed), blocks[0])
        hidden = torch.zeros(1, tokens, self._model.spec.hidden, dtype=self._model.embed.weight.dtype, device=device)
        for block in {blocks[0]: None, routed: None}:
            block_forward(block, hidden, None)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of the sampled tokens, `(samples, vocab)`."""
        # A step without `sampled` has only decodes: all its tokens need logits.
        normed = None if inputs.sampled is None else self._prompt_graphs.run(inputs)
        if normed is not None:
            self.normed = normed
            return self.head(normed[:, inputs.sampled])
        x, delta = self._residual(inputs)
        keeps = bool(self._predictions) or inputs.scored
        if inputs.sampled is not None and not keeps:
            x, delta = selected(x, delta, inputs.sampled)
        if (
            self._step.invariant
        ):  # the last norm is the trainer's operator, so that the trainer's exact forward has the same bits
            x = add_and_norm(x, delta, None)[0]
            delta = None
        normed = cast("Tensor", add_and_norm(x, delta, self._model.norm)[1])
        if keeps:
            self.normed = normed
            normed = normed if inputs.sampled is None else normed[:, inputs.sampled]
        return self.head(normed)

    def head(self, normed: Tensor) -> Tensor:
        """Logits `(tokens, vocab)` of normed outputs `(1, tokens, hidden)`."""
        tied = self._model.embed.weight if self._model.spec.tied else None
        return self._model.head(normed, None, tied)[0]

    def predict(self, inputs: StepInputs, depth: int, normed: Tensor, following: Tensor) -> Tensor:
        """The normed output of prediction module `depth` (from 0), `(1, tokens, hidden)`. Writes the module's keys and values.

        `normed` is the output of the model, or of the module before. `following` `(tokens,)` has for each token of the step the token
        `depth + 1` places after it.
        """
        self._step.inputs = inputs
        module = cast("PredictionModule", self._model.predictions[depth])
        joined = module.join(normed, self._model.scaled_embedding(following[None]))
        return cast("Tensor", add_and_norm(*block_forward(cast("Block", module.block), joined, None), module.norm)[1])

    def _compute_normed(self, inputs: StepInputs) -> Tensor:
        """The normed output of all tokens, `(1, tokens, hidden)`."""
        return cast("Tensor", add_and_norm(*self._residual(inputs), self._model.norm)[1])

    def _residual(self, inputs: StepInputs) -> tuple[Tensor, Delta | None]:
        """The residual stream after all layers, `(1, tokens, hidden)`, and the last layer's output, which is not added to it yet."""
        self._step.inputs = inputs
        if self._host_decode is not None:
            self._host_decode.forget_text()
        return residual_stream(self._model, inputs.tokens, inputs.positions)


def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Batch sizes of CUDA graphs up to `sequences`: 1, 2, 4, every 8 up to 256, every 32 above, and `sequences` itself."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, sequences + 1, 32), sequences}
    return tuple(sorted(size for size in sizes if size <= sequences))


def drafted_sizes(sizes: Sequence[int], drafts: int) -> tuple[int, ...]:
    """The batch sizes to which decodes are padded if each may have `drafts` drafts."""
    return tuple(sizes[: bisect_left(sizes, most_drafting(drafts)) + 1])
