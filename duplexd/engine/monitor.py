"""Counters and gauges of the engine: what metrics, benches and policies read. Nothing here decides anything."""

from __future__ import annotations

from collections import Counter


class Monitor:
    """Monotonic counters by name. Names are nouns; the unit stands last where there is one."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, name: str, by: int = 1) -> None:
        self._counts[name] += by

    def values(self) -> dict[str, float]:
        return {name: float(self._counts[name]) for name in sorted(self._counts)}

    def __getitem__(self, name: str) -> int:
        return self._counts[name]
