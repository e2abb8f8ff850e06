"""Structured logs that carry request and trace id, and OpenTelemetry spans.

Logs go to standard error: lines for people on a terminal, JSON elsewhere. Nobody waits for who reads them. Spans always
exist, so that every line has a trace id; they are exported by OTLP only when `OTEL_EXPORTER_OTLP_ENDPOINT` is set.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

import structlog
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from penstock.runtime.config import ConfigError
from penstock.runtime.context import add_trace_id
from penstock.runtime.log_lines import LogLines


@contextmanager
def telemetry(service: str, log_level: str = "info") -> Iterator[None]:
    """Configures logs and spans of this process for the length of the block; spans are flushed at its end."""
    lines = _lines()
    _configure_logs(service, log_level, lines)
    export = bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))
    provider = TracerProvider(
        sampler=None if export else ALWAYS_OFF,  # without an exporter spans only carry the trace's id
        resource=Resource.create({"service.name": f"penstock-{service}"}),
        shutdown_on_exit=False,
    )
    if export:
        _export(provider)
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
        if isinstance(lines, LogLines):
            lines.close()


def recording() -> bool:
    """Whether the spans of this process are exported."""
    provider = trace.get_tracer_provider()
    return isinstance(provider, TracerProvider) and provider.sampler is not ALWAYS_OFF


def _export(provider: TracerProvider) -> None:
    # Imported here: it costs start-up time that only those who export should pay.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def _lines() -> LogLines | TextIO:
    """Of standard error; where that is no file of the system's, itself."""
    try:
        return LogLines(sys.stderr.fileno())
    except (OSError, ValueError):
        return sys.stderr


def _configure_logs(service: str, level: str, lines: LogLines | TextIO) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError("log_level", level, "use debug, info, warning or error")
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_trace_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _add_service(service),
    ]
    _configure_libraries(shared, renderer, max(number, logging.WARNING), lines)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, lines)),
        cache_logger_on_first_use=True,
    )


def _configure_libraries(
    shared: list[structlog.typing.Processor],
    renderer: structlog.typing.Processor,
    level: int,
    lines: LogLines | TextIO,
) -> None:
    """Gives log lines of the engine and of libraries, which use `logging`, the same form and the same ids."""
    handler = logging.StreamHandler(lines)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _add_service(service: str) -> structlog.typing.Processor:
    def add(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add
