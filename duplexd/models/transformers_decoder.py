"""Decoders of the transformers library, modules unmodified, keys in the arena (DESIGN §10).

1. The library has the layers; duplexd has the keys. The model's rotary module is put aside, so keys come out of its
   layers unrotated; its own angles become the rotary table, so the result is the library's to the last rounding.
2. Our attention function has no mask function beside it: the library then builds no mask, and attention knows rows.
3. New tokens of all rows are one batch row, with explicit positions. Nothing is padded.
4. The cache handed to the model keeps nothing: it passes keys and values on to the rows (streams/attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duplexd.errors import ModelError
from duplexd.streams.attention import Attention, AttentionShape, Packed, Row, SplitHalves, choose_attention

ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: Angles of these depend on the length of the context, so a table by position would be wrong.
ROPE_BY_LENGTH = ("dynamic", "longrope")
VERSION = "5.24"
_NAME = "duplexd"


class TransformersDecoder:
    """A causal language model of the library as the inside of a stage: tokens of several rows in, hidden states out.

    Args:    model: LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM; it is taken over, and computes nothing
             without this decoder afterwards. attention: an implementation by name (`choose_attention`).
    Raises:  ModelError for another architecture, sliding layers, positions scaled by length, a context beyond the
             training, or a library of another version.
    """

    def __init__(self, model: Any, *, context_max: int, attention: str = "auto") -> None:
        library = _library()
        _check(model.config, context_max)
        self.model = model.eval()
        self.context_max = context_max
        self.device: torch.device = model.device
        self.attention = _attention_of(model, attention, context_max)
        library.AttentionInterface.register(_NAME, _attend)
        model.set_attn_implementation(_NAME)
        model.model.rotary_emb = _Unrotated(self.attention.shape.head_dim)

    def forward(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], *, states: bool) -> Tensor | None:
        """Append tokens to rows.

        Args:    tokens: `count` of each row, at least one. states: False when no row needs its hidden state (prefill).
        Returns: normed hidden state of each row's last token, (rows, width), or None without `states`.
        """
        batch = self.attention.pack(rows)
        packed = torch.tensor([[token for part in tokens for token in part]], device=self.device)
        found = self.model.model(
            input_ids=packed, position_ids=batch.positions[None], cache=_Rows(batch), use_cache=True, rows=batch
        )
        ends = [end - 1 for end in accumulate(row.count for row in rows)]
        return found.last_hidden_state[0, ends] if states else None

    def logits(self, states: Tensor) -> Tensor:
        """(rows, width) -> (rows, vocabulary)."""
        logits: Tensor = self.model.lm_head(states)
        return logits


def load_decoder(
    path: Path, *, context_max: int, dtype: torch.dtype, device: str = "cpu", attention: str = "auto"
) -> TransformersDecoder:
    """The decoder of a Hugging Face folder; nothing is fetched.

    Raises:  ModelError as `TransformersDecoder`, and when the library is missing or cannot read the folder.
    """
    library = _library()
    try:
        model = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"transformers cannot read {path}: {error}") from error
    return TransformersDecoder(model.to(device), context_max=context_max, attention=attention)


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"this model family needs transformers {VERSION} ({error}); install it with: pip install 'duplexd[dev]'"
        ) from error
    if not transformers.__version__.startswith(f"{VERSION}."):
        raise ModelError(f"transformers {transformers.__version__} is installed; duplexd was checked with {VERSION}")
    return transformers


def _check(config: Any, context_max: int) -> None:
    rope = config.rope_parameters["rope_type"]
    trained = config.max_position_embeddings
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    rules = [
        (config.model_type not in ARCHITECTURES, f"is a {config.model_type}; allowed are {', '.join(ARCHITECTURES)}"),
        (sliding, "has sliding layers; here contexts slide, layers do not"),
        (rope in ROPE_BY_LENGTH, f"scales positions by {rope!r}, which depends on the length of the context"),
        (context_max > trained, f"was trained for {trained} tokens, not {context_max}"),
    ]
    for broken, sentence in rules:
        if broken:
            raise ModelError(f"the model of transformers {sentence}")


def _attention_of(model: Any, asked: str, context_max: int) -> Attention:
    config, first = model.config, model.model.layers[0].self_attn
    shape = AttentionShape(
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, first.head_dim, context_max
    )
    exact = model.dtype == torch.float64
    positions = torch.arange(context_max, device=model.device)[None]
    with torch.inference_mode():
        like = torch.empty(0, dtype=torch.float64 if exact else torch.float32, device=model.device)
        cos, sin = (x[0, :, : shape.head_dim // 2].clone() for x in model.model.rotary_emb(like, positions))
    return choose_attention(asked, shape, SplitHalves(torch.complex(cos, sin)), stored=model.dtype, device=model.device)


class _Unrotated(nn.Module):
    """In the place of a model's rotary module: a turn by nothing."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_ones(1, 1, self.head_dim), x.new_zeros(1, 1, self.head_dim)


class _Rows:
    """What a model takes for its cache during one forward."""

    def __init__(self, batch: Packed) -> None:
        self._batch = batch

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: Any) -> tuple[Tensor, Tensor]:
        """(1, kv_heads, tokens, head_dim) each; what is returned goes to `_attend`, which does not need it."""
        self._batch.remember(layer, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """Asked for when positions are not given; they always are."""
        raise NotImplementedError("a packed row has no single length; pass position_ids")


def _attend(
    module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, rows: Packed, **_: Any
) -> tuple[Tensor, None]:
    """The registered attention function: queries (1, heads, tokens, head_dim) -> (1, tokens, heads * head_dim)."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    return rows.attend(layer, queries[0].transpose(0, 1))[None].to(queries.dtype), None
