"""Metrics: what Prometheus scrapes, and the latencies of every request.

Latencies are measured here, where clients feel them; gauges and counters come from the engine when they are scraped.
Called by generations, and by the /metrics endpoint.
"""

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from roost.messages import Begun, Event, Finished, SpecStats, Stats, Tokens

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REFUSALS = ("400", "404", "409", "429", "500", "503")  # there from the beginning, at 0: alerts watch what grows


class Metrics:
    """What the server itself measures and counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.queued = self._histogram("roost_queue_seconds", "From request to when it begins to run")
        self.first_token = self._histogram("roost_time_to_first_token_seconds", "From request to first token")
        self.between = self._histogram("roost_inter_token_seconds", "Between tokens of one output")
        self._refused = Counter("roost_refusals", "Requests refused, by status", ["status"], registry=self._registry)
        for status in _REFUSALS:
            self._refused.labels(status)
        self._by_status: dict[str, int] = {}
        self.whole = self._histogram("roost_end_to_end_seconds", "From request to end")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=_SECONDS)

    def refuse(self, status: int) -> None:
        """A request was refused."""
        self._refused.labels(str(status)).inc()
        self._by_status[str(status)] = self._by_status.get(str(status), 0) + 1

    def refused(self) -> dict[str, int]:
        """How many were, by status."""
        return dict(self._by_status)

    def exposition(self, stats: Stats, queued_max: int) -> bytes:
        """All metrics, in Prometheus' text format."""
        engine = CollectorRegistry()
        engine.register(_EngineStats(stats, queued_max))
        return generate_latest(self._registry) + generate_latest(engine)


class LatencyTimer:
    """Measures the latencies of one output."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._last: float | None = None

    def observe(self, event: Event) -> None:
        """Observe an event as it arrives."""
        now = time.monotonic()
        if isinstance(event, Begun):
            self._metrics.queued.observe(now - self._began)
        elif isinstance(event, Tokens):
            if self._last is None:
                self._metrics.first_token.observe(now - self._began)
            else:
                each = (now - self._last) / len(event.tokens)
                for _ in event.tokens:
                    self._metrics.between.observe(each)
            self._last = now
        elif isinstance(event, Finished):
            self._metrics.whole.observe(now - self._began)


class _EngineStats(Collector):
    """The engine's statistics as metrics."""

    def __init__(self, stats: Stats, queued_max: int) -> None:
        self._stats = stats
        self._queued_max = queued_max

    def collect(self) -> Iterator[Metric]:
        """One metric for each number."""
        stats = self._stats
        yield GaugeMetricFamily("roost_queued_requests", "Requests in the queue", stats.queued)
        text = "Most requests allowed in the queue; one more is refused"
        yield GaugeMetricFamily("roost_queued_requests_limit", text, self._queued_max)
        yield GaugeMetricFamily("roost_running_requests", "Requests running", stats.running)
        yield from _sessions(stats)
        age_s = stats.step_age_ms / 1000
        yield GaugeMetricFamily("roost_step_age_seconds", "Time since the last step, while there is work", age_s)
        yield CounterMetricFamily("roost_steps", "Steps completed", stats.steps)
        yield CounterMetricFamily("roost_failed_steps", "Steps that failed", stats.failed_steps)
        for what, most in (("rows", stats.step_rows_max), ("tokens", stats.step_tokens_max)):
            text = f"Most {what} allowed in a step, since larger ones failed; +Inf: no limit"
            yield GaugeMetricFamily(f"roost_step_{what}_limit", text, float("inf") if most is None else most)
        yield CounterMetricFamily("roost_prompt_tokens", "Prompt tokens of finished requests", stats.prompt_tokens)
        yield CounterMetricFamily("roost_cached_tokens", "Of those, found in the prefix cache", stats.cached_tokens)
        yield CounterMetricFamily("roost_completion_tokens", "Tokens generated", stats.completion_tokens)
        yield CounterMetricFamily(
            "roost_retractions", "Requests preempted, that is, sent back to the queue", stats.retractions
        )
        endings = CounterMetricFamily("roost_requests", "Requests ended, by reason", labels=["reason"])
        for reason, count in stats.endings:
            endings.add_metric([reason], count)
        yield endings
        pages = GaugeMetricFamily("roost_pages", "KV pages, by book and account", labels=["book", "account"])
        for pool in stats.pools:
            pages.add_metric([pool.book, "free"], pool.free)
            pages.add_metric([pool.book, "leased"], pool.leased)
            pages.add_metric([pool.book, "cached"], pool.cached)
            pages.add_metric([pool.book, "retiring"], pool.retiring)
        yield pages
        yield from _speculation(stats.spec)
        yield _draft_lengths(stats.draft_lengths)


def _sessions(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("roost_sessions", "Open sessions", stats.sessions)
    yield GaugeMetricFamily("roost_sessions_resident", "Of those, with KV pages of their own", stats.sessions_resident)
    yield GaugeMetricFamily("roost_session_tokens", "Tokens whose KV idle sessions hold", stats.session_tokens)
    yield CounterMetricFamily("roost_sessions_opened", "Sessions opened, forks included", stats.sessions_opened)
    yield CounterMetricFamily("roost_sessions_closed", "Sessions closed by their clients", stats.sessions_closed)
    yield CounterMetricFamily(
        "roost_sessions_expired", "Sessions closed when their ttl was over", stats.sessions_expired
    )
    reclaimed = "How often an idle session's KV pages were released to the prefix cache"
    yield CounterMetricFamily("roost_sessions_reclaimed", reclaimed, stats.sessions_reclaimed)


def _speculation(spec: SpecStats) -> Iterator[Metric]:
    """Speculation's counters over all requests; zeros if there is none."""
    yield CounterMetricFamily("roost_spec_rounds", "Rounds in which drafts were verified", spec.rounds)
    yield CounterMetricFamily("roost_spec_drafts_offered", "Draft tokens verified", spec.drafts_offered)
    accepted = "Of those, accepted, including those past the end of an output"
    yield CounterMetricFamily("roost_spec_drafts_accepted", accepted, spec.drafts_accepted)
    forced = "Of those, tokens that a grammar left no choice about"
    yield CounterMetricFamily("roost_spec_drafts_forced", forced, spec.drafts_forced)
    overshoot = "Accepted tokens past the end of an output"
    yield CounterMetricFamily("roost_spec_overshoot_tokens", overshoot, spec.overshoot)
    looked_up = "Of the rounds, those in which looked-up drafts went before a draft head's"
    yield CounterMetricFamily("roost_spec_lookup_rounds", looked_up, spec.lookup_rounds)
    offered = "Of the draft tokens verified, those that were looked up in such rounds"
    yield CounterMetricFamily("roost_spec_lookup_drafts_offered", offered, spec.lookup_offered)
    won = "Of those, accepted, including those past the end of an output"
    yield CounterMetricFamily("roost_spec_lookup_drafts_accepted", won, spec.lookup_accepted)
    counts = accumulate(spec.histogram)
    buckets = [(f"{accept_len}.0", float(count)) for accept_len, count in enumerate(counts, 1)]
    accept_length = HistogramMetricFamily("roost_spec_accept_length", "Tokens accepted in a round, bonus included")
    accept_length.add_metric([], [*buckets, ("+Inf", float(spec.rounds))], spec.rounds + spec.drafts_accepted)
    yield accept_length


def _draft_lengths(rounds: tuple[int, ...]) -> Metric:
    """A histogram of draft lengths, including rounds without drafts."""
    length = HistogramMetricFamily("roost_spec_draft_length", "Tokens drafted for a round, 0 included")
    buckets = [(f"{number}.0", float(count)) for number, count in enumerate(accumulate(rounds))]
    num_drafts = sum(number * count for number, count in enumerate(rounds))
    length.add_metric([], [*buckets, ("+Inf", float(sum(rounds)))], num_drafts)
    return length
