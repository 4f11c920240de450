"""Work that takes a while, beside the server's loop. It does not keep the server from ending: who waits for it then is
answered at once, and the threads end with the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

T = TypeVar("T")
ENDING = 503
CLOSE = {"Connection": "close"}
_awaited: set[asyncio.Future[Any]] = set()


async def wait_for(future: asyncio.Future[T]) -> T:
    """What comes of it; HTTPException: the server ends before."""
    _awaited.add(future)
    try:
        return await future
    except asyncio.CancelledError:
        if future.cancelled() and future not in _awaited:
            raise HTTPException(ENDING, headers=CLOSE) from None
        future.cancel()
        raise
    finally:
        _awaited.discard(future)


def leave() -> None:
    """The server is about to end. For the server's own thread."""
    while _awaited:
        _awaited.pop().cancel()


async def beside(work: Callable[[], T]) -> T:
    """What `work` returns or raises, while others are served. Who is no longer waited for still ends by itself."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if answer.done():  # whoever asked has gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failed = None, None
        try:
            value = work()
        except BaseException as error:
            failed = error
        try:
            loop.call_soon_threadsafe(tell, value, failed)
        except RuntimeError:  # the server has ended meanwhile
            return

    threading.Thread(target=run, name="tightfit-page", daemon=True).start()
    return await wait_for(answer)
