"""Rows of figures, their verdicts, the table for people and the file for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NOISY_SHARE = 0.03

Verdict = Literal["pass", "miss", "info", "failed"]


@dataclass(frozen=True)
class Budget:
    """A limit on a row's judged value, from above or from below."""

    limit: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is within the budget."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `prototype` and `shoal` are medians in `unit`; `judged` is what the budget limits: a ratio, unless `judged_unit` names a unit.
    `spread` is the smallest and the largest judged value of the single rounds. `foreign_share` is the worst share of the server's
    core that others took (None: not measured). `details` goes into the file only. `error` says why there are no figures.
    """

    name: str
    work: str
    unit: str = ""
    prototype: float | None = None
    shoal: float | None = None
    judged: float | None = None
    judged_unit: str = "x"
    spread: tuple[float, float] | None = None
    budget: Budget | None = None
    note: str = ""
    foreign_share: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def verdict(self) -> Verdict:
        """Within the budget, beyond it, without one, or not measured."""
        if self.error is not None:
            return "failed"
        if self.budget is None or self.judged is None:
            return "info"
        return "pass" if self.budget.holds(self.judged) else "miss"

    def as_json(self) -> dict[str, Any]:
        """The row for the result file."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}


_HEADINGS = ("row", "unit", "prototype", "shoal", "judged", "rounds", "budget", "verdict", "foreign", "note")


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned columns, failures in full below, and a warning when somebody else used the server's core."""
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS))]
    right = {2, 3, 4, 5, 8}
    lines = [
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += ["", *(f"{row.name}: {row.work}" for row in rows)]
    for row in rows:
        if row.error is not None:
            lines += ["", f"{row.name} failed: {row.error}"]
    if any((row.foreign_share or 0.0) > NOISY_SHARE for row in rows):
        lines += [
            "",
            f"Other processes took more than {NOISY_SHARE:.0%} of the server's core in the rows that say so under `foreign`:"
            " their rates and latencies mean little, and CPU times suffer from cold caches. Measure again on a quiet machine.",
        ]
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("pass", "miss", "failed")}
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    suffix = row.judged_unit if row.judged_unit == "x" else f" {row.judged_unit}".rstrip()
    judged = "" if row.judged is None else f"{_figure(row.judged)}{suffix}"
    spread = "" if row.spread is None else f"{_figure(row.spread[0])}-{_figure(row.spread[1])}"
    foreign = "" if row.foreign_share is None else f"{row.foreign_share:.0%}"
    budget = "" if row.budget is None else str(row.budget)
    return (
        row.name,
        row.unit,
        _figure(row.prototype),
        _figure(row.shoal),
        judged,
        spread,
        budget,
        row.verdict.upper() if row.verdict in ("miss", "failed") else row.verdict,
        foreign,
        row.note,
    )


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def write_json(path: Path, rows: Sequence[Row], run: dict[str, Any]) -> None:
    """Everything measured, single rounds included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"run": run, "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
