"""Structured logs: for people on a terminal, one JSON object a line for programs. They go to stderr."""

import logging
import os
import sys

import structlog


def configure_logs(how: str) -> None:
    """Set up structlog. `how` is "console", "json", or "auto": console where stderr is a terminal."""
    terminal = sys.stderr.isatty()
    console = how == "console" or (how == "auto" and terminal)
    renderer = (
        structlog.dev.ConsoleRenderer(colors=terminal and not os.environ.get("NO_COLOR"))
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
