"""What is sent to the page, read no further than it may be long, and no longer than it may take."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from tightfit.web.threads import CLOSE, wait_for

TOO_LONG, TOO_SLOW, GONE, NO_LENGTH = 413, 408, 400, 400


async def body_of(request: Request, most_bytes: int, patience_s: float) -> bytes:
    """The body; HTTPException as soon as it is known to be too long, or when it takes too long."""
    said = request.headers.get("content-length", "0")
    if not said.isdecimal():
        raise HTTPException(NO_LENGTH, headers=CLOSE)
    if len(said) > 15 or int(said) > most_bytes:
        raise HTTPException(TOO_LONG, headers=CLOSE)
    try:
        reading = asyncio.ensure_future(_read(request, most_bytes))
        return await asyncio.wait_for(wait_for(reading), patience_s)
    except (TimeoutError, asyncio.TimeoutError):
        raise HTTPException(TOO_SLOW, headers=CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(GONE, headers=CLOSE) from None


async def _read(request: Request, most_bytes: int) -> bytes:
    parts, size = [], 0
    async for some in request.stream():
        size += len(some)
        if size > most_bytes:
            raise HTTPException(TOO_LONG, headers=CLOSE)
        parts.append(some)
    return b"".join(parts)
