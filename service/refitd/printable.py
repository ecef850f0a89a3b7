"""Text from others (trainers, engines, files, URLs) as terminals and logs may show it. Pure."""

from urllib.parse import urlsplit

_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def clean(text: str) -> str:
    """Return the text without characters that steer a terminal; line ends stay."""
    return "".join(character if character.isprintable() or character == "\n" else _UNPRINTABLE for character in text)


def one_line(text: str) -> str:
    """Return the text on one line, without characters that steer a terminal or begin another line of a log."""
    return clean(" ".join(text.split()))


def without_secrets(url: str) -> str:
    """Return a URL without its user, password, query and fragment: these can be secrets."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "") + parts.path
