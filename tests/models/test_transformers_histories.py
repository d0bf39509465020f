"""Whatever happened to a context, its next logits are those of a computation without memory (float64, tiny models).

Through the pocket decoder, whose truth is the textbook decoder, and through the library's own Llama and Qwen modules,
whose truth is the same modules over the whole text at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor, nn

from duplexd.models.pocket.checkpoint import load_checkpoint
from duplexd.models.pocket.decoder import Decoder, attention_of
from duplexd.models.pocket.linear import Precision
from duplexd.models.transformers_decoder import TransformersDecoder
from duplexd.streams.attention import Rotary, RotatedAttention, Row
from tests.models.histories import Histories, causal, dense_attention
from tests.pocket.thinker_fakes import Tiny, config_of, random_weights, reference_logits, write_folder

CONTEXT = 64
SMALL = {"width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 48, "vocabulary": 64}
CPU = torch.device("cpu")
STEPS = settings(max_examples=20, stateful_step_count=24, deadline=None, database=None)


def pocket(tiny: Tiny, attention: str) -> Decoder:
    with TemporaryDirectory() as folder:
        weights = load_checkpoint(write_folder(Path(folder) / "m", tiny, random_weights(tiny)))
        chosen = attention_of(weights.shape, attention, context_max=CONTEXT, precision=Precision.FLOAT64, device=CPU)
        return Decoder(weights, chosen, precision=Precision.FLOAT64, device=CPU)


@cache
def library_model(tiny: Tiny) -> Any:
    """A causal model of the library with the weights of the textbook decoder."""
    import transformers

    config = transformers.AutoConfig.for_model(**config_of(tiny))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.load_state_dict(random_weights(tiny))
    return model.eval()


class Still(nn.Module):
    """No rotation: the attention function beside it rotates."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(x[..., :1]), torch.zeros_like(x[..., :1])


def by_definition(tiny: Tiny, rotary: Rotary) -> Callable[[list[int], Tensor], Tensor]:
    """The library's modules over a whole history at once, with attention by definition in place of its own."""
    import transformers

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, seen: Tensor, **_: Any) -> Any:
        assert mask is None
        return dense_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), seen, rotary)[None], None

    model = copy.deepcopy(library_model(tiny))
    name = f"by definition {tiny.architecture}"
    transformers.AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)
    model.model.rotary_emb = Still()
    pristine = library_model(tiny)

    def from_scratch(tokens: list[int], seen: Tensor) -> Tensor:
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids, use_cache=False, seen=seen).logits[0]
        if torch.equal(seen, causal(len(tokens))):
            torch.testing.assert_close(logits, pristine(ids, use_cache=False).logits[0], rtol=0, atol=1e-10)
        return logits

    return from_scratch


def pocket_histories(tiny: Tiny, attention: str) -> type[Histories]:
    weights = random_weights(tiny)

    class PocketHistories(Histories):
        decoder = pocket(tiny, attention)
        logits = decoder.head.logits
        vocabulary = tiny.vocabulary

        @staticmethod
        def from_scratch(tokens: list[int], seen: Tensor) -> Tensor:
            return reference_logits(tiny, weights, tokens, seen=seen)

    return PocketHistories


def library_histories(tiny: Tiny, attention: str) -> type[Histories]:
    made = TransformersDecoder(copy.deepcopy(library_model(tiny)), context_max=CONTEXT, attention=attention)

    class LibraryHistories(Histories):
        decoder = made
        logits = made.logits
        vocabulary = tiny.vocabulary
        from_scratch = staticmethod(by_definition(tiny, made.attention.rotary))

    return LibraryHistories


@pytest.mark.parametrize("attention", ["plain", "rotated"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("family", [pocket_histories, library_histories], ids=["pocket", "transformers"])
def test_any_history_ends_in_the_logits_of_a_fresh_computation(
    family: Callable[[Tiny, str], type[Histories]], architecture: str, attention: str
) -> None:
    """Two sessions talk, are cut, slide, fork and share a prompt; freed slots are NaN, and nobody ever reads one."""
    run_state_machine_as_test(family(Tiny(architecture=architecture, **SMALL), attention), settings=STEPS)


# Negative controls: what must fail, fails -----------------------------------------------------------------------------


def store_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go to the arena as they were turned when they were new, and are read as they lie."""

    def fill(self: RotatedAttention, row: Row, keys: Tensor, values: Tensor) -> None:
        self.keys[row.place, :, :, : row.past] = keys.transpose(1, 2)
        self.values[row.place, :, :, : row.past] = values.transpose(1, 2)

    def appended(self: RotatedAttention, row: Row) -> tuple[Tensor, Tensor]:
        new = slice(row.past, row.end)
        return self.keys[row.place, :, :, new].transpose(1, 2), self.values[row.place, :, :, new].transpose(1, 2)

    monkeypatch.setattr(RotatedAttention, "_fill", fill)
    monkeypatch.setattr(RotatedAttention, "_appended", appended)


def read_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    recall = RotatedAttention.recall

    def rolled(self: RotatedAttention, row: Row) -> None:
        slots = np.roll(np.frombuffer(row.slots, dtype="<i8")[: row.past], 1).tobytes()
        recall(self, Row(slots, row.past, row.count, row.place))

    monkeypatch.setattr(RotatedAttention, "recall", rolled)


@pytest.mark.parametrize("family", [pocket_histories, library_histories], ids=["pocket", "transformers"])
@pytest.mark.parametrize("damage", [store_rotated, read_in_another_order])
def test_a_damaged_memory_is_found_out(
    family: Callable[[Tiny, str], type[Histories]],
    damage: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        run_state_machine_as_test(family(Tiny(**SMALL), "rotated"), settings=settings(STEPS, phases=[Phase.generate]))


@pytest.mark.parametrize("family", [pocket_histories, library_histories], ids=["pocket", "transformers"])
def test_keys_stored_rotated_are_right_until_something_slides(
    family: Callable[[Tiny, str], type[Histories]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is the slide that makes them wrong, and nothing else in these histories."""
    store_rotated(monkeypatch)
    without_slides = type("WithoutSlides", (family(Tiny(**SMALL), "rotated"),), {"slide": None})
    run_state_machine_as_test(without_slides, settings=STEPS)
