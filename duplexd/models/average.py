"""A long-term memory of fixed size: a moving average over what left a window or a context (MemRoPE).

1. Keys are averaged as they are stored, before RoPE: averages of rotated keys would mix positions and mean nothing.
2. The newest of the folded chunks weighs most, and a chunk cut short weighs as much as a whole one.
3. The engine folds contexts (`fold_tokens`). `MovingAverage` is for whoever drives `Histories` itself: no face of the
   engine compresses, and a `FacePlan` that would is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from duplexd.memory.arena import Arena
from duplexd.memory.histories import Fold


class MovingAverage:
    """Folds chunks into a long-term slot in place: `memory = keep * memory + (1 - keep) * chunk`, for each of them.

    Args:    fields: of the history's partition, each (layers, tokens, ...) in a slot.
             tokens: of the long-term slot; a chunk's tokens are averaged in as many groups.
             keep: 0..1, the share of the older memory at every chunk.
    """

    def __init__(self, fields: Sequence[str], *, tokens: int, keep: float) -> None:
        self._fields = tuple(fields)
        self._tokens = tokens
        self._keep = keep

    def fold(self, order: Fold, arena: Arena) -> None:
        for field in self._fields:
            memory = arena.view(order.target, field)[:, : self._tokens]
            for index, (source, tokens) in enumerate(zip(order.sources, order.tokens, strict=True)):
                chunk = group_means(arena.view(source, field)[:, :tokens], self._tokens)
                # The first chunk of all is the memory: what the slot held before belongs to nobody.
                memory.copy_(chunk if order.first and index == 0 else self._keep * memory + (1 - self._keep) * chunk)


def fold_tokens(
    fields: Sequence[torch.Tensor], sources: torch.Tensor, target: torch.Tensor, *, first: bool, keep: float
) -> None:
    """Fold tokens of a context into its long-term tokens, in place, as `MovingAverage` folds a chunk.

    Args:    fields: keys before rotation, and values, (layers, token slots, ...) each.
             sources, target: token slots, int64; the target may be among the sources when there is no memory yet.
    """
    for field in fields:
        wide = torch.promote_types(field.dtype, torch.float32)
        chunk = group_means(field[:, sources].to(wide), len(target))
        memory = chunk if first else keep * field[:, target].to(wide) + (1 - keep) * chunk
        field[:, target] = memory.to(field.dtype)


def group_means(tokens: torch.Tensor, groups: int) -> torch.Tensor:
    """(layers, tokens, ...) -> (layers, groups, ...): means over neighbouring tokens; fewer tokens are repeated."""
    last = tokens.movedim(1, -1)
    pooled = torch.nn.functional.adaptive_avg_pool1d(last.reshape(1, -1, last.shape[-1]), groups)
    return pooled.reshape(*last.shape[:-1], groups).movedim(-1, 1)
