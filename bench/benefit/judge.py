"""An endpoint of rewards that takes its time, as tests in a sandbox do. A pod runs it, with nothing but aiohttp.

    python judge.py PORT

How long it waits follows from the response: half of them 0.45 s or less, one of a hundred 5 s. What a response is worth
does too, and teaches nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys

from aiohttp import web

SHORTEST_S, LONGEST_S = 0.3, 5.0


def verdict(response: str) -> tuple[float, float]:
    """Return the reward of a response, 0 or 1, and the seconds until it is known."""
    found = hashlib.blake2b(response.strip().encode(), digest_size=8).digest()
    chance = int.from_bytes(found[1:], "big") / 2**56
    return float(found[0] % 2), min(LONGEST_S, SHORTEST_S * (1 - chance) ** -0.6)


def application() -> web.Application:
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/", _judge)])
    return app


async def _judge(request: web.Request) -> web.Response:
    reward, wait_s = verdict((await request.json())["response"])
    await asyncio.sleep(wait_s)
    return web.json_response({"reward": reward})


if __name__ == "__main__":
    web.run_app(application(), port=int(sys.argv[1]), print=None)  # at the pod's address
