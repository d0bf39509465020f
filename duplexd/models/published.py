"""Footprints of published models, for `duplexd plan`. None of them is implemented here, and no weights are needed.

1. A number comes from a published configuration, or from counting the parameters of one; its source stands beside it.
   "papers" and "omni" are the team's notes on the papers and on the models' configurations.
2. Workspace (activations, graphs, libraries) is an estimate: nobody publishes it.
3. Contexts that a model lets grow are bounded at `context` tokens here: a session that slides, never dies.
4. Payloads between stages and convolution states below 1 % of a session are left out, but where a line names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from duplexd.errors import ConfigError
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.memory.sizing import Footprint

T = TypeVar("T")
#: What an entry point of the group `duplexd.sizes` is: options -> footprint.
Published = Callable[[Mapping[str, str]], Footprint]

GB = 10**9
PAGE_TOKENS = 16
KEYS_AND_VALUES = 2
#: omni §6: of a Qwen3-Omni session with a camera, a window of 4096 tokens keeps the sink and the last minutes.
CONTEXT_TOKENS = {str(tokens): tokens for tokens in (1024, 2048, 4096, 8192, 16_384, 32_768)}
KEPT = "4096"

# LPM 1.0: a generator and a refiner of 17 B, two histories -----------------------------------------------------------

LPM_MODELS = ("generator", "refiner")  #: papers §1.3: noisy and clean history
LPM_PARAMETERS = 17 * GB  #: papers §1.2, of each
LPM_LAYERS, LPM_WIDTH = 40, 5120  #: papers §1.5: as Wan2.1-14B; keys and values take 819,200 B a token in bfloat16
LPM_CHUNK_LATENTS = 6  #: papers §1.5: 24 frames, one latent for four
LPM_ANCHOR_CHUNKS = 3  #: papers §1.3: sink tokens spanning three chunks
LPM_RECENT_CHUNKS = 2  #: papers §1.3, seed 000: the window of two
LPM_OPEN_CHUNKS = 2  #: the chunk being made, and one of lookahead that is made but not heard (DESIGN §5 rule 1)
LPM_RETIRING_CHUNKS = 1  #: after a barge-in running work may still write the chunk it is at (DESIGN §8)
LPM_WORKSPACE_BYTES = 10 * GB  #: omni §6, estimate of the row "LPM-like"
#: papers §1.5: tokens of one latent at 480x832 with a VAE of stride 8 and patches of 2; omni §3.8: with stride 16.
LPM_LATENT_TOKENS = {"8": 1560, "16": 390}
#: Eight-bit floats are counted as bytes: no arena of duplexd holds them yet.
LPM_KEYS = {"bfloat16": "bfloat16", "fp8": "uint8"}


def lpm(options: Mapping[str, str]) -> Footprint:
    """LPM-shaped pair at 480x832 and 24 fps, chunks of one second.

    Args:    options: `kv`: bfloat16 or fp8; `vae`: its stride, 8 as published, or 16.
    """
    given = _given("lpm-17b", options, kv="bfloat16", vae="8")
    dtype = _chosen("kv", given, LPM_KEYS)
    tokens = _chosen("vae", given, LPM_LATENT_TOKENS) * LPM_CHUNK_LATENTS
    chunk = (FieldSpec("kv", (KEYS_AND_VALUES, LPM_LAYERS, tokens, LPM_WIDTH), dtype),)
    window = LPM_RECENT_CHUNKS + LPM_OPEN_CHUNKS + LPM_RETIRING_CHUNKS

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        return (
            *(_ring(f"{model} sink", chunk, sessions, LPM_ANCHOR_CHUNKS, Section.ANCHORS) for model in LPM_MODELS),
            *(_ring(f"{model} window", chunk, sessions, window, Section.WINDOWS) for model in LPM_MODELS),
            _workspace(LPM_WORKSPACE_BYTES),
        )

    return Footprint("lpm-17b", partitions, len(LPM_MODELS) * LPM_PARAMETERS * 2, "generator and refiner, bfloat16")


# Qwen3-Omni-30B-A3B ---------------------------------------------------------------------------------------------------


def qwen3_omni(options: Mapping[str, str]) -> Footprint:
    """Qwen3-Omni-30B-A3B in bfloat16: thinker, talker, predictor and streaming code2wav.

    Args:    options: `context`: tokens kept of a session.
    """
    context = _context("qwen3-omni-30b", options)
    # omni §3.1: code2wav keeps 8 layers x 16 heads x 64 over a window of 72 frames, and 134 k floats of convolutions.
    code2wav = (
        FieldSpec("kv", (KEYS_AND_VALUES, 8, 16, 64, 72), "bfloat16"),
        FieldSpec("convolutions", (134_000,)),
    )

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        return (
            _state("code2wav", code2wav, sessions),
            _pages("thinker", sessions, context, layers=48, kv_heads=4, head_dim=128),  # omni §3.1: 98,304 B a token
            _pages("talker", sessions, context, layers=20, kv_heads=2, head_dim=128),  # omni §3.1: 20,480 B a token
            _workspace(6 * GB),  # omni §6
        )

    return Footprint(
        "qwen3-omni-30b", partitions, 70_500_000_000, "35.3 billion parameters, bfloat16"
    )  # omni §6: counted


# Qwen2.5-Omni-7B ------------------------------------------------------------------------------------------------------


def qwen2_5_omni(options: Mapping[str, str]) -> Footprint:
    """Qwen2.5-Omni-7B in bfloat16; the state of its token2wav is not published and left out.

    Args:    options: `context`: tokens kept of a session.
    """
    context = _context("qwen2.5-omni-7b", options)

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        return (
            _pages("thinker", sessions, context, layers=28, kv_heads=4, head_dim=128),  # omni §3.3: 57,344 B a token
            _pages("talker", sessions, context, layers=24, kv_heads=4, head_dim=128),  # omni §3.3: 49,152 B a token
            _workspace(4 * GB),  # omni §6
        )

    return Footprint(
        "qwen2.5-omni-7b", partitions, 21_500_000_000, "10.7 billion parameters, bfloat16"
    )  # omni §6: counted


# MiniCPM-o 4.5 --------------------------------------------------------------------------------------------------------

MINICPM_SPEECH_TOKENS = 4096  #: omni §3.4: longest speech of a turn; cleared when it ends
MINICPM_EAR_FRAMES = 1500  #: omni §3.4: 30 s, then the encoder begins anew


def minicpm_o(options: Mapping[str, str]) -> Footprint:
    """MiniCPM-o 4.5 in bfloat16; the caches of its token2wav were not measured and are left out.

    Args:    options: `context`: tokens kept of a session; its own `basic` window has 4000.
    """
    context = _context("minicpm-o-4.5", options)
    # omni §3.4: the streaming encoder keeps 24 layers of width 1024, 98,304 B a frame.
    ears = (FieldSpec("kv", (KEYS_AND_VALUES, 24, 1024, MINICPM_EAR_FRAMES), "bfloat16"),)

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        return (
            _state("ears", ears, sessions),
            _pages("thinker", sessions, context, layers=36, kv_heads=8, head_dim=128),  # omni §3.4: 147,456 B a token
            # omni §3.4: 61,440 B a token
            _pages("talker", sessions, MINICPM_SPEECH_TOKENS, layers=20, kv_heads=12, head_dim=64),
            _workspace(3_500_000_000),  # probes of omni §6
        )

    return Footprint(
        "minicpm-o-4.5", partitions, 18_680_000_000, "9.34 billion parameters, bfloat16"
    )  # omni §6: report


# Moshi ----------------------------------------------------------------------------------------------------------------

MOSHI_STEPS = 3000  #: omni §3.5: steps of 80 ms in the ring, four minutes


def moshi(options: Mapping[str, str]) -> Footprint:
    """Moshi 7B in bfloat16: one ring of steps a session, and the state of its codec in both directions."""
    _given("moshi", options)
    step = (FieldSpec("kv", (KEYS_AND_VALUES, 32, 32, 128), "bfloat16"),)  # omni §3.5: 524,288 B
    # omni §3.5: encoder and decoder, each 8 layers x 512 over 250 frames, about 17 MB with its convolutions.
    codec = (FieldSpec("kv", (2, KEYS_AND_VALUES, 8, 512, 250)),)

    def partitions(sessions: int) -> tuple[PartitionSpec, ...]:
        return (
            _ring("steps", step, sessions, MOSHI_STEPS, Section.WINDOWS),
            _state("codec", codec, sessions),
            _workspace(2_500_000_000),  # omni §6
        )

    return Footprint("moshi", partitions, 15_400_000_000, "7.69 billion parameters, bfloat16")  # omni §6: counted


# Parts ----------------------------------------------------------------------------------------------------------------


def _ring(
    name: str, fields: tuple[FieldSpec, ...], sessions: int, session_slots: int, section: Section
) -> PartitionSpec:
    count = sessions * session_slots
    return PartitionSpec(name, PartitionKind.RING, count, fields, session_slots=session_slots, section=section)


def _state(name: str, fields: tuple[FieldSpec, ...], sessions: int) -> PartitionSpec:
    return PartitionSpec(name, PartitionKind.SLOTS, sessions, fields, session_slots=1, section=Section.WINDOWS)


def _pages(name: str, sessions: int, tokens: int, *, layers: int, kv_heads: int, head_dim: int) -> PartitionSpec:
    """Keys and values of a context in bfloat16, before rotation, as the pocket thinker keeps them."""
    pages = -(-tokens // PAGE_TOKENS)
    fields = tuple(FieldSpec(part, (kv_heads, head_dim), "bfloat16", outer=(layers,)) for part in ("k", "v"))
    return PartitionSpec(
        name, PartitionKind.PAGES, sessions * pages, fields, page_tokens=PAGE_TOKENS, session_slots=pages
    )


def _workspace(nbytes: int) -> PartitionSpec:
    fields = (FieldSpec("bytes", (nbytes,), "uint8"),)
    return PartitionSpec("estimate", PartitionKind.SLOTS, 1, fields, section=Section.WORKSPACE)


def _context(model: str, options: Mapping[str, str]) -> int:
    return _chosen("context", _given(model, options, context=KEPT), CONTEXT_TOKENS)


def _given(model: str, options: Mapping[str, str], **defaults: str) -> dict[str, str]:
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise ConfigError(f"{model} has no option {', '.join(unknown)}; it has: {', '.join(defaults) or 'none'}")
    return {**defaults, **options}


def _chosen(name: str, given: Mapping[str, str], allowed: Mapping[str, T]) -> T:
    if given[name] not in allowed:
        raise ConfigError(f"option {name} is {given[name]!r}; it is one of {', '.join(allowed)}")
    return allowed[given[name]]
