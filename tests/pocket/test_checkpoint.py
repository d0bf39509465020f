"""A checkpoint says the same whatever it is stored as, and says no to what it cannot compute."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from thinker_fakes import Tiny, arena_for, random_weights, reference_logits, think, write_folder, write_gguf

from duplexd.errors import ModelError
from duplexd.models.pocket.checkpoint import ARCHITECTURES, GgufSource, llama3_factors, load_checkpoint
from duplexd.models.pocket.decoder import Decoder, attention_of, placed_sizes
from duplexd.models.pocket.gguffile import GgufFile
from duplexd.models.pocket.linear import Precision, choose_precision
from duplexd.models.pocket.thinker import Thinker

TOKENS = (5, 17, 300, 2, 44, 91, 8)


def logits_of(path: Path) -> torch.Tensor:
    thinker = Thinker(load_checkpoint(path), precision="float64", context_max=64)
    thinker.load(arena_for(thinker, tokens=64))
    return thinker.logits(think(range(len(TOKENS)), TOKENS))


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_computes_the_textbook_decoder(tmp_path: Path, architecture: str, tied: bool) -> None:
    tiny = Tiny(architecture=architecture, tied=tied)
    weights = random_weights(tiny)
    expected = reference_logits(tiny, weights, TOKENS)[-1]

    torch.testing.assert_close(logits_of(write_folder(tmp_path / "m", tiny, weights)), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gguf_says_what_its_folder_says(tmp_path: Path, architecture: str) -> None:
    """The converter permutes q and k of a Llama and of nothing else; both must be undone or left alone."""
    tiny = Tiny(architecture=architecture)
    weights = random_weights(tiny)
    expected = reference_logits(tiny, weights, TOKENS)[-1]

    torch.testing.assert_close(logits_of(write_gguf(tmp_path / "m.gguf", tiny, weights)), expected, rtol=0, atol=1e-10)


def test_llama3_scaling_stretches_long_waves_only(tmp_path: Path) -> None:
    tiny = Tiny(base=500000.0)
    weights = random_weights(tiny)
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    factors = torch.tensor(llama3_factors(rope, head_dim=tiny.head_dim, base=tiny.base), dtype=torch.float64)
    expected = reference_logits(tiny, weights, TOKENS, factors)[-1]
    actual = logits_of(write_folder(tmp_path / "m", tiny, weights, rope_scaling=rope))

    assert (float(factors[0]), float(factors[-1])) == (1.0, 8.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_linear_scaling_is_the_same_in_both_formats(tmp_path: Path) -> None:
    tiny = Tiny()
    weights = random_weights(tiny)
    folder = write_folder(tmp_path / "m", tiny, weights, rope_scaling={"type": "linear", "factor": 2.0})
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    file = write_gguf(tmp_path / "m.gguf", tiny, weights, fields=fields)

    torch.testing.assert_close(logits_of(folder), logits_of(file), rtol=0, atol=1e-10)
    assert (logits_of(folder) - reference_logits(tiny, weights, TOKENS)[-1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_blocks_are_the_weights(tmp_path: Path, kind: str) -> None:
    """Blocks read apart and dequantised by hand equal what the gguf package makes of the same bytes."""
    tiny = Tiny()
    quantised = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", tiny, random_weights(tiny), kind=quantised)
    qkv = load_checkpoint(path).layer(1).qkv
    blocks = qkv.blocks()
    assert blocks is not None

    by_hand = blocks.codes.view(len(blocks.codes), -1, 32) * blocks.scale[..., None] + blocks.low[..., None]
    torch.testing.assert_close(by_hand.flatten(1), qkv.dense(), rtol=0, atol=1e-6)


def test_q4_k_blocks_are_the_weights(tmp_path: Path) -> None:
    """Random bytes are a valid Q4_K tensor; the gguf package cannot quantise to it, but it can read it."""
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (16, 2 * 144), dtype=np.uint8)
    for block in range(2):  # scale and low are float16; keep them finite
        raw[:, block * 144 : block * 144 + 4] = rng.uniform(0.01, 0.1, (16, 2)).astype(np.float16).view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(GgufFile(tmp_path / "k.gguf"))
    blocks = source.blocks("w")
    assert blocks is not None

    by_hand = blocks.codes.view(16, -1, 32) * blocks.scale[..., None] + blocks.low[..., None]
    torch.testing.assert_close(by_hand.flatten(1), source.dense("w"), rtol=0, atol=1e-5)


def test_the_header_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    tiny = Tiny()
    path = write_gguf(tmp_path / "m.gguf", tiny, random_weights(tiny), kind=gguf.GGMLQuantizationType.Q8_0)
    reader = gguf.GGUFReader(path)
    file = GgufFile(path)

    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert file.fields[name] == field.contents(), name
    for tensor in reader.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert mine.kind == tensor.tensor_type.name
        assert np.array_equal(mine.raw, np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1))


def test_blocks_stay_four_bits_by_default(tmp_path: Path) -> None:
    tiny = Tiny()
    weights = random_weights(tiny)
    blocks = write_gguf(tmp_path / "q.gguf", tiny, weights, kind=gguf.GGMLQuantizationType.Q4_1)
    floats = write_gguf(tmp_path / "f.gguf", tiny, weights)
    cpu = torch.device("cpu")

    assert choose_precision("auto", load_checkpoint(blocks), cpu) is Precision.INT4
    assert choose_precision("auto", load_checkpoint(floats), cpu) is Precision.INT8


@pytest.mark.parametrize("precision", list(Precision), ids=lambda one: one.value)
@pytest.mark.parametrize(
    "tiny",
    [Tiny(tied=True), Tiny(architecture="qwen2"), Tiny(architecture="qwen3")],
    ids=["tied llama", "biases and a head", "norms of heads"],
)
def test_a_decoder_places_what_its_header_promises(tmp_path: Path, tiny: Tiny, precision: Precision) -> None:
    """`duplexd plan` counts the weights, and the arena has a shelf for them, before any matrix is read."""
    folder = write_folder(tmp_path / "f", tiny, random_weights(tiny))
    blocks = write_gguf(tmp_path / "q.gguf", tiny, random_weights(tiny), kind=gguf.GGMLQuantizationType.Q4_1)
    for path in (folder, blocks):
        placed: list[int] = []

        def place(tensor: torch.Tensor, placed: list[int] = placed) -> torch.Tensor:
            placed.append(tensor.nbytes)
            return tensor

        checkpoint, cpu = load_checkpoint(path), torch.device("cpu")
        attention = attention_of(checkpoint.shape, context_max=16, precision=precision, device=cpu)
        decoder = Decoder(checkpoint, attention, precision=precision, device=cpu, place=place)

        assert sorted(placed_sizes(checkpoint, precision)) == sorted(placed)
        assert held_bytes([decoder._layers, decoder.embedding, decoder.head, decoder._final_norm]) == sum(placed)


def held_bytes(root: object) -> int:
    """Bytes of all tensors that can be reached from here, each once."""
    found: dict[int, int] = {}

    def walk(part: object) -> None:
        if isinstance(part, torch.Tensor):
            found[part.data_ptr()] = part.nbytes
        elif isinstance(part, list):
            for one in part:
                walk(one)
        elif hasattr(part, "__dict__"):
            walk(list(vars(part).values()))

    walk(root)
    return sum(found.values())


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no checkpoint at .*absent\.gguf; give a \.gguf file or a folder"):
        load_checkpoint(tmp_path / "absent.gguf")


def test_something_else_than_a_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelError, match="no GGUF file: it starts with"):
        load_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("keep", [0.002, 0.5, 0.99], ids=["in-the-header", "in-the-middle", "in-the-last-tensor"])
def test_a_file_cut_short_is_refused(tmp_path: Path, keep: float) -> None:
    tiny = Tiny()
    data = write_gguf(tmp_path / "m.gguf", tiny, random_weights(tiny)).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load_checkpoint(tmp_path / "cut.gguf")


def test_an_unknown_architecture_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    tiny = Tiny()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    other = write_gguf(tmp_path / "m.gguf", Tiny(architecture="gemma"), random_weights(tiny))

    with pytest.raises(ModelError, match="'mamba'; allowed are llama, qwen2, qwen3"):
        load_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="'gemma'; allowed are llama, qwen2, qwen3"):
        load_checkpoint(other)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'; give float16"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_act": "gelu"}, "'gelu'; allowed is silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'; allowed are default, linear and llama3"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"num_key_value_heads": 3}, "4 heads over 3 key heads"),
    ],
    ids=["awq", "window", "gelu", "yarn", "partial", "uneven"],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, more: dict[str, object], text: str) -> None:
    tiny = Tiny()
    write_folder(tmp_path, tiny, random_weights(tiny), **more)
    with pytest.raises(ModelError, match=text):
        load_checkpoint(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tiny = Tiny()
    weights = random_weights(tiny)
    del weights["model.layers.1.mlp.up_proj.weight"]
    checkpoint = load_checkpoint(write_folder(tmp_path, tiny, weights))
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        checkpoint.layer(1).gate_up.dense()


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tiny = Tiny()
    weights = random_weights(tiny)
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    checkpoint = load_checkpoint(write_folder(tmp_path, tiny, weights))
    with pytest.raises(ModelError, match=r"is torch\.int8; allowed are float16"):
        checkpoint.layer(0).gate_up.dense()


def test_a_precision_is_named_or_refused(tmp_path: Path) -> None:
    tiny = Tiny()
    checkpoint = load_checkpoint(write_folder(tmp_path, tiny, random_weights(tiny)))
    with pytest.raises(ModelError, match="unknown precision 'int3'; allowed are auto, float64"):
        choose_precision("int3", checkpoint, torch.device("cpu"))
    with pytest.raises(ModelError, match="int4 has no kernel on cuda"):
        choose_precision("int4", checkpoint, torch.device("cuda"))


def test_a_missing_kernel_is_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = Tiny()
    checkpoint = load_checkpoint(write_folder(tmp_path, tiny, random_weights(tiny)))
    monkeypatch.setattr("duplexd.models.pocket.linear._has_packed", lambda precision: False)

    assert choose_precision("auto", checkpoint, torch.device("cpu")) is Precision.FLOAT32
    assert "runs in float32" in caplog.text
