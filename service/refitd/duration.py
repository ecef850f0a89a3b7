"""Durations as people say them."""

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def spoken(seconds: float) -> str:
    """A duration in at most two units: `45 s`, `3 min 20 s`, `23 h 41 min`. Days begin with the second: `2 d 3 h`."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in _UNITS if left >= 2 * 86400 else _UNITS[1:]:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part) or "0 s"
