"""The network and its ears: chunk-causal, keys before rotation, one class at every size."""

from __future__ import annotations

import msgspec
import pytest
import torch
from faces import TINY, random_net
from torch import Tensor

from duplexd.models.face import audio
from duplexd.models.face.net import FaceNet, FaceShape, Heard, Places, listening_lags, parameter_count
from duplexd.models.face.sizes import LPM_1_3B, LPM_17B
from duplexd.models.face.stages import history_fields


def silence(net: FaceNet, rows: int = 1, *, text: Tensor | None = None) -> Heard:
    rng = torch.Generator().manual_seed(8)
    shape = net.shape
    speaking = torch.randn(rows, shape.speak_features, shape.audio_width, generator=rng)
    listening = torch.randn(rows, shape.listen_frames, shape.audio_width, generator=rng)
    return net.hear(speaking, listening, text=text)


def run(net: FaceNet, x: Tensor, past: list[tuple[Tensor, Tensor]], *, at: int, heard: Heard | None = None) -> Tensor:
    """One chunk after a past of keys and values of every layer, whose first token stands at place `at`."""
    count = past[0][0].shape[1] if past else 0

    def read(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not past:
            return keys, values
        return torch.cat([past[layer][0], keys], 1), torch.cat([past[layer][1], values], 1)

    every = torch.arange(at, at + count + x.shape[1])[None]
    mood = torch.zeros(1, net.shape.condition)
    return net(x, torch.tensor([0.5]), mood, heard or silence(net), read, Places(every[:, count:], every))


def some(shape: FaceShape, *, seed: int = 0, tokens: int = 8) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(1, shape.tokens, shape.latent, generator=rng)
    size = (1, tokens, shape.heads, shape.head_dim)
    return x, [(torch.randn(size, generator=rng), torch.randn(size, generator=rng)) for _ in range(shape.layers)]


def test_only_distance_counts() -> None:
    """A window that has slid gives the same: keys were kept before rotation, so age leaves no trace."""
    net = random_net()
    x, past = some(TINY)

    torch.testing.assert_close(run(net, x, past, at=0), run(net, x, past, at=5000), atol=2e-3, rtol=0)
    moved = run(net, x, [(keys.flip(1), values.flip(1)) for keys, values in past], at=0)
    assert (moved - run(net, x, past, at=0)).abs().max() > 1e-3, "places do not matter at all"


def test_even_layers_hear_the_voice_and_odd_ones_the_person() -> None:
    """With one layer only the own voice can change anything."""
    net = random_net(msgspec.structs.replace(TINY, layers=1))
    x, past = some(net.shape)
    rng = torch.Generator().manual_seed(3)
    speaking = torch.randn(1, TINY.speak_features, TINY.audio, generator=rng)
    listening = torch.randn(1, TINY.listen_frames, TINY.audio, generator=rng)
    plain = run(net, x, past, at=0, heard=net.hear(speaking, listening))

    assert torch.equal(plain, run(net, x, past, at=0, heard=net.hear(speaking, -listening)))
    assert (plain - run(net, x, past, at=0, heard=net.hear(-speaking, listening))).abs().max() > 1e-4


def test_padding_that_is_not_seen_changes_nothing() -> None:
    net = random_net()
    x, past = some(TINY)
    expected = run(net, x, past, at=0)

    padded = [(torch.cat([k, 9 * torch.ones_like(k)], 1), torch.cat([v, 9 * torch.ones_like(v)], 1)) for k, v in past]
    keys = torch.cat([torch.arange(16), torch.arange(8, 16)])[None]
    seen = torch.cat([torch.ones(8), torch.zeros(8), torch.ones(8)]).bool()[None]

    def read(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([padded[layer][0], k], 1), torch.cat([padded[layer][1], v], 1)

    places = Places(torch.arange(8, 16)[None], keys, seen)
    actual = net(x, torch.tensor([0.5]), torch.zeros(1, net.shape.condition), silence(net), read, places)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_text_is_attended_to_where_a_family_has_it() -> None:
    shape = msgspec.structs.replace(TINY, text=12, places=(2, 2), frames=2, latent=5, anchors=(8,))
    net = random_net(shape)
    x, past = some(shape)
    text = torch.randn(1, 6, 12, generator=torch.Generator().manual_seed(1))

    outputs = [run(net, x, past, at=0, heard=silence(net, text=each)) for each in (text, text.flip(1), -text)]
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=0)  # text has no order of its own
    assert (outputs[0] - outputs[2]).abs().max() > 1e-4


@pytest.mark.parametrize(("shape", "billions"), [(LPM_17B, 17.4), (LPM_1_3B, 1.6)], ids=["17b", "1.3b"])
def test_published_sizes_are_the_same_class(shape: FaceShape, billions: float) -> None:
    """papers §1.2: 14 billion of Wan, about 3 new; §1.5: a token's keys and values take 819,200 and 184,320 bytes."""
    assert parameter_count(shape) / 1e9 == pytest.approx(billions, abs=0.05)
    (field,) = history_fields(shape, "bfloat16")
    assert field.element_bytes() // shape.tokens == {40: 819_200, 30: 184_320}[shape.layers]


def test_a_chunk_runs_at_the_published_size_on_no_memory() -> None:
    """Forward of 17 billion parameters on the meta device: shapes agree, nothing is allocated."""
    with torch.device("meta"):
        net = FaceNet(LPM_17B)
        x = torch.empty(1, LPM_17B.tokens, LPM_17B.latent)
        heard = net.hear(
            torch.empty(1, LPM_17B.speak_features, LPM_17B.audio_width),
            torch.empty(1, LPM_17B.listen_frames, LPM_17B.audio_width),
            text=torch.empty(1, 512, LPM_17B.text),
        )
        places = torch.arange(LPM_17B.tokens)[None]
        mood = torch.empty(1, LPM_17B.condition)
        velocity = net(x, torch.empty(1), mood, heard, lambda _, k, v: (k, v), Places(places, places))

    assert velocity.shape == x.shape


# Ears -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_a_window_hears_what_the_whole_run_hears(rate: int) -> None:
    """Any window with `reach` features before it gives the features of one run over everything."""
    rng = torch.Generator().manual_seed(0)
    encoder = random_net().speaking
    frame = rate // 25
    pcm = 0.1 * torch.randn(audio.before_samples(rate) + 60 * frame, generator=rng)
    whole = encoder(audio.mel_frames(pcm, rate)[None])
    for first, count in ((0, 7), (13, 18), (40, 17)):
        stretch = pcm[first * frame : (first + 3 + count) * frame + audio.before_samples(rate)]
        part = encoder(audio.mel_frames(stretch, rate)[None])

        expected = whole[:, first * audio.FEATURES_PER_FRAME :][:, : count * audio.FEATURES_PER_FRAME]
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=0)


def test_both_rates_hear_the_same_tone() -> None:
    heard = []
    for rate in (16_000, 24_000):
        t = torch.arange(rate) / rate
        tone = 0.3 * torch.sin(2 * torch.pi * 440 * t) + 0.1 * torch.sin(2 * torch.pi * 3100 * t)
        heard.append(audio.mel_frames(tone, rate)[5:90])

    torch.testing.assert_close(heard[0], heard[1], atol=0.1, rtol=0)


def test_what_was_never_written_is_silence() -> None:
    ring = torch.full((100,), float("nan"))
    ring[torch.arange(90, 120) % 100] = 0.5
    found = audio.valid_stretch(ring, 85, 125, [(90, 120)])

    assert found.tolist() == [0.0] * 5 + [0.5] * 30 + [0.0] * 5


def test_heads_that_listen_begin_apart() -> None:
    """Together they cover what is heard; the nearest hears what every frame of a chunk can know, 0.64 s behind it."""
    shape = FaceShape()
    every = torch.cat([listening_lags(shape, layer) for layer in range(3)])
    behind = shape.listen_frames + shape.listen_delay - every.argmax(-1) + torch.arange(shape.frames)
    lags = behind[:, 0].sort().values

    assert (behind == behind[:, :1]).sum() >= behind.numel() - 6  # halves are rounded
    assert lags[0] == shape.listen_delay + shape.frames
    assert lags[-1] == 46
    assert lags.diff().min() >= 1
    assert lags.diff().max() <= 4


def test_a_fresh_network_listens_at_these_lags() -> None:
    net = FaceNet(FaceShape())
    net.begin(torch.Generator().manual_seed(0))

    assert torch.equal(net.blocks[3].nearness, listening_lags(net.shape, 1))
    assert not net.blocks[2].nearness.any()
