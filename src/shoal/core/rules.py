"""Settings turned into what the hot path compares: plain integers in nanoseconds, rows and bytes.

Conversion only, done once per scheduler; no decision is taken here. `FOREVER` stands for "no bound" and "no expiry", so that the
hot path compares integers without asking for None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.config.settings import BatchingSettings, LevelSettings, QueueSettings

if TYPE_CHECKING:
    from shoal.core.ticket import Ticket

FOREVER: Final = 1 << 62
"""Larger than any time in nanoseconds, any count of rows and any count of bytes that can occur."""

_NS_PER_MS: Final = 1_000_000


def ms_to_ns(milliseconds: float) -> int:
    """Milliseconds to whole nanoseconds, rounded to nearest."""
    return round(milliseconds * _NS_PER_MS)


class LevelRules(NamedTuple):
    """What holds for the tickets of one priority level. The bounds are the level's own and come on top of the queue's."""

    default_timeout_ns: int
    override_timeout: bool
    delay_expired: bool
    max_requests: int
    max_rows: int
    max_bytes: int


class Rules:
    """The settings of one model's scheduler.

    `limit_rows` is the most rows in one batch, `most_rows` what it would be without a cap of `cap_rows`; `single` means that every
    request runs alone, whatever its rows (a `max_batch_size` of 0). `full_rows` is the size from which a batch cannot grow: the
    largest preferred size, or the limit where none is preferred (Triton's rule). `preferred` is empty where it cannot matter.

    `max_cost` bounds the work of a batch, counted in `cost_unit`; a budget in rows is a part of `limit_rows`. `padded` and `ragged`
    say that rows of different length share a batch, at the price of its longest row or of their sum. `objective_ns` is FOREVER
    without one. `ranked` says that the plain first-in-first-out queue will not do.
    """

    __slots__ = (
        "adaptive",
        "adaptive_start",
        "aging_ns",
        "allowed",
        "by_deadline",
        "cost_unit",
        "default_level",
        "default_timeout_ns",
        "delay_expired",
        "early_drop",
        "fair",
        "full_rows",
        "level_bounds",
        "level_rules",
        "levels",
        "limit_rows",
        "max_bytes",
        "max_cost",
        "max_delay_ns",
        "max_requests",
        "max_rows",
        "max_tenants",
        "most_rows",
        "objective_ns",
        "padded",
        "preferred",
        "preferred_min_rows",
        "ragged",
        "ranked",
        "reorder",
        "single",
        "split",
        "weights",
        "window_rows",
    )

    def __init__(self, batching: BatchingSettings, queue: QueueSettings, cap_rows: int | None = None) -> None:
        self._set_batch(batching, cap_rows)
        self._set_bounds(queue)
        self.adaptive = batching.mode == "adaptive"
        self.adaptive_start = batching.adaptive_start
        self.early_drop = self.adaptive if batching.early_drop is None else batching.early_drop
        self.by_deadline = (self.adaptive or self.early_drop) if batching.order is None else batching.order == "deadline"
        self.objective_ns = FOREVER if queue.slo_ms is None else ms_to_ns(queue.slo_ms)
        self.aging_ns = FOREVER if queue.aging_ms is None else max(1, ms_to_ns(queue.aging_ms))
        self.weights = dict(queue.tenant_weights)
        self.fair = queue.fair_tenants or bool(self.weights)
        self.max_tenants = queue.max_tenants
        self.ranked = (
            self.adaptive
            or self.early_drop
            or self.by_deadline
            or self.fair
            or self.aging_ns != FOREVER
            or self.max_cost != FOREVER
            or bool(self.allowed)
            or self.padded
            or self.ragged
        )

    def _set_batch(self, batching: BatchingSettings, cap_rows: int | None) -> None:
        self.single = batching.max_batch_size <= 0
        self.limit_rows = FOREVER if self.single else batching.max_batch_size
        self.cost_unit = batching.cost if batching.cost in ("rows", "tokens") else "function"
        self.max_cost: float = FOREVER
        if batching.max_batch_cost is not None and not self.single:
            if self.cost_unit == "rows":
                self.limit_rows = max(1, min(self.limit_rows, int(batching.max_batch_cost)))
            else:
                self.max_cost = batching.max_batch_cost
        self.most_rows = self.limit_rows
        if cap_rows is not None:
            self.limit_rows = max(1, min(self.limit_rows, cap_rows))
        policies = {length.policy for length in batching.lengths.values()}
        self.padded = not self.single and not policies.isdisjoint(("pad", "bucket"))
        self.ragged = not self.single and "ragged" in policies and not self.padded
        self.window_rows = batching.length_window * self.limit_rows if self.padded or self.ragged else 0
        self.allowed = () if self.single else tuple(size for size in batching.allowed_batch_sizes if 0 < size <= self.limit_rows)
        self.max_delay_ns = max(0, ms_to_ns(batching.max_delay_ms))
        sizes = frozenset(size for size in batching.preferred_batch_sizes if 0 < size <= self.limit_rows)
        wanted = not self.single and self.max_delay_ns > 0 and batching.mode == "fixed"
        self.preferred = sizes if wanted else frozenset()
        self.preferred_min_rows = min(self.preferred, default=FOREVER)
        self.full_rows = 1 if self.single else max(self.preferred, default=self.limit_rows)
        self.reorder = batching.reorder and not self.single
        self.split = batching.oversize == "split"

    def _set_bounds(self, queue: QueueSettings) -> None:
        self.max_requests = _bound(queue.max_queue_requests)
        self.max_rows = _bound(queue.max_queue_rows)
        self.max_bytes = _bound(queue.max_queue_bytes)
        self.default_timeout_ns = FOREVER if queue.default_timeout_ms is None else ms_to_ns(queue.default_timeout_ms)
        self.levels = max(1, queue.priority_levels)
        self.default_level = queue.default_priority
        own = [queue.levels.get(level, LevelSettings()) for level in range(1, self.levels + 1)]
        self.level_rules = tuple([_level_rules(level, queue) for level in own])
        self.level_bounds = any(
            (level.max_requests, level.max_rows, level.max_bytes) != (FOREVER,) * 3 for level in self.level_rules
        )
        self.delay_expired = any(level.delay_expired for level in self.level_rules)
        self.default_timeout_ns = min(level.default_timeout_ns for level in self.level_rules)

    def of_level(self, level: int) -> LevelRules:
        """Of a priority level as tickets name it; 0 is the default level."""
        return self.level_rules[(level or self.default_level) - 1]

    def cost_of(self, ticket: Ticket) -> float:
        """What a ticket weighs alone, in `cost_unit`: rows, tokens (rows times longest row) or what the function said."""
        if self.cost_unit == "tokens":
            return ticket.rows * ticket.length
        if self.cost_unit == "function":
            return ticket.cost or ticket.rows
        return ticket.rows


def _bound(value: int | None) -> int:
    return FOREVER if value is None else value


def _level_rules(own: LevelSettings, queue: QueueSettings) -> LevelRules:
    timeout_ms = queue.default_timeout_ms if own.default_timeout_ms is None else own.default_timeout_ms
    override = queue.allow_timeout_override if own.allow_timeout_override is None else own.allow_timeout_override
    return LevelRules(
        default_timeout_ns=FOREVER if timeout_ms is None else ms_to_ns(timeout_ms),
        override_timeout=override,
        delay_expired=(own.timeout_action or queue.timeout_action) == "delay",
        max_requests=_bound(own.max_queue_requests),
        max_rows=_bound(own.max_queue_rows),
        max_bytes=_bound(own.max_queue_bytes),
    )
