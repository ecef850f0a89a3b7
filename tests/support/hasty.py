"""What the process of a refitd does first that is to ask places for engines far more often than it does.

All else is as it is. An engine that no place names is let go of after a minute, and a test need not last one.
"""

from refitd_hosts.discovery import scout


def ask_often() -> None:
    """Shorten the times."""
    scout.ASK_EVERY_SECONDS = 0.2
    scout.GONE_SECONDS = 1.0
