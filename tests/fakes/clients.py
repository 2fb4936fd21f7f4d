"""Clients of the gateway, as people set them up."""

from __future__ import annotations

import httpx
import openai


def openai_client(port: int) -> openai.AsyncOpenAI:
    """On the loopback of the rollout pod. Does not try again by itself, so that a test sees what was said."""
    http = httpx.AsyncClient(trust_env=False, timeout=60)
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http)
