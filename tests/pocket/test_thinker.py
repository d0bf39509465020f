"""The thinker remembers in the arena and nowhere else, and what it remembers can be cut and continued exactly."""

from __future__ import annotations

import gc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from thinker_fakes import Tiny, arena_for, only, random_weights, reference_logits, think, write_folder, write_gguf
from torch.utils._python_dispatch import TorchDispatchMode

from duplexd.errors import ModelError
from duplexd.memory.arena import Arena
from duplexd.models.pocket.checkpoint import load_checkpoint
from duplexd.models.pocket.thinker import Thinker
from duplexd.streams.attention import PAGES, WORKSPACE
from duplexd.streams.stage import Failed, ThinkResult

TINY = Tiny()
HEARD = (5, 17, 300, 2, 44, 91, 8, 120)
SAID = (61, 9, 250, 33)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), TINY, random_weights(TINY))


def build(path: Path, precision: str = "float64", *, batch_max: int = 2) -> tuple[Thinker, Arena]:
    thinker = Thinker(load_checkpoint(path), precision=precision, context_max=128, batch_max=batch_max)
    arena = arena_for(thinker)
    thinker.load(arena)
    return thinker, arena


@pytest.fixture
def exact(folder: Path) -> tuple[Thinker, Arena]:
    return build(folder)


def scattered(count: int, seed: int = 4) -> list[int]:
    return [int(slot) for slot in np.random.default_rng(seed).permutation(256)[:count]]


# Same words, same logits ----------------------------------------------------------------------------------------------


def test_many_tokens_at_once_equal_one_by_one(exact: tuple[Thinker, Arena]) -> None:
    thinker, _ = exact
    slots = scattered(len(HEARD))
    for index, token in enumerate(HEARD[:-1]):
        only(thinker.run([think(slots[: index + 1], [token], past=index)], None))
    one_by_one = thinker.logits(think(slots, HEARD[-1:], past=len(HEARD) - 1))
    at_once = thinker.logits(think(range(100, 100 + len(HEARD)), HEARD))

    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=1e-10)


def test_a_cut_context_continues_as_if_the_rest_was_never_said(exact: tuple[Thinker, Arena]) -> None:
    """The character says eight tokens, three are heard, the person goes on: equal to a fresh prefill (DESIGN §5.4)."""
    thinker, _ = exact
    slots = scattered(40)
    reply = only(thinker.run([think(slots[:15], HEARD, steps=8)], None))
    kept = len(HEARD) + 3
    # The unheard slots are given to the new words, as the ledger would.
    after = thinker.logits(think(slots[: kept + len(SAID)], SAID, past=kept))
    fresh = thinker.logits(think(range(15), (*HEARD, *reply[:3], *SAID)))
    reference = reference_logits(TINY, random_weights(TINY), (*HEARD, *reply[:3], *SAID))[-1]

    torch.testing.assert_close(after, fresh, rtol=0, atol=1e-10)
    torch.testing.assert_close(after, reference, rtol=0, atol=1e-10)


def test_positions_are_given_when_read(exact: tuple[Thinker, Arena]) -> None:
    """A key is stored as the layer made it: the same numbers at position 0 and at position 2."""
    thinker, arena = exact
    slots = scattered(len(HEARD))
    only(thinker.run([think(slots, HEARD)], None))
    keys = arena.field(PAGES, "k")
    first = keys[0, slots[0]].clone()
    # Layer 0 sees a token by itself, so that nothing but a rotation could tell the two places apart.
    only(thinker.run([think([200, 201, 202], (HEARD[3], HEARD[5], HEARD[0]))], None))

    torch.testing.assert_close(keys[0, 202], first, rtol=0, atol=1e-12)


def test_keys_of_a_one_layer_model_survive_a_slide(tmp_path: Path) -> None:
    tiny = Tiny(layers=1)
    thinker, _ = build(write_folder(tmp_path, tiny, random_weights(tiny)))
    slots = scattered(len(HEARD) + 1)
    only(thinker.run([think(slots[:-1], HEARD)], None))
    slid = thinker.logits(think([*slots[0:2], *slots[5:]], SAID[:1], past=len(HEARD) - 3))
    fresh = thinker.logits(think(range(100, 106), (*HEARD[:2], *HEARD[5:], SAID[0])))

    torch.testing.assert_close(slid, fresh, rtol=0, atol=1e-10)


def test_decoding_in_one_job_equals_decoding_in_many(exact: tuple[Thinker, Arena]) -> None:
    thinker, _ = exact
    slots = scattered(len(HEARD) + 9)
    whole = only(thinker.run([think(slots, HEARD, steps=10)], None))
    parts = list(only(thinker.run([think(range(len(HEARD) + 2), HEARD, steps=3)], None)))
    past = len(HEARD) + 2
    while len(parts) < 10:
        steps = min(4, 10 - len(parts))
        job = think(range(past + steps), parts[-1:], past=past, steps=steps, reply=parts)
        parts += only(thinker.run([job], None))
        past += steps

    assert whole == tuple(parts)


def test_greedy_choice_is_the_likeliest_token_after_the_penalty(folder: Path) -> None:
    """The plain choice would repeat; with the penalty over the reply it is the argmax of the reference, penalised."""
    weights = random_weights(TINY)
    plain = int(reference_logits(TINY, weights, HEARD)[-1].argmax())
    logits = reference_logits(TINY, weights, HEARD)[-1].clone()
    logits[plain] = logits[plain] / 50 if logits[plain] > 0 else logits[plain] * 50
    thinker = Thinker(load_checkpoint(folder), precision="float64", context_max=64, penalty=50.0)
    thinker.load(arena_for(thinker))

    assert only(thinker.run([think(range(8), HEARD, steps=1)], None)) == (plain,)
    assert only(thinker.run([think(range(8), HEARD, steps=1, reply=[plain])], None)) == (int(logits.argmax()),)
    assert plain != int(logits.argmax())


def test_decoding_stops_after_a_stop_token_and_leaves_the_rest_of_its_slots(exact: tuple[Thinker, Arena]) -> None:
    thinker, arena = exact
    free = only(thinker.run([think(range(17), HEARD, steps=10)], None))
    arena.fill_nan(PAGES, range(256))
    stopped = only(thinker.run([think(range(17), HEARD, steps=10, stop=[free[4]])], None))
    written = torch.isfinite(arena.field(PAGES, "k")[0, :, 0, 0])

    assert stopped == free[: free.index(free[4]) + 1]
    assert written.nonzero().flatten().tolist() == list(range(len(HEARD) + len(stopped) - 1))


def test_plain_attention_says_the_same(exact: tuple[Thinker, Arena], folder: Path) -> None:
    plain = Thinker(load_checkpoint(folder), precision="float64", context_max=128, attention="plain")
    plain.load(arena_for(plain))
    jobs = [think(scattered(17), HEARD, steps=10), think(range(100, 109), SAID, steps=6, session=8)]

    assert exact[0].run(jobs, None) == plain.run(jobs, None)


def test_a_prefill_says_nothing_and_is_remembered(exact: tuple[Thinker, Arena]) -> None:
    thinker, _ = exact
    assert only(thinker.run([think(range(8), HEARD)], None)) == ()

    continued = thinker.logits(think(range(12), SAID, past=8))
    torch.testing.assert_close(continued, thinker.logits(think(range(12), (*HEARD, *SAID))), rtol=0, atol=1e-10)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["k", "v"])
def test_one_poisoned_slot_poisons_what_follows(exact: tuple[Thinker, Arena], field: str) -> None:
    """Memory is read from the arena each time: a NaN in one committed slot of one layer is heard at once."""
    thinker, arena = exact
    slots = scattered(len(HEARD) + 1)
    only(thinker.run([think(slots[:-1], HEARD)], None))
    arena.field(PAGES, field)[1, slots[3]] = float("nan")
    poisoned = thinker.logits(think(slots, SAID[:1], past=len(HEARD)))
    (result,) = thinker.run([think(slots, SAID[:1], past=len(HEARD), steps=1)], None)

    assert not torch.isfinite(poisoned).any()
    assert isinstance(result, Failed)
    assert "not finite" in result.reason


def test_slots_of_others_are_never_read(exact: tuple[Thinker, Arena]) -> None:
    thinker, arena = exact
    slots = scattered(len(HEARD) + 1)
    only(thinker.run([think(slots[:-1], HEARD)], None))
    before = thinker.logits(think(slots, SAID[:1], past=len(HEARD)))
    arena.fill_nan(PAGES, [slot for slot in range(256) if slot not in slots[:-1]])

    assert torch.equal(before, thinker.logits(think(slots, SAID[:1], past=len(HEARD))))


def test_the_workspace_means_nothing_between_jobs(exact: tuple[Thinker, Arena]) -> None:
    thinker, arena = exact
    only(thinker.run([think(range(8), HEARD)], None))
    before = thinker.logits(think(range(9), SAID[:1], past=8))
    arena.fill_nan(WORKSPACE, range(2))

    assert torch.equal(before, thinker.logits(think(range(9), SAID[:1], past=8)))


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that an operation made anew, by operation."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def live_tensors() -> dict[int, int]:
    """Storage -> bytes of every tensor alive."""
    gc.collect()
    # `isinstance` would ask every object for its __class__, which some modules answer with a warning.
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}


def test_decoding_leaves_no_tensor_behind(exact: tuple[Thinker, Arena]) -> None:
    thinker, _ = exact
    only(thinker.run([think(range(12), HEARD, steps=5)], None))
    before = live_tensors()
    only(thinker.run([think(range(100, 112), HEARD, steps=5)], None))

    assert live_tensors() == before


def largest_allocation(thinker: Thinker, arena: Arena, slots: list[int]) -> int:
    """Elements of the largest tensor made outside the arena while four tokens are decoded after 120."""
    only(thinker.run([think(slots[:120], list(HEARD) * 15)], None))
    seen = Allocations({arena.buffer.untyped_storage().data_ptr()})
    with seen:
        only(thinker.run([think(slots, SAID[:1], past=120, steps=4)], None))
    return seen.largest


def test_a_decoded_token_allocates_nothing_of_the_size_of_its_context(exact: tuple[Thinker, Arena]) -> None:
    """With a past in consecutive slots, not even one layer's keys of that past are ever copied outside the arena."""
    one_layer_of_keys = 120 * TINY.kv_heads * TINY.head_dim

    assert 0 < largest_allocation(*exact, list(range(124))) < one_layer_of_keys
    # The meter works: scattered slots are gathered, for the length of the job.
    assert largest_allocation(*exact, scattered(124)) >= one_layer_of_keys


def test_a_failed_job_writes_nothing(exact: tuple[Thinker, Arena]) -> None:
    thinker, arena = exact
    only(thinker.run([think(range(8), HEARD)], None))
    arena.field(PAGES, "v")[0, 2] = float("nan")
    before = arena.buffer[: arena.layout.partition_bytes(PAGES)].clone()
    (result,) = thinker.run([think(range(12), SAID, past=8, steps=1)], None)

    assert isinstance(result, Failed)
    assert torch.equal(before, arena.buffer[: arena.layout.partition_bytes(PAGES)])


# Neighbours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_two_sessions_in_one_launch_say_what_each_says_alone(folder: Path, precision: str) -> None:
    thinker, _ = build(folder, precision)
    first, second = think(scattered(13, 1), HEARD, steps=6), think(range(9), SAID, steps=6, session=8)
    alone = [*thinker.run([first], None), *thinker.run([second], None)]

    assert alone == thinker.run([first, second], None)


def test_a_prefill_and_a_reply_share_a_launch(exact: tuple[Thinker, Arena]) -> None:
    thinker, _ = exact
    alone = only(thinker.run([think(range(9), SAID, steps=6)], None))
    results = thinker.run([think(range(100, 108), HEARD, session=9), think(range(9), SAID, steps=6)], None)
    after = thinker.logits(think(range(100, 109), SAID[:1], past=8))

    assert [result.tokens for result in results if isinstance(result, ThinkResult)] == [(), alone]
    torch.testing.assert_close(after, thinker.logits(think(range(50, 59), (*HEARD, SAID[0]))), rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["float64", "int4"])
def test_a_poisoned_session_does_not_reach_its_neighbour(tmp_path: Path, precision: str) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    thinker, arena = build(write_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY), kind=kind), precision)
    only(thinker.run([think(range(8), HEARD)], None))
    neighbour = think(range(100, 109), SAID, steps=6, session=8)
    alone = thinker.run([neighbour], None)
    arena.field(PAGES, "k")[0, 2] = float("nan")
    poisoned, unharmed = thinker.run([think(range(12), SAID, past=8, steps=1), neighbour], None)

    assert isinstance(poisoned, Failed)
    assert [unharmed] == alone


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_fold_comes_before_the_job_reads_its_context(folder: Path, precision: str) -> None:
    """Two tokens that slid out become one, where the first of them lies: the mean of both, and the job sees that."""
    thinker, _ = build(folder, precision)
    slots = list(range(20, 20 + len(HEARD)))
    thinker.run([think(slots, HEARD)], None)
    keys, values = thinker.attention.pages
    before = [field[:, [21, 22]].clone() for field in (keys, values)]
    left = [20, 21, *slots[3:]]
    told = thinker.logits(think([*left, 60], [5], past=len(left), folds=[([21, 22], [21])]))
    for field, pair in zip((keys, values), before, strict=True):
        torch.testing.assert_close(field[:, 21].double(), pair.double().mean(1), rtol=0, atol=4e-3 * pair.abs().max())
    again = thinker.logits(think([*left, 60], [5], past=len(left)))

    assert torch.equal(told, again)


# Wrong jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (think(range(7), HEARD), "7 slots for a job that needs 8"),
        (think(range(8), HEARD, steps=2), "8 slots for a job that needs 9"),
        (think([], ()), "at least one token to feed"),
        (think([0, 256], SAID[:2]), "slots outside 0..255"),
        (think([-1, 3], SAID[:2]), "slots outside 0..255"),
        (think([1], [320]), "tokens outside 0..319"),
        (think([1], [3], steps=1, reply=[-5]), "tokens outside 0..319"),
        (think(range(129), [1] * 129), "a context of 129 tokens; at most 128"),
        (think(range(8), HEARD, folds=[([9, 256], [9])]), "folds slots outside 0..255, or none"),
        (think(range(8), HEARD, folds=[([9, 10], [])]), "folds slots outside 0..255, or none"),
    ],
    ids=["few", "no-room", "nothing", "beyond", "negative", "token", "reply", "long", "fold-beyond", "fold-nothing"],
)
def test_a_wrong_job_fails_with_a_reason_and_the_next_one_runs(
    exact: tuple[Thinker, Arena], job: object, reason: str
) -> None:
    thinker, _ = exact
    bad, good = thinker.run([job, think(range(8), HEARD, steps=1)], None)  # type: ignore[list-item]

    assert isinstance(bad, Failed)
    assert reason in bad.reason
    assert isinstance(good, ThinkResult)


def test_more_jobs_than_rows_are_a_bug_of_the_caller(exact: tuple[Thinker, Arena]) -> None:
    thinker, _ = exact
    with pytest.raises(ValueError, match="3 jobs in one launch of the thinker; at most 2"):
        thinker.run([think([1], [1])] * 3, None)


def test_an_arena_of_another_shape_is_refused(folder: Path) -> None:
    thinker = Thinker(load_checkpoint(folder), precision="float64", context_max=64)
    other = Thinker(load_checkpoint(folder), precision="float32", context_max=64)
    with pytest.raises(ModelError, match=r"arena field pages\.k is .*float32; attention needs .*float64"):
        thinker.load(arena_for(other))


def test_a_context_beyond_the_training_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="trained for 512 tokens, not 513"):
        Thinker(load_checkpoint(folder), context_max=513)


# Packed weights -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = gguf.GGMLQuantizationType.Q4_1
    return write_gguf(tmp_path_factory.mktemp("packed") / "m.gguf", TINY, random_weights(TINY), kind=kind)


@pytest.mark.parametrize("precision", ["int4", "int8", "bfloat16"])
@pytest.mark.parametrize("count", [1, 6, 40], ids=["token", "few", "many"])
def test_packed_weights_say_what_the_plain_ones_say(packed: Path, precision: str, count: int) -> None:
    """CPU; bfloat16 activations against float32 over 2 layers: logits agree to 4 % of their spread."""
    tokens = [int(token) for token in np.random.default_rng(5).integers(0, 320, count)]
    plain, _ = build(packed, "float32")
    quick, _ = build(packed, precision)
    expected = plain.logits(think(range(count), tokens))
    actual = quick.logits(think(range(count), tokens)).float()

    assert (actual - expected).std() < 0.04 * expected.std()


@pytest.mark.parametrize("seed", range(3))
def test_the_int8_head_chooses_as_the_full_one(packed: Path, seed: int) -> None:
    """Rough int8 logits propose, full ones decide: over 100 states not one choice differs from argmax."""
    thinker, _ = build(packed, "int4")
    states = torch.randn(100, TINY.width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    full = [int(thinker.decoder.head.logits(state[None])[0].argmax()) for state in states]

    assert full == [thinker.decoder.head.best(state, None, 1.0) for state in states]
