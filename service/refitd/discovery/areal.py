"""Reading AReaL's name-resolve record (its `nfs` kind: a tree of files) for the servers of a trial.

{record root}/{user}/{experiment}/{trial}/gen_servers/{any}/ENTRY     holds `host:port`
"""

import os
from functools import partial
from pathlib import Path

from refitd.discovery.memory import MOST, Answer, Named, Silent
from refitd.discovery.place import Areal
from refitd.engine.address import AddressRefusedError, check_url
from refitd.root.threads import LOOK_SECONDS, RootHangsError, RootThreads
from refitd_client.files.plain_file import open_plain

SERVERS = "gen_servers"
ENTRY = "ENTRY"
_MOST_BYTES = 1024


async def ask_areal(place: Areal, threads: RootThreads) -> Answer:
    """The servers that have registered. Launchers take their entries out when they end."""
    try:
        return await threads.run(f"reading {place.trial}", partial(_read, place), within=LOOK_SECONDS)
    except RootHangsError as error:
        return Silent(str(place.trial), str(error))


def _read(place: Areal) -> Answer:
    folder = place.trial / SERVERS
    urls: set[str] = set()
    try:
        for name in sorted(os.listdir(folder))[: MOST + 1]:
            try:
                urls.add(check_url(f"http://{_text(folder / name / ENTRY)}"))
            except (FileNotFoundError, NotADirectoryError):
                continue  # taken out just now, or being written: it is renamed into place
    except (OSError, UnicodeDecodeError, AddressRefusedError) as error:
        return Silent(str(folder), str(error))
    return Named(str(folder), frozenset(urls))


def _text(path: Path) -> str:
    fd = open_plain(path, follow=True)
    try:
        return os.read(fd, _MOST_BYTES).decode().strip()
    finally:
        os.close(fd)
