"""Hands the events of a run to its sinks. Only rank 0 has all events."""
