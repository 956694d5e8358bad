"""What a lane counts: the figures of the protocol's statistics, and why tickets ended otherwise. Plain integers, written per batch.

No locks: one loop writes, and whoever reads on that loop sees whole figures. Counts of the scheduler's own (accepted, dispatch
reasons, what waits) are in its snapshot and not kept twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.engine.outcome import Run

__all__ = ["BatchFigures", "Figure", "Recorder"]


class Figure:
    """How often, and how long altogether."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, count: int, ns: int) -> None:
        """`count` more, which took `ns` nanoseconds together."""
        self.count += count
        self.ns += ns

    def as_dict(self) -> dict[str, int]:
        """As the protocol writes it."""
        return {"count": self.count, "ns": self.ns}

    def __repr__(self) -> str:
        return f"Figure(count={self.count}, ns={self.ns})"


class BatchFigures:
    """Executions of one batch size: how many, and nanoseconds of their steps."""

    __slots__ = ("executions", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.executions = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0

    def as_dict(self, batch_size: int) -> dict[str, Any]:
        """As the protocol writes it."""
        return {
            "batch_size": batch_size,
            "compute_input": {"count": self.executions, "ns": self.input_ns},
            "compute_infer": {"count": self.executions, "ns": self.infer_ns},
            "compute_output": {"count": self.executions, "ns": self.output_ns},
        }


class Recorder:
    """One lane's figures.

    `executions` counts runs of the model that gave an answer, and `inferences` the rows in them, whoever they were for: so
    `inferences` = sum over batch sizes of size x executions of that size. Requests are counted where they end: `success`, `fail`,
    `expired`, `cancelled` (while they waited), `dropped` (could not be answered in time any more), `discarded` (given up while they
    ran: their rows were computed for nobody), `refused` by reason. Times of `queue` and `compute_*` are those of answered requests,
    each with its whole batch's compute time.

    `bisections` counts batches that were taken apart because the model raised, `reruns` what was run again for it, `ran_alone` the
    requests that were run alone because their input is known to make the model raise, `out_of_memory` runs that memory did not
    suffice for.
    """

    __slots__ = (
        "_wall_clock",
        "batch_sizes",
        "bisections",
        "cancelled",
        "compute_infer",
        "compute_input",
        "compute_output",
        "discarded",
        "discarded_rows",
        "dropped",
        "executions",
        "expired",
        "fail",
        "inferences",
        "last_inference_ms",
        "loop_errors",
        "out_of_memory",
        "padded_tokens",
        "queue",
        "ran_alone",
        "refused",
        "reruns",
        "success",
        "tokens",
        "workers_lost",
    )

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self.success = Figure()
        self.fail = Figure()
        self.queue = Figure()
        self.compute_input = Figure()
        self.compute_infer = Figure()
        self.compute_output = Figure()
        self.batch_sizes: dict[int, BatchFigures] = {}
        self.executions = 0
        self.inferences = 0
        self.last_inference_ms = 0
        self.expired = 0
        self.cancelled = 0
        self.dropped = 0
        self.discarded = 0
        self.discarded_rows = 0
        self.refused: dict[str, int] = {}
        self.bisections = 0
        self.reruns = 0
        self.ran_alone = 0
        self.out_of_memory = 0
        self.loop_errors = 0
        self.tokens = 0
        self.padded_tokens = 0
        self.workers_lost = 0

    def executed(self, runs: Sequence[Run]) -> None:
        """The model ran and answered."""
        for run in runs:
            rows = run.rows
            figures = self.batch_sizes.get(rows)
            if figures is None:
                figures = self.batch_sizes[rows] = BatchFigures()
            figures.executions += 1
            figures.input_ns += run.input_ns
            figures.infer_ns += run.infer_ns
            figures.output_ns += run.output_ns
            self.executions += 1
            self.inferences += rows
            if run.padded_tokens:
                self.tokens += run.tokens
                self.padded_tokens += run.padded_tokens
        if runs:
            self.last_inference_ms = int(self._wall_clock() * 1000)

    def succeeded(self, requests: int, accepted_sum_ns: int, started_ns: int, done_ns: int, runs: Sequence[Run]) -> None:
        """Requests of one batch were answered; `accepted_sum_ns` is the sum of the times at which they were accepted."""
        if not requests:
            return
        self.success.add(requests, requests * done_ns - accepted_sum_ns)
        self.queue.add(requests, requests * started_ns - accepted_sum_ns)
        input_ns = infer_ns = output_ns = 0
        for run in runs:
            input_ns += run.input_ns
            infer_ns += run.infer_ns
            output_ns += run.output_ns
        self.compute_input.add(requests, requests * input_ns)
        self.compute_infer.add(requests, requests * infer_ns)
        self.compute_output.add(requests, requests * output_ns)

    def failed(self, requests: int, accepted_sum_ns: int, done_ns: int) -> None:
        """Requests failed, by the model or with their executor."""
        if requests:
            self.fail.add(requests, requests * done_ns - accepted_sum_ns)

    def discard(self, requests: int, rows: int) -> None:
        """Rows came back for which nobody waits any more."""
        self.discarded += requests
        self.discarded_rows += rows

    def refuse(self, reason: str) -> None:
        """A ticket was not accepted."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def mean_batch_rows(self) -> float:
        """Rows per execution; 0 before the first."""
        return self.inferences / self.executions if self.executions else 0.0

    def padding_factor(self) -> float:
        """What was run over what requests brought; 1 where nothing was padded."""
        return self.padded_tokens / self.tokens if self.tokens else 1.0

    def as_oip(self, name: str, version: str) -> dict[str, Any]:
        """One entry of the statistics extension's `model_stats`."""
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": self.executions,
            "inference_stats": {
                "success": self.success.as_dict(),
                "fail": self.fail.as_dict(),
                "queue": self.queue.as_dict(),
                "compute_input": self.compute_input.as_dict(),
                "compute_infer": self.compute_infer.as_dict(),
                "compute_output": self.compute_output.as_dict(),
                "cache_hit": {"count": 0, "ns": 0},
                "cache_miss": {"count": 0, "ns": 0},
            },
            "batch_stats": [figures.as_dict(rows) for rows, figures in sorted(self.batch_sizes.items())],
        }
