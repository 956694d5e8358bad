"""The formulas against published values, against each other, and in their limits."""

import math

import numpy as np
import pytest

from shoal.sim import closed_forms as theory

TAU0, ALPHA = 1.8874, 0.1438


@pytest.mark.parametrize(
    ("rho", "batch", "latency", "p50", "p99"),
    [
        (0.02, 1.037, 2.3206, None, None),
        (0.1, 1.712, 3.1459, 3.147, 4.625),
        (0.3, 5.632, 4.2248, 4.188, 6.376),
        (0.5, 13.125, 5.9019, 5.811, 9.345),
        (0.7, 30.625, 9.8176, 9.611, 16.156),
        (0.8, 52.50, 14.7147, None, None),
        (0.9, 118.1, 29.4084, None, None),
    ],
)
def test_reference_table(rho, batch, latency, p50, p99):
    """Every value of the reference table is reproduced to its last digit, and both formulas for E[B] agree."""
    rate = rho / ALPHA
    exact = theory.TakeEverything.solve(rate, TAU0, ALPHA)
    assert exact.mean_batch() == pytest.approx(batch, rel=5e-4)
    assert exact.mean_latency() == pytest.approx(latency, abs=6e-5)
    assert exact.mean_batch() == pytest.approx((rate * TAU0 + exact.idle_probability()) / (1 - rho), rel=1e-9)
    assert exact.mean_latency() <= theory.mean_latency_bound(rate, TAU0, ALPHA) * (1 + 1e-9)
    if p50 is not None:
        assert exact.percentile(0.5) == pytest.approx(p50, abs=6e-4)
        assert exact.percentile(0.99) == pytest.approx(p99, abs=6e-4)


def test_tail_integrates_to_the_mean():
    """∫ P(W > x) dx = E[W]: the tail formula and the mean formula agree."""
    exact = theory.TakeEverything.solve(0.5 / ALPHA, TAU0, ALPHA)
    x = np.linspace(0, 30, 6001)
    above = np.array([exact.latency_above(float(value)) for value in x])
    assert float(np.sum((above[1:] + above[:-1]) / 2) * (x[1] - x[0])) == pytest.approx(exact.mean_latency(), rel=1e-4)


def test_finite_limit_tends_to_both_ends():
    """A limit of 1 is M/D/1; a limit never reached is no limit."""
    service = TAU0 + ALPHA
    one = theory.finite_limit(0.8 / service, TAU0, ALPHA, 1)
    assert one.latency == pytest.approx(theory.no_batching(0.8 / service, service), rel=1e-6)
    assert one.batch == pytest.approx(1.0)
    large = theory.finite_limit(0.3 / ALPHA, TAU0, ALPHA, 200)
    assert (large.batch, large.latency) == pytest.approx((5.6316, 4.2248), rel=1e-3)


def test_loaded_window_without_a_window_is_take_everything():
    """T = 0 gives the chain of taking everything."""
    exact = theory.TakeEverything.solve(0.3 / ALPHA, TAU0, ALPHA)
    loaded = theory.window_loaded(0.3 / ALPHA, TAU0, ALPHA, 0.0)
    assert (loaded.batch, loaded.latency) == pytest.approx((exact.mean_batch(), exact.mean_latency()), rel=1e-6)


def test_window_never_busy():
    """Mean 1 + λT and delay T(1 + λT/2)/(1 + λT); a limit that is never reached changes nothing, a limit of 1 leaves no delay."""
    free = theory.window_never_busy(2.0, 3.0)
    assert (free.mean_batch, free.mean_delay) == pytest.approx((7.0, 3 * 4 / 7))
    assert math.isnan(free.mean_fill_time)
    limited = theory.window_never_busy(2.0, 3.0, 60)
    assert (limited.mean_batch, limited.mean_delay) == pytest.approx((7.0, 3 * 4 / 7))
    filled = theory.window_never_busy(2.0, 1000.0, 9)
    assert (filled.mean_batch, filled.full_share, filled.mean_fill_time) == pytest.approx((9.0, 1.0, 4.0))


def test_unstable_loads_are_refused():
    """No stationary distribution, no number: every formula says so instead of returning one."""
    with pytest.raises(ValueError, match="unstable"):
        theory.TakeEverything.solve(1 / ALPHA, TAU0, ALPHA)
    with pytest.raises(ValueError, match="unstable"):
        theory.finite_limit(8 / (TAU0 + ALPHA * 8), TAU0, ALPHA, 8)
    with pytest.raises(ValueError, match="unstable"):
        theory.window_loaded(1 / ALPHA, TAU0, ALPHA, 1.0)
    with pytest.raises(ValueError, match="unstable"):
        theory.no_batching(0.5, 2.0)


def test_poisson_weights():
    """Weights sum to 1, have the right mean, and a mean of 0 is certainty."""
    pmf = theory.poisson_pmf(np.array([0.0, 3.0]), 60)
    assert pmf.sum(axis=1) == pytest.approx([1.0, 1.0])
    assert pmf[1] @ np.arange(61) == pytest.approx(3.0)
    assert pmf[0, 0] == 1.0
