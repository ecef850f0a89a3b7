"""`python hasty.py PYTHON -m MODULE ARGUMENTS…`: run refitd, which asks places for engines far more often than it does.

All else is as it is. An engine that no place names is let go of after a minute, and a test need not last one.
"""

import runpy
import sys

from refitd.discovery import scout

ASK_EVERY_SECONDS = 0.2
GONE_SECONDS = 1.0


def main() -> None:
    """Shorten the times, and become the module."""
    scout.ASK_EVERY_SECONDS = ASK_EVERY_SECONDS
    scout.GONE_SECONDS = GONE_SECONDS
    module, sys.argv = sys.argv[3], sys.argv[3:]
    sys.path.pop(0)  # the folder of this script, in which nothing is meant to be imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
