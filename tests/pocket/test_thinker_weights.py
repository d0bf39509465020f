"""The default thinker with its real weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from thinker_fakes import arena_for, only, think

from duplexd.errors import WeightsError
from duplexd.memory.arena import Arena
from duplexd.models.pocket.linear import Precision
from duplexd.models.pocket.thinker import PAGES, Mind, load_thinker
from duplexd.streams.stage import Failed, ThinkJob, ThinkResult
from duplexd.weights import path

pytestmark = pytest.mark.weights

TEXT = "The weather was cold that morning, and the old man walked slowly down to the harbour. The sea was calm."


def mind(precision: str) -> Mind:
    try:
        path("smollm2")
    except WeightsError as error:
        pytest.skip(str(error))
    made = load_thinker(precision=precision, context_max=512, batch_max=8)
    made.thinker.load(arena_for(made.thinker, tokens=512))
    return made


@pytest.fixture(scope="module")
def quick() -> Iterator[Mind]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield mind("auto")
    torch.set_num_threads(threads)


def ask(mind: Mind, text: str) -> str:
    dialect = mind.dialect
    feed = dialect.anchor() + dialect.open_user() + dialect.words(text, first=True) + dialect.close_user_open_reply()
    slots = range(len(feed) + 39)
    return dialect.piece(only(mind.thinker.run([think(slots, feed, steps=40, stop=dialect.stop)], None)))


def test_it_knows_the_capital_of_france_and_its_name(quick: Mind) -> None:
    assert "Paris" in ask(quick, "What is the capital of France?")
    assert quick.dialect.persona.name in ask(quick, "What is your name?")


def test_the_anchor_is_short_enough_to_keep(quick: Mind) -> None:
    assert 0 < len(quick.dialect.anchor()) <= 256


def surprise(mind: Mind) -> float:
    """Mean negative log likelihood of TEXT, word by word fed."""
    ids = mind.dialect.words(TEXT, first=True)
    total = 0.0
    for index, token in enumerate(ids[:-1]):
        job = think(range(index + 1), [token], past=index)
        logits = mind.thinker.logits(job).double()
        total -= float(torch.log_softmax(logits, -1)[ids[index + 1]])
        only(mind.thinker.run([job], None))
    return total / (len(ids) - 1)


def test_four_bits_kept_as_they_are_lose_nothing(quick: Mind) -> None:
    """CPU; bfloat16 activations and 4-bit weights against float32: likelihood of a text within 1 %."""
    assert quick.thinker.precision is Precision.INT4

    assert surprise(quick) == pytest.approx(surprise(mind("float32")), rel=0.01)


def test_real_words_given_one_by_one_are_the_text(quick: Mind) -> None:
    words = (TEXT + " It's 42 degrees, isn't it? Dr. Smith said 3.14, über naïve 東京 🙂 #ok a.b@c.d").split()
    one_by_one = [t for index, word in enumerate(words) for t in quick.dialect.words(word, first=index == 0)]

    assert one_by_one == quick.dialect.words(" ".join(words), first=True)
    assert quick.dialect.piece(one_by_one) == " ".join(words)


def jobs_of_a_crowd(mind: Mind) -> list[ThinkJob]:
    """Six sessions on 64 slots each: short replies, a long one, one that stops at once, a prefill of forty tokens."""
    dialect = mind.dialect
    texts = [
        "Hello there.",
        "What is the capital of France?",
        "Tell me a story.",
        "Stop!",
        TEXT,
        "Why is the sky blue?",
    ]
    steps = [3, 12, 20, 20, 0, 7]
    jobs = []
    for session, (text, count) in enumerate(zip(texts, steps, strict=True)):
        feed = (dialect.open_user() + dialect.words(text, first=True) + dialect.close_user_open_reply())[:44]
        first = 64 * session
        slots = range(first, first + len(feed) + max(0, count - 1))
        stop = tuple(range(0, 49_000, 2)) if text == "Stop!" else dialect.stop
        jobs.append(think(slots, feed, steps=count, stop=stop, session=session + 1))
    return jobs


def run_and_read(mind: Mind, arena: Arena, jobs: list[ThinkJob]) -> list[tuple[ThinkResult | Failed, bytes]]:
    """Results, and the keys and values each left in its slots, to the bit."""
    arena.fill_nan(PAGES, range(512))
    results = mind.thinker.run(jobs, None)
    kept = [
        b"".join(_bits(arena.field(PAGES, name)[:, 64 * job.session - 64 : 64 * job.session]) for name in "kv")
        for job in jobs
    ]
    return list(zip(results, kept, strict=True))


def _bits(keys: torch.Tensor) -> bytes:
    return bytes(keys.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx512_bf16", False), reason="the packed kernels differ here")
def test_a_finished_failed_or_prefilling_neighbour_changes_no_bit_of_the_others() -> None:
    """Six sessions in one launch, one of them poisoned, say and remember what each does alone."""
    crowd = mind("auto")
    arena = arena_for(crowd.thinker, tokens=512)
    crowd.thinker.attention.load(arena)
    jobs = jobs_of_a_crowd(crowd)
    poisoned = think(range(448, 452), [5], past=3, steps=1, session=8)  # its past is NaN
    alone = [run_and_read(crowd, arena, [job])[0] for job in jobs]
    together = run_and_read(crowd, arena, [*jobs[:2], poisoned, *jobs[2:]])

    assert isinstance(together[2][0], Failed)
    assert [*together[:2], *together[3:]] == alone
