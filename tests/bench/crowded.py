"""crowded.py FOLDER: the real API and dashboard over a store of 1,000 versions and 200 engines, until SIGTERM."""

import asyncio
import gc
import sys
from pathlib import Path

from crowd import crowd

from refitd.api.server import Server, listening
from refitd.app import SWITCH_SECONDS
from refitd.observe.logs import configure_logs


async def main(folder: Path) -> None:
    """Serve."""
    configure_logs("json")
    sys.setswitchinterval(SWITCH_SECONDS)  # as the service does
    with listening("127.0.0.1", 0) as sockets:
        async with crowd(folder) as (api, _):
            gc.freeze()
            await Server(api, "127.0.0.1", 0).serve(sockets)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
