"""Names of the reasons why a GPU runs below its clock rate. It imports the standard library alone."""

from __future__ import annotations

_REASONS = {
    0x001: "idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
"""Names of the bits of NVML's clocks event reasons (nvml.h)."""


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of the bits that are set, lowest first. A bit without a name is `0x…`."""
    named = [1 << place for place in range(bits.bit_length()) if bits >> place & 1]
    return tuple(_REASONS.get(bit, f"{bit:#x}") for bit in named)
