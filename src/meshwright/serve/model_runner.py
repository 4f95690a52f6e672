"""The forward pass of one step: logits of the tokens after which a new one is drawn.

On CUDA, steps of decodes only are repeated from CUDA graphs, one for each of some batch sizes, because a decode is shorter than the launch
of its kernels by the host.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from meshwright.models.decoder import Block, Decoder
from meshwright.serve.batch_inputs import BatchInputs, Packed, StepInputs
from meshwright.serve.blocks import add_and_norm, block_forward, residual_stream
from meshwright.serve.cached_attention import use_cached_attention
from meshwright.serve.host_decode import HostDecode
from meshwright.serve.kv_cache import KVCache


class ModelRunner:
    """Runs the model on steps. It changes the model's attention, so the model is then the engine's."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        inputs: BatchInputs,
        *,
        context: int,
        graph_sizes: tuple[int, ...] = (),
        invariant: bool = False,
    ) -> None:
        self._model, self._inputs = model, inputs
        self._step = use_cached_attention(model, cache, context, invariant=invariant)
        usual = not invariant and HostDecode.supports(model, cache)
        self._host_decode = HostDecode(model, cache, context) if usual else None
        self.decode_sizes = graph_sizes
        """Batch sizes with a CUDA graph, ascending."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._graph_logits = torch.empty(0)

    def logits(self, packed: Packed) -> Tensor:
        """Logits `(samples, vocab)` of a packed step, valid until the next call."""
        if packed.decode_size in self._graphs:
            self._graphs[packed.decode_size].replay()
            return self._graph_logits[: packed.decodes]
        if self._host_decode is not None and packed.decode_size == 1:
            return self._host_decode.logits(self._inputs, packed)
        return self.forward(self._inputs.resolve(packed))[: len(packed.sampled_rows)]

    def fill_cache(self, packed: Packed) -> None:
        """Write keys and values of a packed step into the cache, without logits."""
        self._residual(self._inputs.resolve(packed))

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture a graph for each batch size, the largest first, so that the others share its memory.

        The steps captured are all padding: they write nothing into the cache.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in sorted(self.decode_sizes, reverse=True):
            packed = self._inputs.pack_padding(size)
            logits = self.forward(self._inputs.resolve(packed))  # loads and tunes kernels, which a capture cannot
            if not self._graph_logits.numel():
                self._graph_logits = torch.empty_like(logits)
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog thread queries events meanwhile, which a capture forbids to all threads by default.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                # Into one tensor for all graphs: the logits of each would stay allocated.
                self._graph_logits[:size].copy_(self.forward(self._inputs.resolve(packed)))
            self._graphs[size] = graph

    def release_graphs(self) -> None:
        """Free the graphs. NCCL waits for those with its collectives when a process group is destroyed."""
        self._graphs.clear()

    @torch.inference_mode()
    def warm_prompt(self, tokens: int) -> None:
        """Run the first block on a prompt of padding without the cache: cuDNN prepares its plan for this number of tokens."""
        inputs, device = self._inputs, self._model.embed.weight.device
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
        block = next(iter(self._model.layers.values()))
        hidden = torch.zeros(1, tokens, self._model.spec.hidden, dtype=self._model.embed.weight.dtype, device=device)
        block_forward(cast("Block", block), hidden, None)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits of the sampled tokens, `(samples, vocab)`."""
        x, delta = self._residual(inputs)
        if inputs.sampled is not None:
            x, delta = x[:, inputs.sampled], None if delta is None else delta[:, inputs.sampled]
        _, normed = add_and_norm(x, delta, self._model.norm)
        tied = self._model.embed.weight if self._model.spec.tied else None
        return self._model.head(normed, None, tied)[0]

    def _residual(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream after all layers, `(1, tokens, hidden)`, and what is still to be added to it."""
        self._step.inputs = inputs
        return residual_stream(self._model, inputs.tokens, inputs.positions)


def graph_sizes(sequences: int) -> tuple[int, ...]:
    """Batch sizes for CUDA graphs: 1, 2, 4, steps of 8 up to 256, then steps of 32, up to `sequences` and that itself."""
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, sequences + 1, 32), sequences}
    return tuple(sorted(size for size in sizes if size <= sequences))
