"""The simulator: exact on cases that can be worked out by hand, close to theory on others, and the same every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.settings import BatchingSettings, QueueSettings
from shoal.sim import arrivals, closed_forms
from shoal.sim.service import ServiceTime
from shoal.sim.simulator import EXPIRED, REFUSED, simulate

MS = 1_000_000
UNBOUNDED = QueueSettings(max_queue_rows=None, max_queue_bytes=None)


def times(*milliseconds):
    """Arrival times in ns."""
    return np.array([round(value * MS) for value in milliseconds], dtype=np.int64)


def test_case_13_by_hand():
    """Window 0, model 100 ms, 5 requests: the first alone, the other four together; latencies exact."""
    result = simulate(times(0, 1, 1, 1, 1), ServiceTime(100 * MS, 0), batching=BatchingSettings())
    assert result.batches.rows.tolist() == [1, 4]
    assert result.outcome_ns.tolist() == [100 * MS, 199 * MS, 199 * MS, 199 * MS, 199 * MS]
    assert result.waited_ns.tolist() == [0, 99 * MS, 99 * MS, 99 * MS, 99 * MS]
    assert result.busy_fraction == 1.0


def test_staging_changes_no_latency():
    """A staged batch starts the instant a slot is free, with the same members as one formed then."""
    arrival = arrivals.poisson(3000, 3000, 5)
    service = ServiceTime(1.8 * MS, 0.14 * MS)
    plain, staged = (
        simulate(arrival, service, batching=BatchingSettings(), stage=stage, check_every=50) for stage in (False, True)
    )
    assert np.array_equal(plain.outcome_ns, staged.outcome_ns)
    assert plain.batches.rows.tolist() == staged.batches.rows.tolist()


def test_refusals_and_expiries_by_hand():
    """Room for two behind a batch of 10 ms, timeout 5 ms: two wait and expire at 5 ms, one is refused."""
    queue = QueueSettings(max_queue_requests=2, default_timeout_ms=5)
    result = simulate(times(0, 1, 2, 3, 7.5), ServiceTime(10 * MS, 0), batching=BatchingSettings(), queue=queue)
    assert result.outcome_ns.tolist() == [10 * MS, EXPIRED, EXPIRED, REFUSED, 12.5 * MS]
    summary = result.summary()
    assert (summary["served"], summary["refused"], summary["expired"]) == (2, 1, 2)


def test_cut_request_has_one_latency():
    """12 rows with a limit of 5 take three batches; the latency runs to the end of the last."""
    result = simulate(times(0), ServiceTime(1 * MS, 1 * MS), batching=BatchingSettings(max_batch_size=5), rows=np.array([12]))
    assert result.batches.rows.tolist() == [5, 5, 2]
    assert result.outcome_ns.tolist() == [(6 + 6 + 3) * MS]


def test_the_same_seed_gives_the_same_run():
    """Two runs with the same seeds agree to the nanosecond, another seed does not."""

    def run(seed):
        service = ServiceTime(1.8 * MS, 0.14 * MS, noise=0.05, seed=seed)
        return simulate(arrivals.on_off(2000, 2000, seed), service, batching=BatchingSettings(max_delay_ms=1), slots=2)

    assert np.array_equal(run(1).outcome_ns, run(1).outcome_ns)
    assert not np.array_equal(run(1).outcome_ns, run(2).outcome_ns)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    rate=st.sampled_from([200, 2000, 20_000]),
    limit=st.sampled_from([0, 1, 3, 16]),
    delay_ms=st.sampled_from([0, 1, 5]),
    slots=st.integers(1, 4),
    stage=st.booleans(),
    highest=st.integers(1, 6),
    bound=st.sampled_from([None, 20]),
    timeout_ms=st.sampled_from([None, 4.0]),
    levels=st.integers(1, 3),
)
def test_every_request_ends_and_invariants_hold(seed, rate, limit, delay_ms, slots, stage, highest, bound, timeout_ms, levels):
    """Whatever the settings: all end once, rows are conserved, nobody runs after its deadline, batches keep the limit."""
    count = 150
    rows = arrivals.uniform_rows(count, 1, highest, seed)
    result = simulate(
        arrivals.poisson(rate, count, seed),
        ServiceTime(1 * MS, 0.2 * MS, step_rows=4, noise=0.1, seed=seed),
        batching=BatchingSettings(max_batch_size=limit, max_delay_ms=delay_ms),
        queue=QueueSettings(max_queue_rows=bound, default_timeout_ms=timeout_ms, priority_levels=levels),
        rows=rows,
        levels=np.random.default_rng(seed).integers(0, levels, count, endpoint=True),
        slots=slots,
        stage=stage,
        check_every=7,
    )
    served = result.outcome_ns >= 0
    final = result.final
    assert final.answered == served.sum()
    assert final.answered + final.expired + result.refused == count
    if limit and timeout_ms is None:
        assert result.batches.rows.sum() == rows[served].sum()
        assert result.batches.rows.max(initial=0) <= limit
    if timeout_ms is not None and limit == 16:
        assert result.waited_ns.max(initial=0) <= timeout_ms * MS
    assert 0 <= result.busy_fraction <= 1


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), rho=st.floats(0.05, 0.95))
def test_hard_bound_when_everything_is_taken(seed, rho):
    """T = 0 and no limit: every latency is at most l(b_k) + l(b_k+1), the batch that ran on arrival and the own one."""
    arrival = arrivals.poisson(rho / 0.1438 * 1e3, 400, seed)
    batching = BatchingSettings(max_batch_size=1 << 30)
    result = simulate(arrival, ServiceTime(1.8874 * MS, 0.1438 * MS), batching=batching, queue=UNBOUNDED)
    ends = result.batches.started_ns + result.batches.service_ns
    own = np.searchsorted(ends, arrival + result.outcome_ns)
    before = np.where(own > 0, result.batches.service_ns[own - 1], 0)
    assert (result.outcome_ns <= result.batches.service_ns[own] + before).all()


def test_littles_law():
    """The scheduler's own count of requests, averaged over time, is λ·E[W] exactly, for a run that begins and ends empty."""
    result = simulate(arrivals.poisson(3000, 5000, 1), ServiceTime(1.8 * MS, 0.14 * MS), batching=BatchingSettings())
    assert result.mean_in_system == pytest.approx(result.outcome_ns.sum() / result.span_ns, rel=1e-12)


def test_close_to_the_closed_form():
    """A short run at half load comes within 3 % of theory in mean latency and mean batch (the full table: make verify-queueing)."""
    exact = closed_forms.TakeEverything.solve(0.5 / 0.1438, 1.8874, 0.1438)
    arrival = arrivals.poisson(0.5 / 0.1438 * 1e3, 60_000, 2)
    arrival = np.rint(arrival * (60_000 / (0.5 / 0.1438) * 1e6 / arrival[-1])).astype(np.int64)
    batching = BatchingSettings(max_batch_size=1 << 30)
    result = simulate(arrival, ServiceTime(1.8874 * MS, 0.1438 * MS), batching=batching, queue=UNBOUNDED)
    assert result.latencies_ns.mean() / MS == pytest.approx(exact.mean_latency(), rel=0.03)
    assert result.batches.rows.mean() == pytest.approx(exact.mean_batch(), rel=0.03)
