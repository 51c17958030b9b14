"""Routes on their way to the files: kept on the host, and written by a thread while training goes on."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from foldray.model import ChosenExperts
from trainers.folders import Folder
from trainers.routes.files import About, FileName, narrow

_MOST = 64 << 20  # bytes that wait for the next file


class RouteWriter:
    """Records the routes of this rank's tokens.

    Args:
        folder: the run's folder of routes.
        attempt: milliseconds since 1970 at which the attempt began, the same on all ranks.
    """

    def __init__(self, folder: Folder, rank: int, attempt: int, about: About):
        self._folder, self._rank, self._attempt, self._about = folder, rank, attempt, about
        self._steps: list[int] = []
        self._counts: list[np.ndarray] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, "routes")
        self._writing: Future[None] | None = None

    def add(
        self,
        step: int,
        layers: Sequence[int],
        count_ME: torch.Tensor,
        chosen: Sequence[ChosenExperts] = (),
        sequences: Sequence[int] = (),
    ) -> None:
        """Keep a step.

        Args:
            layers: this rank's MoE blocks.
            count_ME: assignments of this rank's tokens, for all MoE blocks of the model.
            chosen: the experts of the tokens of each part of a micro-batch; none keeps the counts alone.
            sequences: the places in the step's batch of the sequences of all these parts together.
        """
        rows = [self._about.layers.index(layer) for layer in layers]
        self._arrays["layers"] = np.array(layers, np.int64)
        self._steps.append(step)
        self._counts.append(count_ME.cpu().numpy()[rows])
        if chosen:
            expert_MBsK = torch.cat([part.expert_MBsK for part in chosen], dim=1).cpu().numpy()
            self._arrays["positions"] = chosen[0].position_s.cpu().numpy()
            self._arrays[f"experts_{step}"] = narrow(expert_MBsK, self._about.experts - 1)
            self._arrays[f"sequences_{step}"] = np.array(sequences, np.int64)
            self._bytes += self._arrays[f"experts_{step}"].nbytes
        self._bytes += self._counts[-1].nbytes
        if self._bytes >= _MOST:
            self.flush()

    def flush(self) -> None:
        """Start to write what is kept. An error of the file before is raised here."""
        self._settle()
        if not self._steps:
            return
        counts = np.stack(self._counts)
        arrays = {**self._arrays, "steps": np.array(self._steps, np.int64), "counts": narrow(counts, int(counts.max(initial=0)))}
        name = str(FileName(self._attempt, self._steps[-1], self._rank))
        self._steps, self._counts, self._arrays, self._bytes = [], [], {}, 0
        self._writing = self._thread.submit(self._write, name, arrays)

    def close(self) -> None:
        """Write what is kept, and wait until it is written."""
        self.flush()
        self._settle()
        self._thread.shutdown()

    def _settle(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        self._folder.write(name, content.getvalue())
