"""Several policies on the same arrivals, side by side: as a table of figures, and as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.sim.service import ServiceTime
from shoal.sim.simulator import Requests, SimulationResult, simulate_requests

_WINDOWS: Final = (0.0, 0.25, 0.5, 1.0, 2.0)
_WIDTH: Final = 720
_BAR: Final = 14
_ROW: Final = 46
_LEFT: Final = 150
_MOST_TIMES: Final = 8
_COLOURS: Final = ("#3b7dd8", "#d9822b", "#4c9f70")


class Policy(NamedTuple):
    """A way to batch, under the name by which tables call it."""

    name: str
    batching: BatchingSettings


def policies(batching: BatchingSettings, tau0_ms: float) -> list[Policy]:
    """What `shoal simulate --compare` compares: no batching, windows of 0 to 2 tau0, and the adaptive mode."""
    replace = msgspec.structs.replace
    fixed = replace(batching, mode="fixed")
    windows = [share * tau0_ms for share in _WINDOWS]
    return [
        Policy("no batching", replace(fixed, max_batch_size=0, max_delay_ms=0.0, allowed_batch_sizes=())),
        *[Policy(f"window {window_ms:.3g} ms", replace(fixed, max_delay_ms=window_ms)) for window_ms in windows],
        Policy("adaptive", replace(batching, mode="adaptive", max_delay_ms=0.0)),
    ]


def compare(
    requests: Requests,
    laws: Mapping[str, object],
    tried: Sequence[Policy],
    queue: QueueSettings,
    slots: int,
    objective_ms: float | None,
) -> dict[str, dict[str, float]]:
    """Figures of each policy, by name. `laws` are the arguments of `ServiceTime`, which is made anew for each: the same chances."""
    figures: dict[str, dict[str, float]] = {}
    for policy in tried:
        result = simulate_requests(requests, ServiceTime(**laws), batching=policy.batching, queue=queue, slots=slots)  # type: ignore[arg-type]
        figures[policy.name] = _figures(result, objective_ms)
    return figures


def _figures(result: SimulationResult, objective_ms: float | None) -> dict[str, float]:
    summary = result.summary()
    kept = ("mean_ms", "p50_ms", "p99_ms", "mean_batch_rows", "served", "refused", "expired", "dropped", "busy_fraction")
    figures = {key: summary[key] for key in kept}
    if objective_ms is not None:
        figures["in_time_share"] = result.in_time_share(round(objective_ms * 1e6))
    return figures


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """The figures as aligned text, one line for each policy."""
    columns = list(next(iter(figures.values())))
    lines = [["policy", *columns]]
    for name, row in figures.items():
        lines.append([name, *[f"{row[key]:,.3f}" if isinstance(row[key], float) else f"{row[key]:,}" for key in columns]])
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def svg(figures: Mapping[str, Mapping[str, float]]) -> str:
    """P50 and P99 of each policy as bars, and beside them the share that was answered in time where there is an objective.

    A policy that collapses would make all others too short to be told apart, so bars over eight times the best P99 are cut short.
    """
    best = min((row["p99_ms"] for row in figures.values() if row["p99_ms"]), default=1.0)
    longest = max((row["p99_ms"] for row in figures.values() if row["p99_ms"] <= _MOST_TIMES * best), default=1.0) or 1.0
    with_share = all("in_time_share" in row for row in figures.values())
    height = 40 + _ROW * len(figures)
    room = _WIDTH - _LEFT - 110
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    legend = ["P50", "P99", *(["answered in time"] if with_share else [])]
    for index, label in enumerate(legend):
        x = _LEFT + index * 90
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{_COLOURS[index]}"/>')
        parts.append(f'<text x="{x + 17}" y="20">{label}</text>')
    for number, (name, row) in enumerate(figures.items()):
        top = 36 + number * _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 18}" text-anchor="end">{_escaped(name)}</text>')
        bars = [(row["p50_ms"] / longest, f"{row['p50_ms']:.2f} ms"), (row["p99_ms"] / longest, f"{row['p99_ms']:.2f} ms")]
        if with_share:
            bars.append((row["in_time_share"], f"{100 * row['in_time_share']:.1f} %"))
        thickness = _BAR if len(bars) == 2 else _BAR - 2
        for index, (part, label) in enumerate(bars):
            y = top + index * (thickness + 1)
            width = min(max(1.0, part * room), float(room))
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{thickness}" fill="{_COLOURS[index]}"/>')
            if part > 1.0 + 1e-9:
                cut = f"M{_LEFT + width - 22:.1f} {y + thickness} l6 -{thickness} h5 l-6 {thickness} z"
                parts.append(f'<path d="{cut}" fill="#ffffff"/>')
            parts.append(f'<text x="{_LEFT + width + 5:.1f}" y="{y + thickness - 2}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
