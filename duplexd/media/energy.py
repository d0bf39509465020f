"""Voice by loudness alone: for models whose person need not be human, such as the word clock's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEVEL = 10 ** (-42 / 20)  #: RMS of full scale above which a block is voice


class EnergyDetector:
    """`probability` is 1.0 for a loud block and 0.0 for a quiet one. Hears music, doors and keyboards as voice, too."""

    def probability(self, block: NDArray[np.float32]) -> float:
        """Args: block: float32 (n,) in -1..1."""
        return float(np.sqrt(np.mean(block.astype(np.float64) ** 2)) > LEVEL)
