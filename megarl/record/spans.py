"""Send what became of each sample as spans of OpenTelemetry (`logging.otlp_endpoint`), one trace per sample."""

from collections.abc import Iterator, Sequence
from typing import Any

from megarl.config.optional import import_optional
from megarl.host.exit_codes import RunOutcome
from megarl.record.metrics import MetricsRecord, Stage
from megarl.record.timeline import WAITING
from megarl.types import Reward, Sample
from megarl.types.sample_times import SAMPLE_TIMES, TimedPart

_KEY, _PACKAGE = "logging.otlp_endpoint", "megarl[otel]"
# The end of a run waits this long for spans that are not sent yet.
CLOSE_MS = 5000


def require_spans(endpoint: str | None) -> None:
    """Raise ConfigError if spans are asked for, and the packages that send them are missing."""
    if endpoint is not None:
        for name in ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
            import_optional(name, package=_PACKAGE, key=_KEY)


class SpanSender:
    """The sender of the spans of a run, which a logger closes; whatever is wrong at the other end, the run goes on.

    exporter: takes spans; None: one that sends them to the endpoint by OTLP over HTTP.
    """

    def __init__(self, endpoint: str, run: str, exporter: Any = None) -> None:
        require_spans(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import set_span_in_context

        self._provider = TracerProvider(resource=Resource.create({"service.name": "megarl", "megarl.run": run}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer, self._within = self._provider.get_tracer("megarl"), set_span_in_context
        SAMPLE_TIMES.is_kept = True

    def send(self, step: int, samples: Sequence[Sample], rewards: Sequence[Reward], stages: Sequence[Stage]) -> None:
        """Send the lives of samples that trained in a step, from their first requests to its end."""
        for sample, reward in zip(samples, rewards, strict=True):
            if not (parts := SAMPLE_TIMES.take(sample.uid, sample.sample_index)):
                continue
            parts = [*parts, *_afterwards(parts[-1].end_ns, stages)]
            whole = self._tracer.start_span(
                "sample",
                start_time=parts[0].start_ns,
                attributes={
                    "megarl.step": step,
                    "megarl.prompt": sample.uid,
                    "megarl.sample_index": sample.sample_index,
                    "megarl.reward": reward.score,
                    "megarl.finish_reason": sample.finish_reason.value,
                    "megarl.prompt_tokens": len(sample.prompt_token_ids),
                    "megarl.response_tokens": sample.num_response_tokens,
                },
            )
            context = self._within(whole)
            for part in parts:
                span = self._tracer.start_span(part.name, context=context, start_time=part.start_ns)
                span.end(end_time=part.end_ns)
            whole.end(end_time=max(part.end_ns for part in parts))

    def write(self, record: MetricsRecord) -> None:
        """Do nothing: metrics are no spans."""

    def close(self, _outcome: RunOutcome | None = None) -> None:
        """Send what is left, and end."""
        SAMPLE_TIMES.is_kept = False
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def _afterwards(done_ns: int, stages: Sequence[Stage]) -> Iterator[TimedPart]:
    """Yield the parts of a sample's life after its last request: its reward, and the stages that train on it."""
    spans = [TimedPart(name, int(start_s * 1e9), int(end_s * 1e9)) for name, start_s, end_s in stages]
    if ends := [each.end_ns for each in spans if each.name == "reward" and each.end_ns > done_ns]:
        yield TimedPart("reward", done_ns, min(ends))
    yield from (each for each in spans if each.name not in {*WAITING, "step"} and each.start_ns >= done_ns)
