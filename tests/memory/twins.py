"""What the tests of twin histories share: two shapes, and two ledgers with their fences."""

from __future__ import annotations

from duplexd.ids import FenceId, SessionId
from duplexd.memory.guards import Freed
from duplexd.memory.histories import GENERATE, REFINE, Fold, Histories, HistoryShape, HistoryStage
from duplexd.memory.layout import FieldSpec
from duplexd.memory.ledger import SlotLedger
from duplexd.memory.window import Window

ONE, TWO = SessionId(1), SessionId(2)
STAGES: tuple[HistoryStage, HistoryStage] = (GENERATE, REFINE)
FIELDS = (FieldSpec("k", (2, 3, 4), "float64"), FieldSpec("v", (2, 3, 4), "float64"))  #: (layers, tokens, width)
PLAIN = HistoryShape(chunk_tokens=3, anchor_tokens=(3, 2), recent=2, lookahead=3)
COMPRESSING = HistoryShape(chunk_tokens=3, anchor_tokens=(2,), recent=2, lookahead=3, long_term_tokens=2)


class Rig:
    """Two ledgers that know which fences have passed, and a counter of launches."""

    def __init__(self, shape: HistoryShape, *, sessions: int = 2, freed: Freed | None = None) -> None:
        self.shape = shape
        self.passed: set[FenceId] = set()
        self.fence = FenceId(0)
        self.specs = [shape.partition(name, FIELDS, sessions=sessions) for name in ("noisy", "clean")]
        self.ledgers = [SlotLedger(spec, passed=self.passed.__contains__, freed=freed) for spec in self.specs]

    def open(self, session: SessionId = ONE) -> Histories:
        return Histories(self.ledgers[0], self.ledgers[1], session, self.shape)

    def launch(self) -> FenceId:
        self.fence = FenceId(self.fence + 1)
        return self.fence

    def passes(self, *fences: FenceId) -> None:
        for fence in fences:
            self.passed.add(fence)
            for ledger in self.ledgers:
                ledger.fence_passed(fence)

    def chunks_of(self, stage: HistoryStage, window: Window) -> list[int]:
        """Anchors and the long-term slot are 0, as no chunk was named for them."""
        return [self.ledgers[STAGES.index(stage)].check_lease(lease).chunk for lease in window.leases]

    def slide(self, histories: Histories) -> tuple[Fold, ...]:
        return histories.slide(folds=(self.launch(), self.launch()))
