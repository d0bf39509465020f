"""The default thinker with its real weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from thinker_fakes import arena_for, only, think

from duplexd.errors import WeightsError
from duplexd.models.pocket.linear import Precision
from duplexd.models.pocket.thinker import Mind, load_thinker
from duplexd.weights import path

pytestmark = pytest.mark.weights

TEXT = "The weather was cold that morning, and the old man walked slowly down to the harbour. The sea was calm."


def mind(precision: str) -> Mind:
    try:
        path("smollm2")
    except WeightsError as error:
        pytest.skip(str(error))
    made = load_thinker(precision=precision, context_max=512, batch_max=1)
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
