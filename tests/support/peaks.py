"""The memory that tensors take at the peak of a computation on the CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of(action: Callable[[], None]) -> int:
    """Return the peak bytes of tensors during `action`, minus the bytes before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
