"""Many cases of one question, asked in one test: every case that fails is named in one message.

    @table("log", LOGS, ids=lambda log: log.stem)
    def test_a_healthy_log_is_healthy(log: Path) -> None: ...

For hundreds of small cases, each of which as a test of its own would cost more in pytest than in what it asks. Fixtures
are made once for all of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def table(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Callable[[Any], object] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but one test; `ids`: what a case that fails is called."""
    listed, every = (names,) if isinstance(names, str) else names, list(cases)
    assert every, "a table without cases asks nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def ask_each(**fixtures: Any) -> None:
            failed = []
            for case in every:
                try:
                    test(**dict(zip(listed, (case,) if isinstance(names, str) else case, strict=True)), **fixtures)
                except Exception as error:
                    failed.append(f"{ids(case)}: {type(error).__name__}: {error}")
            assert not failed, f"{len(failed)} of {len(every)} cases:\n\n" + "\n\n".join(failed)

        signature = inspect.signature(test)
        rest = [each for name, each in signature.parameters.items() if name not in listed]
        ask_each.__signature__ = signature.replace(parameters=rest)
        return ask_each

    return decorate
