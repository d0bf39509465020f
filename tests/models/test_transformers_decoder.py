"""The library's decoders over our keys: as itself, alone as together, and wrong when the keys are wrong."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duplexd.errors import ModelError
from duplexd.models.transformers_decoder import TransformersDecoder, load_decoder
from duplexd.streams.attention import PAGES, Row
from tests.models.histories import Memory, append
from tests.models.test_transformers_histories import CONTEXT, SMALL, library_model, pocket
from tests.pocket.thinker_fakes import Tiny, config_of, random_weights

TEXT = (5, 17, 30, 2, 44, 51, 8, 20, 63, 9, 11)
OTHER = (61, 9, 25, 33)
PAST = len(TEXT) - 1


def decoder_of(family: str, attention: str = "rotated", **more: Any) -> Any:
    tiny = Tiny(**(SMALL | more))
    if family == "pocket":
        return pocket(tiny, attention)
    return TransformersDecoder(copy.deepcopy(library_model(tiny)), context_max=CONTEXT, attention=attention)


def row(slots: Any, *, past: int, count: int, place: int = 0) -> Row:
    return Row(np.array(list(slots), dtype="<i8").tobytes(), past, count, place)


def scattered(count: int, seed: int = 4) -> list[int]:
    return [int(slot) for slot in np.random.default_rng(seed).permutation(80)[:count]]


@torch.inference_mode()
def after(decoder: Any, slots: Any, tokens: Any, *, past: int = 0) -> Tensor:
    """Hidden state of the last token."""
    (state,) = append(decoder, [row(slots, past=past, count=len(tokens))], [tokens], first=CONTEXT)
    return state


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_folder_is_read_and_says_what_the_library_says(architecture: str, tmp_path: Path) -> None:
    tiny = Tiny(architecture=architecture, **SMALL)
    library_model(tiny).save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, context_max=CONTEXT, dtype=torch.float64)
    Memory(decoder.attention)
    with torch.inference_mode():
        expected = library_model(tiny)(torch.tensor([TEXT]), use_cache=False).logits[0, -1]
        actual = decoder.logits(after(decoder, scattered(len(TEXT)), TEXT)[None])[0]

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_scaled_positions_are_the_librarys_own(scaling: str) -> None:
    import transformers

    tiny = Tiny(**SMALL)
    rope = {"rope_type": scaling, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    config = transformers.AutoConfig.for_model(**config_of(tiny), rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.load_state_dict(random_weights(tiny))
    with torch.inference_mode():
        expected = model.model(torch.tensor([TEXT * 3]), use_cache=False).last_hidden_state[0, -1]
    decoder = TransformersDecoder(model, context_max=CONTEXT)
    Memory(decoder.attention)

    torch.testing.assert_close(after(decoder, range(33), TEXT * 3), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["plain", "rotated"])
@pytest.mark.parametrize("family", ["pocket", "transformers"])
@torch.inference_mode()
def test_a_prefill_and_a_reply_packed_in_one_row_are_each_alone(family: str, attention: str) -> None:
    """One session decodes, another appends a sentence: the numbers of one after the other, in states and in keys."""
    decoder = decoder_of(family, attention)
    memory = Memory(decoder.attention)
    reply, words = row(scattered(PAST + 1), past=PAST, count=1), row(range(90, 94), past=0, count=4, place=1)
    after(decoder, scattered(PAST), TEXT[:-1])
    alone = append(decoder, [reply], [TEXT[-1:]], first=9) + append(decoder, [words], [OTHER], first=9)
    keys = memory.arena.field(PAGES, "k").clone()
    memory.arena.fill_nan(PAGES, [*range(90, 94), scattered(PAST + 1)[-1]])
    packed = append(decoder, [reply, words], [TEXT[-1:], OTHER], first=9)

    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(memory.arena.field(PAGES, "k"), keys, rtol=0, atol=1e-12, equal_nan=True)


def slid_and_fresh(decoder: Any, *, post_rope: bool) -> tuple[Tensor, Tensor]:
    """Two tokens stay, three slide out, one is added; beside it, a fresh computation of the same tokens.

    With `post_rope`, keys are what they would be had they been stored rotated for the place they stood at.
    """
    memory = Memory(decoder.attention)
    slots = scattered(len(TEXT))
    after(decoder, slots[:PAST], TEXT[:-1])
    if post_rope:
        rotary, keys = decoder.attention.rotary, memory.arena.field(PAGES, "k")
        moved = slots[5:PAST]
        keys[:, moved] = rotary.turn(keys[:, moved], rotary.table[3][None, None])
    slid = after(decoder, [*slots[:2], *slots[5:]], TEXT[-1:], past=PAST - 3)
    return slid, after(decoder, range(84, 92), (*TEXT[:2], *TEXT[5:]))


@pytest.mark.parametrize("family", ["pocket", "transformers"])
def test_keys_stored_after_rotation_would_be_wrong_after_a_slide(family: str) -> None:
    """One layer, so that what stayed is all there is to know: stored raw it is exact, stored rotated it is not."""
    decoder = decoder_of(family, layers=1)
    raw, fresh = slid_and_fresh(decoder, post_rope=False)
    torch.testing.assert_close(raw, fresh, rtol=0, atol=1e-10)

    rotated, fresh = slid_and_fresh(decoder, post_rope=True)
    assert (rotated - fresh).abs().max() > 1e-3


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma"}, "is a gemma; allowed are llama, qwen2, qwen3"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has sliding layers"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "scales positions by 'dynamic'",
        ),
        ({"max_position_embeddings": 32}, "was trained for 32 tokens, not 64"),
    ],
    ids=["architecture", "sliding", "dynamic", "long"],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], sentence: str) -> None:
    model = copy.deepcopy(library_model(Tiny(architecture="qwen2", **SMALL)))
    for name, value in changes.items():
        object.__setattr__(model.config, name, value)
    with pytest.raises(ModelError, match=sentence):
        TransformersDecoder(model, context_max=CONTEXT)


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"needs transformers 5\.24 .*pip install 'duplexd\[dev\]'"):
        load_decoder(Path("nowhere"), context_max=8, dtype=torch.float32)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"transformers cannot read {tmp_path}"):
        load_decoder(tmp_path, context_max=8, dtype=torch.float32)
