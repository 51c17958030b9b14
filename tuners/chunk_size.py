"""How many bytes of gradients should travel at once: FlowMoE's Bayesian search for S_p (section 4.1), as asking and telling."""

from __future__ import annotations

import optuna

_STARTS = 3  # random ones; Optuna's default of 10 would leave no sample to the model


class ChunkSizeSearch:
    """Proposes sizes, learns what a step took with each, and ranks those that were measured.

    Sizes are searched on a logarithmic scale by a Gaussian process: small chunks pay for their starts, large ones leave gaps.

    Args:
        smallest, largest: bytes.
        samples: sizes to try in all.
        seed: the same one gives the same proposals for the same answers.
    """

    def __init__(self, smallest: int, largest: int, samples: int = 8, seed: int = 0):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.smallest, self.largest, self.samples = smallest, max(smallest, largest), samples
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=_STARTS)
        self._study = optuna.create_study(sampler=sampler)
        self._asked: dict[int, optuna.Trial] = {}
        self.measured: list[tuple[int, float]] = []

    def ask(self) -> int | None:
        """The next size to try, in bytes; None when all samples have been taken."""
        if len(self.measured) == self.samples:
            return None
        trial = self._study.ask()
        size = trial.suggest_int("sp_bytes", self.smallest, self.largest, log=True)
        self._asked[size] = trial
        return size

    def tell(self, size: int, seconds: float) -> None:
        """What a step took with a size that was asked."""
        self._study.tell(self._asked.pop(size), seconds)
        self.measured.append((size, seconds))

    @property
    def ranked(self) -> list[int]:
        """The sizes by the shortest step *measured* with each, not by what the model believes; the fastest first."""
        return list(dict.fromkeys(size for size, _ in sorted(self.measured, key=lambda each: each[1])))
