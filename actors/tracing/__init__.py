"""OpenTelemetry at the actors: spans where the work is done, and their context in the messages between processes."""

from torpor.actors.tracing.marks import Mark, Value, begin, current_traceparent

__all__ = ["Mark", "Value", "begin", "current_traceparent"]
