"""What the rig holds open: all of it, or nothing."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self


class Scoped:
    """A context manager whose `_open` puts what it opens on a stack; if `_open` fails half way, that half is undone."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            self._open(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def _open(self, cleanup: contextlib.ExitStack) -> None:
        raise NotImplementedError


class AsyncScoped:
    """The same for what opens with `await`."""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as cleanup:
            await self._open(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    async def _open(self, cleanup: contextlib.AsyncExitStack) -> None:
        raise NotImplementedError
