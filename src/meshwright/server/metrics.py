"""The metrics of the HTTP server. Names are vLLM's with the prefix `meshwright:`, so that vLLM's dashboards can be reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from meshwright.events.exposition import Histogram, Metric, exposition
from meshwright.serve.figures import EngineFigures
from meshwright.server.transfers import TransferFigures

PREFIX = "meshwright:"
"""Beginning of the names of all metrics."""
_SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5, 5)
"""Bounds of histograms of the time between tokens, in seconds."""
_LONG = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
"""Bounds of the histogram of the time to the first token, in seconds."""
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
"""Bounds of histograms of the time of whole requests, in seconds."""
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
"""Bounds of histograms of numbers of tokens: 1, 2, 5, 10, … 500,000."""


class ServerMetrics:
    """Counters and histograms of requests and tokens. Times are in seconds and measured in the HTTP process."""

    def __init__(self, model: str) -> None:
        """`model` is the model's name in the API, which every metric has as a label."""
        self._labels = {"model_name": model}
        self.prompt_tokens = self.generation_tokens = self.rejected = self.not_finite = 0
        self._ended: Counter[str] = Counter()
        self.task_failures: Counter[str] = Counter()
        """Failures of background tasks, by the task's name."""
        self.ignored: Counter[str] = Counter()
        """Ignored things in requests of agents, by the labels of `agent_fields.IGNORED`."""
        self.own_answers: Mapping[str, int] = {}
        """How often a prompt contained an earlier prompt, by what followed it (see `OwnAnswers.results`)."""
        self._first_token = _histogram("time_to_first_token_seconds", "Time from a request to its first token.", _LONG)
        self._between = _histogram("inter_token_latency_seconds", "Time between tokens of a text.", _SHORT)
        self._per_token = _histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of a text that has ended.", _SHORT
        )
        self._decoding = _histogram(
            "request_decode_time_seconds", "Time from the first token of a text to its last.", _REQUEST
        )
        self._whole = _histogram("e2e_request_latency_seconds", "Time from a request to its end.", _REQUEST)
        self._prompts = _histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._texts = _histogram("request_generation_tokens", "New tokens of sequences.", _TOKENS)
        self._steps = _histogram("iteration_tokens_total", "New tokens of a step.", _TOKENS)

    def count_first_token(self, seconds: float) -> None:
        """Count the time from a request to its first token."""
        self._first_token.observe(seconds)

    def count_tokens(self, seconds: float, tokens: int) -> None:
        """Count `tokens` further tokens of a sequence, which came together `seconds` after the token before them."""
        self._between.observe(seconds / tokens, tokens)

    def count_step(self, tokens: int) -> None:
        """Count a step and its new tokens."""
        self.generation_tokens += tokens
        self._steps.observe(tokens)

    def count_request(self, reason: str, prompt: int, tokens: int, decoding: float, seconds: float) -> None:
        """Count a sequence that has ended.

        `reason` is its finish reason, `prompt` and `tokens` are its prompt and generated tokens. `decoding` is the time
        from its first token to its last, `seconds` the time from the request to its end.
        """
        self._ended[reason] += 1
        self.prompt_tokens += prompt
        self._prompts.observe(prompt)
        self._texts.observe(tokens)
        self._whole.observe(seconds)
        if tokens > 1:
            self._decoding.observe(decoding)
            self._per_token.observe(decoding / (tokens - 1))

    def text(self, figures: EngineFigures, transfers: TransferFigures | None = None) -> str:
        """Return all metrics in Prometheus's text format. Metrics of exchanges with other engines need `transfers`."""
        gauges = {
            "num_requests_running": ("Requests in the batch.", figures.running),
            "num_requests_waiting": ("Requests in the queue.", figures.waiting),
            "kv_cache_usage_perc": ("Share of the cache that requests hold; 1 is all of it.", figures.cache_usage),
        }
        counters = {
            "num_preemptions_total": ("Times that a request lost its cache.", figures.preemptions),
            "prefix_cache_hits_total": (
                "Tokens of admitted prompts taken from the prefix cache.",
                figures.cached_tokens,
            ),
            "spec_decode_num_draft_tokens_total": ("Draft tokens checked.", figures.draft_tokens),
            "spec_decode_num_accepted_tokens_total": ("Draft tokens accepted.", figures.accepted_draft_tokens),
            "prefix_cache_queries_total": ("Tokens of admitted prompts.", figures.looked_up_tokens),
            "prompt_tokens_total": ("Tokens of prompts.", self.prompt_tokens),
            "generation_tokens_total": ("New tokens.", self.generation_tokens),
            "num_requests_rejected_total": ("Requests answered with 429 or 503.", self.rejected),
            "num_requests_not_finite_total": (
                "Sequences that ended because the model gave NaN or infinity.",
                self.not_finite,
            ),
        }
        if transfers is not None:
            counters |= {
                "kv_blocks_sent_total": ("Cache blocks sent to other engines.", transfers.sent_blocks),
                "kv_blocks_received_total": ("Cache blocks received from other engines.", transfers.received_blocks),
                "kv_blocks_damaged_total": ("Received blocks with a wrong checksum.", transfers.damaged_blocks),
                "kv_blocks_stored_total": ("Cache blocks published to the store.", transfers.stored_blocks),
                "kv_blocks_fetched_total": ("Cache blocks taken from the store.", transfers.fetched_blocks),
                "kv_prompts_lost_total": ("Prompts that another engine did not finish.", transfers.lost_prompts),
            }
            gauges["kv_prompts_waiting"] = ("Prompts at other engines.", transfers.waiting_prompts)
            gauges["kv_blocks_unacknowledged"] = (
                "Blocks sent to others that have not copied them.",
                transfers.unacknowledged_blocks,
            )
            gauges["kv_peers_usable"] = ("Engines that take prompts of this one.", transfers.usable_peers)
        reasons = [({**self._labels, "finished_reason": reason}, float(n)) for reason, n in self._ended.items()]
        failures = [({**self._labels, "task": task}, float(n)) for task, n in self.task_failures.items()]
        ignored = [({**self._labels, "part": part}, float(n)) for part, n in self.ignored.items()]
        own = [({**self._labels, "result": result}, float(n)) for result, n in self.own_answers.items()]
        metrics = [
            *(Metric(PREFIX + name, "gauge", text, [(self._labels, value)]) for name, (text, value) in gauges.items()),
            *(
                Metric(PREFIX + name, "counter", text, [(self._labels, value)])
                for name, (text, value) in counters.items()
            ),
            Metric(f"{PREFIX}request_success_total", "counter", "Sequences that have ended, by reason.", reasons),
            Metric(f"{PREFIX}ignored_parts_total", "counter", "Keys and tools of agents without effect.", ignored),
            Metric(f"{PREFIX}own_answers_total", "counter", "Prompts with an earlier prompt, by what follows it.", own),
            Metric(f"{PREFIX}task_failures_total", "counter", "Failures of tasks beside requests.", failures),
        ]
        histograms = (
            self._first_token,
            self._between,
            self._per_token,
            self._decoding,
            self._whole,
            self._prompts,
            self._texts,
            self._steps,
        )
        lines = [line for histogram in histograms for line in histogram.lines(self._labels)]
        return exposition(metrics) + "".join(f"{line}\n" for line in lines)


def _histogram(name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(PREFIX + name, help, bounds)
