"""What the server of forked processes does once, so that none of them does it: see `forked.py`.

Routes are checked by types that FastAPI makes at the first request, in a sixth of a second. The garbage collector would
look through the million objects of torch in each process again, and by that copy the memory that all of them share.
"""

import asyncio
import gc

import httpx

from refitd.api.api import routes


async def _asked_once() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=routes()), base_url="http://127.0.0.1") as http:
        await http.get("/no/such/page")


asyncio.run(_asked_once())
gc.collect()
gc.freeze()
