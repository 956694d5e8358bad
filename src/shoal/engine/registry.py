"""Which models are served, in which versions, and in what state: loading, the way to a lane, draining, closing.

Loading happens in a thread of its own, so the loop goes on serving; a model that fails to load is kept with its reason and harms no
other. Knows settings, backends and lanes; no sockets, no protocol.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.backends.base import Backend
from shoal.backends.probe import ProbeReport, probe, require_batchable
from shoal.backends.registry import open_backend
from shoal.backends.threads import cpu_budget, plan_threads, share_threads
from shoal.config.settings import BatchingSettings, ModelSettings
from shoal.core.latency import LatencyModel
from shoal.datatypes import ModelSpec
from shoal.engine.costs import Cost, load_cost
from shoal.engine.executor import Pool, ThreadPool
from shoal.engine.helper_thread import in_thread
from shoal.engine.hooked_runner import make_runner, refuse_lengths
from shoal.engine.lane import Lane
from shoal.engine.length_probe import probe_lengths
from shoal.engine.local_pools import InlinePool
from shoal.engine.profile import fingerprint, keep_profile, profile_path, read_profile
from shoal.errors import NotReady, ShoalError, UnknownModel, UnknownVersion
from shoal.tensors.length_compile import compile_lengths
from shoal.tensors.lengths import LengthPlan

__all__ = ["Engine", "ModelState", "ModelStatus"]

_log = logging.getLogger("shoal.engine")
_MS_PER_SECOND: Final = 1000.0
# Waking an executor thread, and being woken by it, costs 100 to 200 µs of CPU for each batch where the GIL changes hands. A model
# that is through with its largest batch by then is run where it is.
_INLINE_BELOW_NS: Final = 150_000


class ModelState(Enum):
    """The protocol's words for where a model version is."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class ModelStatus:
    """One model version as it stands.

    `reason` says why it is not ready; `threads` are the intra-op threads of one instance; `inline` is true where it runs on the
    event loop rather than in executor threads.
    """

    name: str
    version: str
    settings: ModelSettings
    state: ModelState = ModelState.LOADING
    reason: str = ""
    lane: Lane | None = None
    threads: int = 1
    inline: bool = False
    probe: ProbeReport | None = None
    warnings: tuple[str, ...] = field(default=())

    @property
    def spec(self) -> ModelSpec | None:
        """What the model takes and gives; None before it was ever loaded."""
        return None if self.lane is None else self.lane.spec


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the helper thread brings back: one backend for each instance.

    `points` are (work, longest row, nanoseconds) of batches that were tried with lengths. `profile` is where the batch times are
    kept, with their fingerprint, and `kept` what was found there.
    """

    backends: list[Backend]
    report: ProbeReport | None
    cost: Cost | None = None
    lengths: LengthPlan | None = None
    points: tuple[tuple[int, int, int], ...] = ()
    profile: tuple[Path, dict[str, Any]] | None = None
    kept: LatencyModel | None = None

    @property
    def spec(self) -> ModelSpec:
        """What clients see."""
        return self.backends[0].spec if self.lengths is None else self.lengths.spec

    def close(self) -> None:
        for backend in self.backends:
            try:
                backend.close()
            except Exception:
                _log.exception("closing a model that was not used")


class Engine:
    """All models of one process. Made anywhere, used on one loop.

    `strict_readiness`: the engine is ready only with every model; otherwise with any. `inline` runs models on the loop itself.
    """

    def __init__(
        self,
        *,
        strict_readiness: bool = True,
        inline: bool = False,
        cpus: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._strict = strict_readiness
        self._inline = inline
        self._cpus = cpus
        self._clock = clock
        self._models: dict[tuple[str, str], ModelStatus] = {}
        self._ready: dict[tuple[str, str | None], Lane] = {}
        self._planned: dict[str, int] = {}
        self._profiles: dict[Lane, tuple[Path, dict[str, Any]]] = {}  # where batch times are kept when the lane is closed
        self.draining = False
        self.epoch = 0  # changes whenever `lane` may answer differently; lets callers keep what they have looked up

    # ---------------------------------------------------------------- loading

    def announce(self, models: Mapping[str, ModelSettings]) -> None:
        """Tell which models will be loaded: until then they are LOADING, not unknown, and the CPUs are shared out among all."""
        self._planned = plan_threads(self._cpu_count(), {name: (model.instances, model.threads) for name, model in models.items()})
        for name, settings in models.items():
            key = (name, settings.version)
            if key not in self._models:
                self._models[key] = ModelStatus(name, settings.version, settings, threads=self._threads(name, settings))

    def _cpu_count(self) -> int:
        if self._cpus is None:
            self._cpus = cpu_budget().cpus
        return self._cpus

    def _threads(self, name: str, settings: ModelSettings) -> int:
        return settings.threads or self._planned.get(name) or share_threads(self._cpu_count(), settings.instances)

    async def load(self, name: str, settings: ModelSettings) -> ModelStatus:
        """Load a model, and take it into service if that succeeds. Never raises for the model's faults: see the returned status.

        A version that is served already goes on until the new one is ready, and is drained then; if the new one fails, it stays.
        """
        key = (name, settings.version)
        threads = self._threads(name, settings)
        status = self._models.get(key)
        if status is None or status.lane is None:
            status = self._models[key] = ModelStatus(name, settings.version, settings, threads=threads)
        begun_ns = self._clock()
        _log.info("model %s version %s: loading%s", name, settings.version, " and trying it with batches" if settings.probe else "")
        try:
            loaded = await in_thread(
                f"shoal-load-{name}", lambda: _open(name, settings, threads, self._clock), discard=_Loaded.close
            )
        except asyncio.CancelledError:
            self._failed(status, "loading was stopped")
            raise
        except BaseException as error:
            if not isinstance(error, ShoalError):
                _log.error("model %s failed to load", name, exc_info=error)
            self._failed(status, error.message if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}")
            return status
        old = status.lane
        inline = self._inline or _runs_inline(settings, loaded)
        lane = self._make_lane(name, settings, loaded, inline)
        if settings.profile == "keep" and loaded.profile is not None:
            self._profiles[lane] = loaded.profile
        status.inline = inline
        status.settings, status.threads, status.lane, status.probe = settings, threads, lane, loaded.report
        status.state, status.reason = ModelState.READY, ""
        status.warnings = loaded.report.warnings if loaded.report is not None else ()
        if self.draining:
            lane.start_draining()
        self._index()
        for warning in status.warnings:
            _log.warning("model %s: %s", name, warning)
        if not lane.spec.batchable and settings.batching.max_batch_size > 1:
            _log.warning("model %s is not batched, its requests run one at a time: %s", name, lane.spec.unbatchable_reason)
        _log.info("model %s version %s is ready after %.1f s", name, settings.version, (self._clock() - begun_ns) / 1e9)
        if old is not None:
            await old.drain()
            await self._close(old)
        return status

    def _failed(self, status: ModelStatus, reason: str) -> None:
        _log.error("model %s version %s is not available: %s", status.name, status.version, reason)
        status.reason = reason
        if status.lane is None:
            status.state = ModelState.UNAVAILABLE

    def _make_lane(self, name: str, settings: ModelSettings, loaded: _Loaded, inline: bool) -> Lane:
        spec = loaded.spec
        batching = settings.batching
        if not spec.batchable:
            batching = msgspec.structs.replace(batching, max_batch_size=0)
        max_rows = max(1, batching.max_batch_size)
        allowed = batching.allowed_batch_sizes if spec.batchable else ()
        runners = [
            make_runner(backend, max_rows, self._clock, lengths=loaded.lengths, allowed_sizes=allowed)
            for backend in loaded.backends
        ]
        pool: Pool
        if inline:
            pool = InlinePool(runners[0], self._clock)
            for spare in runners[1:]:
                spare.close()
        else:
            pool = ThreadPool(name, runners, self._clock)
        return Lane(
            name,
            settings.version,
            spec,
            pool,
            batching=batching,
            queue=settings.queue,
            stage=settings.stage,
            clock=self._clock,
            expected_rows_per_second=_expected_rate(settings, loaded.report),
            latency=_first_latency(settings, loaded),
            cost=loaded.cost,
            lengths=loaded.lengths,
        )

    async def unload(self, name: str, version: str | None = None) -> None:
        """Take a version (None: all of the model) out of service: new requests are refused, accepted ones are answered first.

        Raises UnknownModel, UnknownVersion.
        """
        for status in self._find(name, version):
            lane = status.lane
            if lane is not None:
                status.state, status.reason = ModelState.UNLOADING, "it is being unloaded"
                self._index()
                await lane.drain()
                await self._close(lane)
            status.lane = None
            status.state, status.reason = ModelState.UNAVAILABLE, "unloaded"
            self._index()

    def _index(self) -> None:
        """What `lane` looks up; `None` as the version stands for the highest one that is ready."""
        ready: dict[tuple[str, str | None], Lane] = {}
        for status in sorted(self._models.values(), key=_version_order):
            if status.state is ModelState.READY and status.lane is not None:
                ready[status.name, status.version] = ready[status.name, None] = status.lane
        self._ready = ready
        self.epoch += 1

    async def _close(self, lane: Lane, grace_seconds: float = 5.0) -> bool:
        closed = await lane.close(grace_seconds)
        profile = self._profiles.pop(lane, None)
        if profile is not None and lane.latency.batches >= _LEAST_KEPT:
            path, wanted = profile
            if await in_thread("shoal-profile", lambda: keep_profile(path, wanted, lane.latency), discard=lambda _: None):
                _log.info("model %s: what was learned of its batch times is kept in %s", lane.name, path)
        return closed

    # ---------------------------------------------------------------- looking up

    def lane(self, name: str, version: str | None = None) -> Lane:
        """The lane that serves this version; of several the highest. Raises UnknownModel, UnknownVersion or NotReady."""
        lane = self._ready.get((name, version))
        if lane is None:
            raise self._not_served(self._find(name, version))
        return lane

    def lanes(self) -> list[Lane]:
        """Lanes of all versions that are ready."""
        return [lane for (_, version), lane in self._ready.items() if version is not None]

    @property
    def states(self) -> list[ModelStatus]:
        """All versions that were ever asked for, by name and version."""
        return sorted(self._models.values(), key=_version_order)

    def status(self, name: str, version: str | None = None) -> ModelStatus:
        """Of one version; without a version, of the highest that is ready, or else of the highest. Raises UnknownModel, …"""
        found = self._find(name, version)
        return next((status for status in reversed(found) if status.state is ModelState.READY), found[-1])

    def versions(self, name: str) -> list[str]:
        """Versions of a model that are ready, lowest first. Raises UnknownModel."""
        return [status.version for status in self._find(name, None) if status.state is ModelState.READY]

    @property
    def thread_budget(self) -> dict[str, int]:
        """Intra-op threads of one instance, by model name."""
        return {status.name: status.threads for status in self._models.values()}

    def check_ready(self) -> None:
        """Raise NotReady, with the reason, unless every model is ready (with `strict_readiness` off: unless any is)."""
        if self.draining:
            raise NotReady("the server is shutting down")
        missing = [status for status in self.states if status.state is not ModelState.READY]
        if missing and (self._strict or len(missing) == len(self._models)):
            raise self._not_served(missing)

    def _find(self, name: str, version: str | None) -> list[ModelStatus]:
        found = [status for status in self.states if status.name == name]
        if not found:
            raise UnknownModel(f'no model "{name}" is served')
        if version is None:
            return found
        for status in found:
            if status.version == version:
                return [status]
        versions = ", ".join(status.version for status in found)
        raise UnknownVersion(f'model "{name}" has no version "{version}"; it has {versions}')

    @staticmethod
    def _not_served(statuses: list[ModelStatus]) -> NotReady:
        status = statuses[-1]
        if status.state is ModelState.LOADING:
            return NotReady(f'model "{status.name}" version {status.version} is still being loaded')
        return NotReady(f'model "{status.name}" version {status.version} is not available: {status.reason}')

    # ---------------------------------------------------------------- ending

    async def drain(self, timeout_ms: float | None = None) -> bool:
        """Refuse what is new, answer what was accepted. False if the time ran out first."""
        self.draining = True
        drains = [asyncio.ensure_future(lane.drain()) for lane in self.lanes()]
        if not drains:
            return True
        _, late = await asyncio.wait(drains, timeout=None if timeout_ms is None else timeout_ms / _MS_PER_SECOND)
        for task in late:
            task.cancel()
        return not late

    async def close(self, grace_seconds: float = 5.0) -> bool:
        """End all executors and free the models; what is not finished within the grace fails. False if one was left behind."""
        self.draining = True
        lanes = [status.lane for status in self._models.values() if status.lane is not None]
        self._ready = {}
        self.epoch += 1
        closed = await asyncio.gather(*[self._close(lane, grace_seconds) for lane in lanes])
        for status in self._models.values():
            status.state, status.reason, status.lane = ModelState.UNAVAILABLE, "the server is shutting down", None
        return all(closed)


_LEAST_KEPT: Final = 20  # batches; what was learned of fewer is not worth keeping


def _open(name: str, settings: ModelSettings, threads: int, clock: Callable[[], int]) -> _Loaded:
    """In the helper thread: open, probe, clone. Raises whatever stands in the way; nothing stays open then."""
    backends = [open_backend(settings.path, threads=threads)]
    loaded = _Loaded(backends, None)
    try:
        report: ProbeReport | None = None
        cost = None if settings.batching.cost in ("rows", "tokens") else load_cost(settings.batching.cost)
        batching: BatchingSettings = settings.batching
        lengths = compile_lengths(backends[0].spec, batching.lengths)
        refuse_lengths(name, backends[0], lengths)
        points: tuple[tuple[int, int, int], ...] = ()
        if settings.probe and lengths is not None and lengths.mixes:
            probed = probe_lengths(backends[0], lengths, batching.lengths, batching.max_batch_size, clock)
            report, points = probed.report, probed.points
        elif settings.probe:
            report = probe(backends[0], batching.max_batch_size, clock_ns=clock)
            if backends[0].spec.batchable:
                require_batchable(report, name, batching.max_batch_size)
        for _ in range(1, max(1, settings.instances)):
            backends.append(backends[0].clone())
    except BaseException:
        loaded.close()
        raise
    profile, kept = _profile(settings, threads)
    return _Loaded(backends, report, cost, lengths, points, profile, kept)


def _profile(settings: ModelSettings, threads: int) -> tuple[tuple[Path, dict[str, Any]] | None, LatencyModel | None]:
    """Where the model's profile belongs, and the batch times that lie there."""
    path = None if settings.profile == "off" else profile_path(settings.path)
    if path is None or (settings.profile == "read" and not path.exists()):
        return None, None
    try:
        wanted = fingerprint(settings, threads)
    except OSError as error:
        _log.warning("profile %s: the model cannot be read: %s", path, error.strerror or error)
        return None, None
    return (path, wanted), read_profile(path, wanted, margin_sigmas=settings.batching.margin_sigmas)


def _first_latency(settings: ModelSettings, loaded: _Loaded) -> LatencyModel:
    """What is known of the model's batch times before it has served: what an earlier server learned, or what the probe tried."""
    if loaded.kept is not None:
        return loaded.kept
    latency = LatencyModel(margin_sigmas=settings.batching.margin_sigmas)
    if loaded.report is None or settings.batching.cost not in ("rows", "tokens"):
        return latency
    for tokens, length, taken_ns in loaded.points:
        latency.observe(tokens, length, taken_ns)
    if not loaded.points:
        for rows, taken_ns in sorted(loaded.report.timings_ns.items()):
            latency.observe(rows, 0, taken_ns)
    return latency


def _expected_rate(settings: ModelSettings, report: ProbeReport | None) -> float | None:
    """Rows per second in full batches on all instances, as far as the probe could tell."""
    if report is None or not report.timings_ns:
        return None
    rows, time_ns = max(report.timings_ns.items())
    return settings.instances * rows * 1e9 / max(time_ns, 1)


def _runs_inline(settings: ModelSettings, loaded: _Loaded) -> bool:
    """Whether a model runs on the loop: because the settings say so, or because it was seen to be cheaper than a hand-over."""
    if settings.execution != "auto" or settings.instances != 1:
        return settings.execution == "inline"
    spec, report = loaded.spec, loaded.report
    if not spec.steady or report is None or settings.threads not in (None, 1):
        return False
    largest = settings.batching.max_batch_size if spec.batchable else 1
    return report.timings_ns.get(largest, _INLINE_BELOW_NS) < _INLINE_BELOW_NS


def _version_order(status: ModelStatus) -> tuple[str, int, str]:
    """By name, then numbers as numbers, other versions before them as text."""
    version = status.version
    return (status.name, int(version) if version.isascii() and version.isdigit() else -1, version)
