"""Text for people: what others wrote, lists, durations, sizes; and URLs without what can be a secret. Pure."""

import base64
import re
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SHORT_SECRET = 4  # characters: a shorter part of a URL is no secret, and is in many words by chance


def bytes_in(value: object) -> object:
    """Return the bytes that a size names ('200GB', '1.5TiB'); what is no text is returned as it is.

    Raises:
        ValueError: the text is no size, or has no unit where it needs one.
    """
    if not isinstance(value, str):
        return value
    number = value.strip().upper().removesuffix("B")
    unit = number.lstrip("0123456789. ")
    try:
        size = float(number.removesuffix(unit)) * _BYTES[unit.strip()]
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a size: write bytes, or a number with KB, MB, GB, TB, KiB, … TiB") from None
    if number == value.strip() and 0 < size < _BYTES["MI"]:  # who writes 2 means gigabytes
        raise ValueError(f"{value!r} is {size:,g} bytes, less than any model: write a unit, such as {number}GB")
    return int(size)


def is_web_address(url: str) -> bool:
    """Return whether it is an HTTP URL with a host. Parsers' errors repeat parts of the URL, which may be secret."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and " " not in url
    except ValueError:
        return False


def without_secrets(url: str) -> str:
    """Return a URL without its user, password, query and fragment: these can be secrets."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "") + parts.path


def without_secrets_of(url: str, text: str) -> str:
    """Return a text with "***" for each part of a URL that can be a secret: a server's error may repeat the request."""
    for secret in sorted(_secrets_in(url), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets_in(url: str) -> set[str]:
    """User, password and values of the query, as written and decoded, and the two as basic authentication has them."""
    parts = urlsplit(url)
    user, password = parts.username or "", parts.password or ""
    written = [user, password, *(pair.partition("=")[2] or pair for pair in parts.query.split("&"))]
    basic = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return {each for each in [*written, *map(unquote, written), basic] if len(each) >= _SHORT_SECRET}


_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
_PERIODS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def clean(text: str) -> str:
    """Return the text without characters that steer a terminal; line ends stay."""
    return "".join(character if character.isprintable() or character == "\n" else _UNPRINTABLE for character in text)


def one_line(text: str) -> str:
    """Return the text on one line, without characters that steer a terminal or begin another line of a log."""
    return clean(" ".join(text.split()))


FEW = 3  # names that a sentence lists; the others it counts


def listed(names: Sequence[str], most: int = FEW) -> str:
    """The first few of some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def capitalized(clause: str) -> str:
    return clause[:1].upper() + clause[1:]


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


# pydantic's words, by which settings, flags and the engines file are read, for what people wrote.
_PLAINER = tuple(
    (re.compile(told), plain)
    for told, plain in (
        (r"Input should be a valid integer\b.*", "it is not a whole number"),
        (r"Input should be a valid number\b.*", "it is not a number"),
        (r"Input should be a valid boolean\b.*", "it is neither true nor false"),
        (r"Input should be a (?:valid dictionary|dictionary or an instance of .+)", "it has to be a JSON object"),
        (r"Input should be greater than or equal to (.+)", r"it has to be \1 or more"),
        (r"Input should be less than or equal to (.+)", r"it has to be \1 or less"),
        (r"Input should be greater than (.+)", r"it has to be more than \1"),
        (r"Input should be less than (.+)", r"it has to be less than \1"),
        (r"Input should be (.+)", r"it has to be \1"),
    )
)


def plain_refusal(message: str) -> str:
    """Why a value is refused, in plain words, without the prefix of the library that found it."""
    told = message.removeprefix("Value error, ")
    for pattern, plain in _PLAINER:
        if (found := pattern.fullmatch(told)) is not None:
            return found.expand(plain)
    return told


def canary_check_url(url: str) -> str:
    """Return a URL that canaries are judged by. A ValueError says that it is none."""
    if is_web_address(url):
        return url
    encoded = "in a user or password write / as %2F, ? as %3F, # as %23 and @ as %40"
    raise ValueError(f"canary_check must be an http:// or https:// URL with a host; {encoded}")


def host_patterns(names: list[str]) -> list[str]:
    """Return names and patterns of hosts, such as `*.example`. A ValueError names one that is none."""
    for name in names:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):
            advice = "write names (refitd.example) or *.example, without a port"
            raise ValueError(f"{name!r} is no name of a host: {advice}")
    return names


def advertised_url(url: str) -> str:
    """Return a service's own URL, without a slash at its end. A ValueError says that it is none."""
    if is_web_address(url):
        return url.rstrip("/")
    raise ValueError("advertise must be an http:// or https:// URL with a host, such as http://hub-1:8700")
