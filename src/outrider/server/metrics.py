"""What /metrics shows, for Prometheus. One registry per app, so that two servers in one process never mix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from outrider.core.stats import Stats

# Upper bounds of the buckets of the histograms: seconds of a request, from a cached answer to a long one; seconds
# between tokens, from a small model on a GPU to a large one on a CPU; speed-ups, finest around 1.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
SPEEDUPS = (0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12)

OURS, VLLMS = b"outrider_spec_decode_", b"vllm:spec_decode_"

disable_created_metrics()  # when a counter was made is nobody's question


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = ["model_name"]
        self.drafts = self._counter("spec_decode_num_drafts", "Passes of the target that verified a draft", model)
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted", model)
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were kept", model)
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Kept tokens by their place in the draft", [*model, "position"]
        )
        self.drafted_by = self._counter("drafter_draft_tokens", "Drafted tokens by drafter", [*model, "drafter"])
        self.accepted_by = self._counter("drafter_accepted_tokens", "Kept tokens by drafter", [*model, "drafter"])
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts", model)
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens that the cache had, of all samples", model)
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens of all samples", model)
        self.written = self._counter("generation_tokens", "Tokens written", model)
        self.steps = self._counter("steps", "Passes of the target that wrote something, per sequence", model)
        self.requests = self._counter("requests", "Requests that ended, by how", [*model, "finish_reason"])
        self.restarts = self._counter("worker_restarts", "Workers started again after they died", model)
        self.running = self._gauge("num_requests_running", "Sequences in the batch", model)
        self.waiting = self._gauge("num_requests_waiting", "Sequences that wait for a place in the batch", model)
        self.cache = self._gauge("kv_cache_usage_perc", "Share of keys and values that is spoken for, 0 to 1", model)
        self.adapters = self._gauge("adapters", "LoRA adapters that requests may name", model)
        self.adapters_in_memory = self._gauge("adapters_in_memory", "LoRA adapters in memory, and mixes of them", model)
        self.up = self._gauge("worker_up", "1: the model's worker is ready", model)
        self.first_token = self._histogram("time_to_first_token_seconds", "From request to first token", model, SECONDS)
        self.gap = self._histogram("inter_token_latency_seconds", "Mean time between tokens of a step", model, GAPS)
        self.duration = self._histogram("e2e_request_latency_seconds", "From request to its end", model, SECONDS)
        self.speedup = self._histogram(
            "estimated_speedup", "Of a request, over plain decoding: see the guide", model, SPEEDUPS
        )
        self.http = self._counter("http_requests", "Answers by path and status", ["path", "status"])

    def record(self, model: str, prompt: int, stats: Stats) -> None:
        """What one sample of a prompt of that number of tokens took from the cache, drafted, kept and wrote."""
        self.prefix_queries.labels(model).inc(prompt)
        self.prefix_hits.labels(model).inc(stats.cached)
        self.drafts.labels(model).inc(stats.drafts)
        self.drafted.labels(model).inc(stats.drafted)
        self.accepted.labels(model).inc(stats.accepted)
        self.written.labels(model).inc(stats.tokens)
        self.steps.labels(model).inc(stats.steps)
        for depth, count in stats.accepted_by_depth.items():
            self.accepted_at.labels(model, str(depth - 1)).inc(count)
        for drafter, counts in stats.by_drafter.items():
            self.drafted_by.labels(model, drafter).inc(counts["drafted"])
            self.accepted_by.labels(model, drafter).inc(counts["accepted"])

    def forget(self, model: str) -> None:
        """A terminated model runs nothing; its counters stay, as counters must."""
        for gauge in (self.running, self.waiting, self.cache, self.up, self.adapters, self.adapters_in_memory):
            gauge.remove(model)

    def text(self, vllm_names: bool = False) -> bytes:
        """`vllm_names`: what drafts are counted by stands there once more as vLLM calls it, for its benchmark."""
        text = generate_latest(self.registry)
        if not vllm_names:
            return text
        drafts = [line for line in text.splitlines(keepends=True) if OURS in line]
        return text + b"".join(drafts).replace(OURS, VLLMS)

    def _counter(self, name: str, says: str, labels: list[str]) -> Counter:
        return Counter(f"outrider_{name}", says, labels, registry=self.registry)

    def _gauge(self, name: str, says: str, labels: list[str]) -> Gauge:
        return Gauge(f"outrider_{name}", says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"outrider_{name}", says, labels, buckets=buckets, registry=self.registry)
