"""Text for people: what others wrote (trainers, engines, files), durations, and sizes. Pure."""

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
_PERIODS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def clean(text: str) -> str:
    """Return the text without characters that steer a terminal; line ends stay."""
    return "".join(character if character.isprintable() or character == "\n" else _UNPRINTABLE for character in text)


def one_line(text: str) -> str:
    """Return the text on one line, without characters that steer a terminal or begin another line of a log."""
    return clean(" ".join(text.split()))


def spoken(seconds: float) -> str:
    """A duration in at most two units: `45 s`, `3 min 20 s`, `23 h 41 min`. Days begin with the second: `2 d 3 h`."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, size in _PERIODS if left >= 2 * 86400 else _PERIODS[1:]:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part) or "0 s"


def size_of(count: int) -> str:
    """Bytes, in decimal units as disks are sold."""
    value, unit = float(count), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
