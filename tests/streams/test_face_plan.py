"""What a family may promise of its face."""

from __future__ import annotations

import msgspec
import pytest

from duplexd.errors import ConfigError
from duplexd.models.clock.flash import FLASH, face_plan


def test_a_face_whose_history_folds_is_refused_where_it_is_planned() -> None:
    """Nobody orders its folds: the first slide would end the session, a minute into the conversation."""
    plan = face_plan(FLASH)
    assert plan is not None
    history = msgspec.structs.replace(plan.history, long_term_tokens=1)

    with pytest.raises(ConfigError, match="long_term_tokens to 0"):
        msgspec.structs.replace(plan, history=history)
