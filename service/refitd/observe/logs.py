"""Structured logs on stderr: for people on a terminal, one JSON object a line for programs.

With JSON, the messages of libraries and the line on stdout that says that the service is ready are JSON as well, since
both streams often end in one file.
"""

import logging
import os
import sys

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from refitd.text import clean, one_line


def configure_logs(how: str) -> None:
    """Set up structlog. `how` is "console", "json", or "auto": console where stderr is a terminal."""
    terminal = sys.stderr.isatty()
    console = how == "console" or (how == "auto" and terminal)
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=terminal and not os.environ.get("NO_COLOR"))
        if console
        else structlog.processors.JSONRenderer()
    )
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        *([_printable] if console else []),  # JSON escapes what has to be escaped by itself
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line and its end in one write
    )
    handler = logging.StreamHandler(sys.stderr)
    finish = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=finish, foreign_pre_chain=shared))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _printable(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Clean values, which quote files and other programs: none may steer the terminal or look like another line."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = clean(value) if name == "exception" else one_line(value)
    return event


def announce(event: str) -> None:
    """Print the line on stdout that the starter of the service waits for, as a line of the log."""
    structlog.wrap_logger(structlog.WriteLogger(sys.stdout)).info(event)
