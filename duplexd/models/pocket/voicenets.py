"""The two networks of the pocket voice (hibari 'heart'), as plain modules with the weights of its ONNX file.

    ids --prosody--> durations (25 ms each), F0 and energy (12.5 ms each)
    ids --acoustic.text--> 128 channels, spread over the durations
    128 + log F0 + energy = 130 channels: the latents, 80 frames a second
    latents --acoustic.dec_in, dec, head--> 5 x 601 spectral values per frame (see `dsp.py`)

Parameter names are those of the file, so that loading can be strict: a renamed or missing weight is an error.
The file is int8; weights are dequantised to float32 once.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duplexd.errors import ModelError
from duplexd.models.pocket.onnxfile import Node, OnnxGraph, read_onnx

PHONEMES = 178
LATENT_CHANNELS = 130
DECODER_CHANNELS = 256
DECODER_BLOCKS = 8
BINS = 601
KERNEL = 7
#: Frames that one seven-tap convolution looks to each side.
REACH = KERNEL // 2
#: Frames that a spectrum depends on, each side: the input convolution and every block look REACH further.
CONTEXT = REACH * (1 + DECODER_BLOCKS)

_HEADS = 2


class ConvNeXt(nn.Module):
    """Depthwise convolution, then a per-frame network, added to the input. (1, channels, frames) in and out."""

    def __init__(self, channels: int, hidden: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.pad = dilation * (kernel // 2)
        self.dw = nn.Conv1d(channels, channels, kernel, dilation=dilation, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.pw1 = nn.Linear(channels, hidden)
        self.pw2 = nn.Linear(hidden, channels)
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Whole sequence; the outside counts as zeros."""
        return self.inner(F.pad(x, (self.pad, self.pad)))

    def inner(self, x: Tensor) -> Tensor:
        """Without padding: `pad` frames fewer come out on each side."""
        y = self.dw(x).transpose(1, 2)
        y = self.pw2(F.gelu(self.pw1(self.norm(y)))) * self.gamma
        out: Tensor = x[:, :, self.pad : x.shape[2] - self.pad] + y.transpose(1, 2)
        return out


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * channels, channels))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * channels))
        self.out_proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, channels = x.shape
        joined = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = joined.view(rows, length, 3, _HEADS, channels // _HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out_proj(y.transpose(1, 2).reshape(rows, length, channels))
        return out


class TransformerLayer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.self_attn = Attention(channels)
        self.linear1 = nn.Linear(channels, 2 * channels)
        self.linear2 = nn.Linear(2 * channels, channels)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        y: Tensor = self.linear2(F.gelu(self.linear1(self.norm2(x))))
        return x + y


class TextEncoder(nn.Module):
    """Phoneme ids (1, n) -> (1, channels, n). One layer is applied `rounds` times; there are no positions."""

    def __init__(self, channels: int, rounds: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(PHONEMES, channels)
        self.convs = nn.ModuleList([ConvNeXt(channels, 2 * channels, 5) for _ in range(2)])
        self.attn = TransformerLayer(channels)
        self.norm = nn.LayerNorm(channels)
        self.rounds = rounds

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids).transpose(1, 2)
        for conv in self.convs:
            x = conv(x)
        x = x.transpose(1, 2)
        for _ in range(self.rounds):
            x = self.attn(x)
        out: Tensor = self.norm(x).transpose(1, 2)
        return out


class ProsodyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        channels = 192
        self.text = TextEncoder(channels, rounds=6)
        self.dur = nn.Sequential(nn.Conv1d(channels, channels, 3, padding=1), nn.GELU(), nn.Conv1d(channels, 1, 1))
        self.pro_in = nn.Conv1d(channels, channels, 1)
        self.pro = nn.ModuleList([ConvNeXt(channels, 2 * channels, 7, d) for d in (1, 2, 4, 8, 1, 2)])
        self.pro_out = nn.Conv1d(channels, 4, 1)

    def durations(self, encoded: Tensor, *, speed: float) -> Tensor:
        """Steps of 25 ms per phoneme, at least one; int64 (n,)."""
        steps = torch.exp(self.dur(encoded))[0, 0] - 1
        return torch.clamp(torch.round(steps / speed), min=1).long()

    def contour(self, spread: Tensor) -> tuple[Tensor, Tensor]:
        """F0 in Hz and energy, two frames for each of the T steps: (2T,) each."""
        x = self.pro_in(spread)
        for block in self.pro:
            x = block(x)
        pairs = self.pro_out(x)[0].view(2, 2, -1).transpose(1, 2).reshape(2, -1)
        return pairs[0] * 100.0, pairs[1] * 5.0


class AcousticText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = TextEncoder(128, rounds=4)


class TalkNet(nn.Module):
    """Phoneme ids -> durations, F0 and latents of the whole clause."""

    def __init__(self) -> None:
        super().__init__()
        self.pn = ProsodyNet()
        self.m = AcousticText()

    def durations(self, ids: Tensor, *, speed: float = 1.0) -> tuple[Tensor, Tensor]:
        """(n,) steps of 25 ms, and the encoded text that `latents` takes: the length is known before the rest runs."""
        encoded = self.pn.text(ids)
        return self.pn.durations(encoded, speed=speed), encoded

    def latents(self, ids: Tensor, encoded: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """F0 (frames,) in Hz and latents (130, frames), with frames = 2 * sum(steps)."""
        index = torch.repeat_interleave(torch.arange(len(steps), device=steps.device), steps)
        f0, energy = self.pn.contour(encoded[:, :, index])
        text = self.m.text(ids)[0, :, index].repeat_interleave(2, dim=1)
        return f0, torch.cat([text, (torch.log1p(F.relu(f0)) / 5.0)[None], (energy / 5.0)[None]])


class SpectrumNet(nn.Module):
    """Latents -> spectra, in one go or in steps that keep the last frames of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dec_in = nn.Conv1d(LATENT_CHANNELS, DECODER_CHANNELS, KERNEL)
        self.dec = nn.ModuleList(
            [ConvNeXt(DECODER_CHANNELS, 3 * DECODER_CHANNELS, KERNEL) for _ in range(DECODER_BLOCKS)]
        )
        self.dec_norm = nn.LayerNorm(DECODER_CHANNELS)
        self.head = nn.Linear(DECODER_CHANNELS, 5 * BINS)

    def layer(self, index: int, x: Tensor) -> Tensor:
        """Layer 0 is the input convolution, 1..8 the blocks; each shortens (1, c, t) by REACH on both sides."""
        out: Tensor = self.dec_in(x) if index == 0 else self.dec[index - 1].inner(x)  # type: ignore[operator]
        return out

    def spectra(self, x: Tensor) -> Tensor:
        """(1, 256, t) of the last layer -> (t, 5, 601).

        The five are log magnitude and turn of the pulses, log magnitude of the noise, and log magnitude and phase of a
        free part.
        """
        out: Tensor = self.head(self.dec_norm(x[0].T))
        return out.view(-1, 5, BINS)


def empty_nets() -> tuple[TalkNet, SpectrumNet]:
    """Both halves of the voice without weights: shapes that take no memory."""
    with torch.device("meta"):
        return TalkNet(), SpectrumNet()


def load_nets(path: Path) -> tuple[TalkNet, SpectrumNet]:
    """Both halves of the voice from its ONNX file, in evaluation mode.

    Raises: ModelError when the file is not this voice: a weight is missing, unknown or of another shape.
    """
    weights = dequantised(read_onnx(path))
    talk, spectrum = TalkNet(), SpectrumNet()
    own = {name: value for name, value in weights.items() if name.startswith(("pn.", "m.text."))}
    rest = {name.removeprefix("m."): value for name, value in weights.items() if name not in own}
    try:
        talk.load_state_dict(own, strict=True)
        spectrum.load_state_dict(rest, strict=True)
    except RuntimeError as fault:
        raise ModelError(f"{path} is not the pocket voice: {fault}") from fault
    for net in (talk, spectrum):
        net.eval().requires_grad_(False)
    return talk, spectrum


def dequantised(graph: OnnxGraph) -> dict[str, Tensor]:
    """float32 weights by parameter name.

    Dynamic quantisation took the names from the weights of its matrix products; each is named after the bias that is
    added to it: product -> cast -> scale -> add.
    """
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    weights = {
        name: torch.from_numpy(value.copy())
        for name, value in graph.initialisers.items()
        if name.startswith(("m.", "pn."))
    }
    for node in graph.nodes:
        if node.op == "MatMulInteger":
            bias = _bias_of(node, readers, graph)
            weights[_weight_name(bias)] = _dequantise(node.inputs[1], graph)
    return weights


def _bias_of(product: Node, readers: dict[str, list[Node]], graph: OnnxGraph) -> str:
    node = product
    for op in ("Cast", "Mul", "Add"):
        found = [reader for reader in readers.get(node.outputs[0], []) if reader.op == op]
        if len(found) != 1:
            raise ModelError(f"the product of '{product.inputs[1]}' is not followed by one {op}")
        node = found[0]
    names = [name for name in node.inputs if name in graph.initialisers]
    if len(names) != 1:
        raise ModelError(f"the product of '{product.inputs[1]}' has no bias of its own")
    return names[0]


def _weight_name(bias: str) -> str:
    return bias.removesuffix("bias") + "weight"


def _dequantise(name: str, graph: OnnxGraph) -> Tensor:
    """(out, in) float32; the file keeps (in, out) with one scale and zero point."""
    base = name.removesuffix("_quantized")
    whole = graph.initialisers[name].astype("f4") - graph.initialisers[base + "_zero_point"].astype("f4")
    return torch.from_numpy((whole * graph.initialisers[base + "_scale"]).T.copy())
