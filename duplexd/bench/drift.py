"""What many slides do to attention: keys stored before rotation, beside rotated keys that are turned again.

A window of keys slides by one token, again and again. Stored before rotation, a key is rounded once, when it is stored.
Stored rotated, it is turned back by one position at every slide and rounded each time (so do engines that renumber the
positions of an ordinary cache). Both are compared with the same window in float64.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from duplexd.streams.attention import SplitHalves, rotary_table

HEADS, HEAD_DIM, BASE = 4, 64, 10_000.0


class Drift(msgspec.Struct, frozen=True):
    """Relative error of the output of attention after the last slide."""

    pre_rope: float
    post_rope: float


def measure_drift(*, slides: int, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Drift:
    """Slide a window of random keys and attend once at its end.

    Args:    tokens: length of the window; a key is turned again at most that often. dtype: keys and values are stored
             in it; rotation and attention are computed in float32.
    Returns: |output - exact| / |exact|, over all heads. Cost: O(slides * tokens); 1000 of 1024 take two seconds.
    """
    frequency = BASE ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    table = rotary_table(frequency, positions=tokens, dtype=torch.float64, device=torch.device("cpu"))
    exact, rounded = SplitHalves(table), SplitHalves(table.to(torch.complex64))
    rng = torch.Generator().manual_seed(seed)
    # Every key there will ever be; the window is a slice of them.
    keys, values = torch.randn(2, slides + tokens, HEADS, HEAD_DIM, generator=rng, dtype=torch.float64).to(dtype)
    query = torch.randn(1, HEADS, HEAD_DIM, generator=rng, dtype=torch.float64)
    turned = _slid(rounded, keys, slides=slides, tokens=tokens)
    window = slice(slides, slides + tokens)
    # The exact window has the stored numbers, so that what is measured is what storing rotated keys adds.
    truth = _attend(exact.turn(query, table[-1:, None]), exact.turn(keys[window], table[:, None]), values[window])
    asked = rounded.turn(query, rounded.table[-1:, None])
    pre = _attend(asked, rounded.turn(keys[window], rounded.table[:, None]).to(dtype), values[window])
    post = _attend(asked, turned, values[window])
    return Drift(pre_rope=_error(pre, truth), post_rope=_error(post, truth))


def _slid(rotary: SplitHalves, keys: Tensor, *, slides: int, tokens: int) -> Tensor:
    """The window's keys as an engine that stores them rotated has them after the last slide."""
    back = rotary.table[1:2, None].conj()
    window = rotary.turn(keys[:tokens], rotary.table[:, None]).to(keys.dtype)
    for slide in range(slides):
        newest = rotary.turn(keys[tokens + slide, None], rotary.table[-1:, None])
        window = torch.cat([rotary.turn(window[1:], back), newest]).to(keys.dtype)
    return window


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = (x.to(query.dtype).transpose(0, 1) for x in (query, keys, values))
    return F.scaled_dot_product_attention(q, k, v)


def _error(actual: Tensor, truth: Tensor) -> float:
    return float((actual.double() - truth).norm() / truth.norm())
