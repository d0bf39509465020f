"""The pocket thinker: a small language model as a stage whose memory is the arena.

1. Keys and values live in the arena's `pages` partition, in the token slots the core names; nothing else is remembered
   between two jobs. Keys lie there before rotation.
2. A job first rotates its past into the workspace, once, then appends and decodes; its new keys and values are written
   to the arena at its end, all of them or, when it fails, none.
3. Jobs of one batch run in step: their tokens share every matrix product. A row that fails does not touch the others.
4. Decoding is greedy with a repetition penalty over the reply: the same job gives the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duplexd import weights as store
from duplexd.errors import ModelError
from duplexd.memory.layout import FieldSpec, PartitionKind, PartitionSpec, Section
from duplexd.models.pocket.checkpoint import DecoderShape, DecoderWeights, load_checkpoint
from duplexd.models.pocket.decoder import Decoder, Row, held_bytes
from duplexd.models.pocket.gguffile import GgufFile
from duplexd.models.pocket.linear import Precision, choose_precision
from duplexd.models.pocket.persona import Persona, load_persona
from duplexd.models.pocket.tokens import Dialect
from duplexd.models.pocket.vocabulary import load_vocabulary
from duplexd.streams.stage import CostModel, Failed, PayloadKind, Role, StageSpec, ThinkJob, ThinkResult
from duplexd.units import ticks_from_ms

log = logging.getLogger(__name__)

PAGES = "pages"
WORKSPACE = "workspace"
CONTEXT_MAX = 1024
BATCH_MAX = 2
REPETITION_PENALTY = 1.15
STOP_PENALTY = 1e4
#: The longest a single token is spoken: a year or a long number read out, digit by digit.
TOKEN_TICKS_MAX = ticks_from_ms(600)


@dataclass
class _Work:
    """One job under way."""

    job: ThinkJob
    row: Row
    slots: npt.NDArray[np.int64]
    tokens: list[int] = field(default_factory=list)
    fault: str = ""

    @property
    def wants_more(self) -> bool:
        return (
            not self.fault
            and len(self.tokens) < self.job.steps
            and not (self.tokens and self.tokens[-1] in self.job.stop)
        )


class Thinker:
    """Stage: ThinkJob -> ThinkResult, or Failed for a job that is wrong or whose numbers are not finite.

    Args:    weights: checkpoint, read when the stage is loaded. precision: "auto" or a `Precision` by name.
             context_max: longest context of a job, in tokens; a longer job fails.
             batch_max: jobs of one launch; each needs one slot of the workspace.
             penalty: repetition penalty over the reply, 1.0 for none.
    Raises:  ModelError for a context beyond what the checkpoint was trained for.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        lane: str = "think",
        precision: str = "auto",
        context_max: int = CONTEXT_MAX,
        batch_max: int = BATCH_MAX,
        penalty: float = REPETITION_PENALTY,
        device: str = "cpu",
    ) -> None:
        if context_max > weights.shape.context_max:
            raise ModelError(f"{weights.path} was trained for {weights.shape.context_max} tokens, not {context_max}")
        self.shape: DecoderShape = weights.shape
        self.context_max = context_max
        self.precision: Precision = choose_precision(precision, weights, torch.device(device))
        self._weights = weights
        self._penalty = penalty
        self._device = torch.device(device)
        self.spec = StageSpec(
            name="thinker",
            role=Role.THINK,
            lane=lane,
            takes=PayloadKind.TOKEN,
            gives=PayloadKind.TOKEN,
            # SmolLM2 in int4 on one core; a unit is a decoded token, or about four prefilled ones.
            cost=CostModel(fixed_us=2_000, per_row_us=1_000, per_unit_us=12_000),
            batch_max=batch_max,
        )

    def page_fields(self) -> tuple[FieldSpec, ...]:
        """Fields of the `pages` partition: keys before rotation, and values."""
        shape, dtype = self.shape, _name(self.precision.dtype)
        return tuple(
            FieldSpec(name=name, shape=(shape.kv_heads, shape.head_dim), dtype=dtype, outer=(shape.layers,))
            for name in ("k", "v")
        )

    def workspace(self) -> PartitionSpec:
        """Scratch of the running batch: rotated keys, and values, for one job per slot."""
        shape = self.shape
        size = (shape.layers, shape.kv_heads, self.context_max, shape.head_dim)
        dtype = "float64" if self.precision is Precision.FLOAT64 else "float32"
        fields = tuple(FieldSpec(name=name, shape=size, dtype=dtype) for name in ("keys", "values"))
        return PartitionSpec(
            name=WORKSPACE,
            kind=PartitionKind.SLOTS,
            count=self.spec.batch_max,
            fields=fields,
            section=Section.WORKSPACE,
        )

    @property
    def weights_bytes(self) -> int:
        """What the loaded decoder will hold; read off the header."""
        return held_bytes(self._weights, self.precision)

    def load(self, arena: Any) -> None:
        """Read and pack the weights (two seconds for 135 million), take the arena's views."""
        with torch.inference_mode():
            self.decoder = Decoder(
                self._weights, precision=self.precision, context_max=self.context_max, device=self._device
            )
        self._keys: Tensor = self._view(arena, PAGES, "k", slot_axis=1)
        self._values: Tensor = self._view(arena, PAGES, "v", slot_axis=1)
        self._rotated: Tensor = self._view(arena, WORKSPACE, "keys", slot_axis=0)
        self._copied: Tensor = self._view(arena, WORKSPACE, "values", slot_axis=0)
        log.info("thinker %s: %s, precision %s", self._weights.path.name, self.shape.architecture, self.precision.value)

    def _view(self, arena: Any, partition: str, name: str, *, slot_axis: int) -> Tensor:
        view: Tensor = arena.field(partition, name)
        specs = self.page_fields() if partition == PAGES else self.workspace().fields
        spec = next(one for one in specs if one.name == name)
        found = list(view.shape)
        found.pop(slot_axis)
        if found != [*spec.outer, *spec.shape] or _name(view.dtype) != spec.dtype:
            raise ModelError(
                f"arena field {partition}.{name} is {tuple(view.shape)} {view.dtype}; the thinker needs "
                f"{(*spec.outer, *spec.shape)} {spec.dtype} with slots at dimension {slot_axis}"
            )
        return view

    def run(self, jobs: Sequence[ThinkJob], media: Any) -> list[ThinkResult | Failed]:
        """Append and decode; one result per job, in order. `media` is not used."""
        if len(jobs) > self.spec.batch_max:
            raise ValueError(f"{len(jobs)} jobs in one launch of the thinker; at most {self.spec.batch_max}")
        with torch.inference_mode():
            begun = [self._begin(job, index) for index, job in enumerate(jobs)]
            self._decode([work for work in begun if isinstance(work, _Work)])
            return [self._end(work) if isinstance(work, _Work) else work for work in begun]

    def logits(self, job: ThinkJob) -> Tensor:
        """Logits of the token after the job's feed, (vocabulary,), without penalty; nothing is kept.

        Raises:  ValueError for a job that `run` would fail.
        """
        with torch.inference_mode():
            work = self._begin(job, 0)
            if isinstance(work, Failed):
                raise ValueError(work.reason)
            states = self.decoder.forward([work.row], [job.feed], states=True)
            return self.decoder.head.logits(states)[0] if states is not None else torch.empty(0)

    def _begin(self, job: ThinkJob, index: int) -> _Work | Failed:
        slots = np.frombuffer(job.slots, dtype="<i8")
        fault = self._fault(job, slots)
        if fault:
            return Failed(session=job.session, reason=fault)
        new = len(slots) - job.past
        shape = self.shape
        fresh = torch.empty(
            (shape.layers, new, shape.kv_heads, shape.head_dim), dtype=self._keys.dtype, device=self._device
        )
        row = Row(keys=self._rotated[index], values=self._copied[index], fresh_keys=fresh, past=job.past)
        past = slots[: job.past]
        self.decoder.recall(row, _gather(self._keys, past), _gather(self._values, past))
        return _Work(job=job, row=row, slots=slots)

    def _fault(self, job: ThinkJob, slots: npt.NDArray[np.int64]) -> str:
        """What is wrong with a job, in a sentence; empty when nothing is."""
        needed = job.past + len(job.feed) + max(0, job.steps - 1)
        total = self._keys.shape[1]
        rules = [
            (job.past < 0 or job.steps < 0, f"past {job.past} and steps {job.steps} must not be negative"),
            (not job.feed, "a job needs at least one token to feed"),
            (len(slots) != needed, f"{len(slots)} slots for a job that needs {needed}"),
            (needed > self.context_max, f"a context of {needed} tokens; at most {self.context_max}"),
            (bool(len(slots)) and not (slots.min() >= 0 and slots.max() < total), f"slots outside 0..{total - 1}"),
            (
                any(not 0 <= token < self.shape.vocabulary for token in (*job.feed, *job.reply)),
                f"tokens outside 0..{self.shape.vocabulary - 1}",
            ),
        ]
        return next((sentence for broken, sentence in rules if broken), "")

    def _decode(self, works: list[_Work]) -> None:
        feeds = [work.job.feed for work in works]
        while works:
            states = self.decoder.forward([w.row for w in works], feeds, states=any(w.job.steps for w in works))
            if states is not None:
                for work, hidden in zip(works, states, strict=True):
                    self._choose(work, hidden)
            works = [work for work in works if work.wants_more]
            feeds = [(work.tokens[-1],) for work in works]

    def _choose(self, work: _Work, hidden: Tensor) -> None:
        if not work.job.steps:
            return
        # The int8 head turns NaN into an ordinary token, so look before it does.
        if not bool(torch.isfinite(hidden).all()):
            work.fault = "the hidden state is not finite"
            return
        said = list(dict.fromkeys((*work.job.reply, *work.tokens)))
        penalty = self._penalty
        if not said:
            # A reply that ends before it begins leaves a person waiting for nothing: the first token is a word.
            said, penalty = list(work.job.stop), STOP_PENALTY
        already = torch.tensor(said, device=self._device) if said else None
        work.tokens.append(self.decoder.head.best(hidden, already, penalty))

    def _end(self, work: _Work) -> ThinkResult | Failed:
        if work.fault:
            return Failed(session=work.job.session, reason=work.fault)
        row, start = work.row, work.job.past
        # Fewer than the slots given when a stop came early.
        new = work.slots[start : row.past]
        _scatter(self._keys, new, row.fresh_keys[:, : row.fed])
        _scatter(self._values, new, row.values[:, :, start : row.past].transpose(1, 2))
        return ThinkResult(session=work.job.session, tokens=tuple(work.tokens))


def _contiguous(slots: npt.NDArray[np.int64]) -> bool:
    return bool(len(slots) == 0 or (slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all()))


def _gather(field: Tensor, slots: npt.NDArray[np.int64]) -> Tensor:
    """(layers, tokens, ...) at the given token slots; a view when they lie in a row."""
    if _contiguous(slots):
        start = int(slots[0]) if len(slots) else 0
        return field[:, start : start + len(slots)]
    return field.index_select(1, torch.from_numpy(slots.copy()).to(field.device))


def _scatter(field: Tensor, slots: npt.NDArray[np.int64], source: Tensor) -> None:
    if _contiguous(slots):
        start = int(slots[0]) if len(slots) else 0
        field[:, start : start + len(slots)] = source
    else:
        field.index_copy_(1, torch.from_numpy(slots.copy()).to(field.device), source.to(field.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Loading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mind:
    """A thinker and the language it is spoken to in."""

    thinker: Thinker
    dialect: Dialect


def load_thinker(path: Path | None = None, *, persona: Persona | None = None, **options: Any) -> Mind:
    """The thinker of a local checkpoint, or of the default one.

    Args:    path: a .gguf file or a Hugging Face folder; None for SmolLM2-135M-Instruct from the weights store.
             persona: who it is; None for the one in the package. options: keywords of `Thinker`.
    Raises:  ModelError when the checkpoint cannot be computed or has no known chat template, WeightsError when the
             default is not in the store.
    """
    path = store.path("smollm2") if path is None else path
    gguf = GgufFile(path) if path.is_file() else None
    weights = load_checkpoint(path, gguf=gguf)
    dialect = Dialect(load_vocabulary(path, gguf=gguf), persona or load_persona())
    return Mind(thinker=Thinker(weights, **options), dialect=dialect)
