"""The pocket thinker: a small language model as a stage whose memory is the arena.

1. Keys and values live in the arena's `pages` partition, in the token slots the core names; nothing else is remembered
   between two jobs. Keys lie there before rotation.
2. A job first recalls its past into the workspace, once, then appends and decodes; its new keys and values are written
   to the arena at its end, all of them or, when it fails, none (streams/attention.py).
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
from duplexd.memory.arena import Shelf
from duplexd.memory.layout import FieldSpec, PartitionSpec, shelf_partition
from duplexd.models.average import fold_tokens
from duplexd.models.pocket.checkpoint import DecoderShape, DecoderWeights, load_checkpoint
from duplexd.models.pocket.decoder import Decoder, attention_of, placed_sizes, rough_bytes
from duplexd.models.pocket.gguffile import GgufFile
from duplexd.models.pocket.linear import Precision, choose_precision
from duplexd.models.pocket.persona import Persona, load_persona
from duplexd.models.pocket.tokens import Dialect
from duplexd.models.pocket.vocabulary import load_vocabulary
from duplexd.streams.attention import PAGES, Row
from duplexd.streams.stage import CostModel, Failed, PayloadKind, Role, StageSpec, ThinkJob, ThinkResult
from duplexd.units import ticks_from_ms

log = logging.getLogger(__name__)

CONTEXT_MAX = 1024
BATCH_MAX = 4
REPETITION_PENALTY = 1.15
STOP_PENALTY = 1e4
#: Share of the older memory at every fold into the long-term tokens: what slid out four exchanges ago counts a third.
LONG_TERM_KEEP = 0.75
#: The longest a single token is spoken: a year or a long number read out, digit by digit.
TOKEN_TICKS_MAX = ticks_from_ms(600)


@dataclass
class _Work:
    """One job under way."""

    job: ThinkJob
    row: Row  #: the tokens to append next
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
             attention: "auto", or an implementation by name (`choose_attention`).
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
        attention: str = "auto",
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
        self.attention = attention_of(
            weights.shape, attention, context_max=context_max, precision=self.precision, device=self._device
        )
        table = self.attention.rotary.table.nbytes
        self._shelf = shelf_partition("thinker weights", [table, *placed_sizes(weights, self.precision)])
        self.spec = StageSpec(
            name="thinker",
            role=Role.THINK,
            lane=lane,
            takes=PayloadKind.TOKEN,
            gives=PayloadKind.TOKEN,
            # SmolLM2 in int4 on one core; a unit is a decoded token, or about four prefilled ones.
            cost=CostModel(fixed_us=2_000, per_row_us=1_000, per_unit_us=12_000),
            batch_max=batch_max,
            load=0.09,
        )

    def page_fields(self) -> tuple[FieldSpec, ...]:
        """Fields of the `pages` partition: keys before rotation, and values."""
        return self.attention.page_fields()

    def workspace(self, sessions: int = BATCH_MAX) -> PartitionSpec:
        """Scratch of the running batch, one slot a job; no more than there are sessions, each has one job at a time."""
        return self.attention.workspace(min(sessions, self.spec.batch_max))

    def shelf(self) -> PartitionSpec:
        """The weights' partition: all of the decoder but its rough head, and the rotary table."""
        return self._shelf

    @property
    def beside_bytes(self) -> int:
        """Of the weights, what does not lie in the arena: the rough head."""
        return rough_bytes(self._weights, self.precision)

    def load(self, arena: Any) -> None:
        """Read and pack the weights onto their shelf (two seconds for 135 million), take the arena's views.

        Raises:  ModelError when the arena is another thinker's, or the checkpoint is not what its header promised.
        """
        self.attention.load(arena)
        shelf = Shelf(arena, self._shelf)
        with torch.inference_mode():
            self.attention.rotary.table = shelf.place(self.attention.rotary.table)
            self.decoder = Decoder(
                self._weights, self.attention, precision=self.precision, device=self._device, place=shelf.place
            )
        shelf.close()
        self._slots_total = arena.layout.partitions[PAGES].rows
        log.info("thinker %s: %s, precision %s", self._weights.path.name, self.shape.architecture, self.precision.value)

    def run(self, jobs: Sequence[ThinkJob], media: Any) -> list[ThinkResult | Failed]:
        """Append and decode; one result per job, in order. `media` is not used."""
        if len(jobs) > self.spec.batch_max:
            raise ValueError(f"{len(jobs)} jobs in one launch of the thinker; at most {self.spec.batch_max}")
        with torch.inference_mode():
            begun = [self._begin(job, index) for index, job in enumerate(jobs)]
            works = [work for work in begun if isinstance(work, _Work)]
            self._decode(sorted(works, key=lambda work: len(work.job.feed)))  # short feeds first, see Decoder.forward
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
        table = job.slots
        slots = np.frombuffer(table, dtype="<i8")
        fault = self._fault(job, slots)
        if fault:
            return Failed(session=job.session, reason=fault)
        for fold in job.folds:
            sources, target = (_index(slots, self._device) for slots in (fold.sources, fold.target))
            fold_tokens(self.attention.pages, sources, target, first=fold.first, keep=LONG_TERM_KEEP)
        row = Row(table, job.past, len(job.feed), index)
        self.attention.recall(row)
        return _Work(job=job, row=row)

    def _fault(self, job: ThinkJob, slots: npt.NDArray[np.int64]) -> str:
        """What is wrong with a job, in a sentence; empty when nothing is."""
        needed = job.past + len(job.feed) + max(0, job.steps - 1)
        total = self._slots_total
        rules = [
            (job.past < 0 or job.steps < 0, f"past {job.past} and steps {job.steps} must not be negative"),
            (
                any(not _within(slots, total) for fold in job.folds for slots in (fold.sources, fold.target)),
                f"folds slots outside 0..{total - 1}, or none",
            ),
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
                self._choose(works, states)
            for work in works:
                work.row = work.row.then(1)
            works = [work for work in works if work.wants_more]
            feeds = [(work.tokens[-1],) for work in works]

    def _choose(self, works: Sequence[_Work], states: Tensor) -> None:
        """The next token of every row that decodes; the device is waited for twice, however many rows there are."""
        # The int8 head turns NaN into an ordinary token, so look before it does.
        sound = torch.isfinite(states).all(1).tolist()
        chosen: list[tuple[_Work, Tensor]] = []
        for work, hidden, fine in zip(works, states, sound, strict=True):
            if work.job.steps and not fine:
                work.fault = "the hidden state is not finite"
            elif work.job.steps:
                chosen.append((work, self._best(work, hidden)))
        if chosen:
            tokens = torch.stack([token for _, token in chosen]).tolist()
            for (work, _), token in zip(chosen, tokens, strict=True):
                work.tokens.append(token)

    def _best(self, work: _Work, hidden: Tensor) -> Tensor:
        said = list(dict.fromkeys((*work.job.reply, *work.tokens)))
        penalty = self._penalty
        if not said:
            # A reply that ends before it begins leaves a person waiting for nothing: the first token is a word.
            said, penalty = list(work.job.stop), STOP_PENALTY
        already = torch.tensor(said, device=self._device) if said else None
        return self.decoder.head.best(hidden, already, penalty)

    def _end(self, work: _Work) -> ThinkResult | Failed:
        if work.fault:
            return Failed(session=work.job.session, reason=work.fault)
        # Fewer than the slots given when a stop came early.
        self.attention.keep(Row(work.row.slots, work.job.past, work.row.past - work.job.past, work.row.place))
        return ThinkResult(session=work.job.session, tokens=tuple(work.tokens))


def _index(slots: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(slots, "<i8").copy()).to(device)


def _within(slots: bytes, total: int) -> bool:
    found = np.frombuffer(slots, "<i8")
    return bool(len(found)) and bool(found.min() >= 0) and bool(found.max() < total)


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
