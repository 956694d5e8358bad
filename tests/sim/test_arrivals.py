"""Arrival processes and service times: the right mean, order, and refusal of nonsense."""

import numpy as np
import pytest

from shoal.sim import arrivals
from shoal.sim.service import ServiceTime


@pytest.mark.parametrize("make", [arrivals.poisson, arrivals.on_off])
def test_rate_and_order(make):
    """100,000 arrivals come at the asked rate within 2 %, in order; another seed gives other times."""
    times = make(1000.0, 100_000, 3)
    assert times.dtype == np.int64
    assert (np.diff(times) >= 0).all()
    assert 100_000 / (times[-1] / 1e9) == pytest.approx(1000.0, rel=0.02)
    assert not np.array_equal(times, make(1000.0, 100_000, 4))


def test_poisson_gaps_are_exponential():
    """Mean and standard deviation of the gaps agree, as for an exponential."""
    gaps = np.diff(arrivals.poisson(1000.0, 100_000, 3))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.02)


def test_on_off_is_silent_while_off():
    """With 30 ms on and 70 ms off nothing comes in the last 70 ms of each 100."""
    times = arrivals.on_off(5000.0, 20_000, 1, on_ms=30, off_ms=70)
    assert (times % 100_000_000 <= 30_000_000).all()
    with pytest.raises(ValueError, match="on_ms"):
        arrivals.on_off(1.0, 1, 1, on_ms=0)


def test_constant_gaps():
    """One every 2 ms."""
    assert arrivals.constant(500.0, 3).tolist() == [2_000_000, 4_000_000, 6_000_000]


def test_replay_begins_at_zero_and_refuses_disorder():
    """Recorded times are moved to begin at 0; an empty recording stays empty; times that go back are refused."""
    assert arrivals.replay([5, 7, 7, 12]).tolist() == [0, 2, 2, 7]
    assert arrivals.replay([]).tolist() == []
    with pytest.raises(ValueError, match="decrease"):
        arrivals.replay([5, 4])


def test_rows():
    """Constant rows are constant, uniform rows include both ends."""
    assert arrivals.constant_rows(3, 4).tolist() == [4, 4, 4]
    assert set(arrivals.uniform_rows(1000, 2, 4, 1).tolist()) == {2, 3, 4}


def test_service_time_line_and_staircase():
    """The fixed time plus the time per row, with rows rounded up to a step; at least 1 ns."""
    assert ServiceTime(1000, 10)(5) == 1050
    assert [ServiceTime(1000, 10, step_rows=4)(rows) for rows in (1, 4, 5)] == [1040, 1040, 1080]
    assert ServiceTime(0, 0)(1) == 1


def test_service_noise_has_median_one_and_a_seed():
    """Scatter of 10 % around the line, the same for the same seed."""
    first, second = ServiceTime(1e6, 0, noise=0.1, seed=1), ServiceTime(1e6, 0, noise=0.1, seed=1)
    draws = [first(1) for _ in range(5000)]
    assert draws == [second(1) for _ in range(5000)]
    assert np.median(draws) == pytest.approx(1e6, rel=0.01)
    assert np.std(np.log(draws)) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("wrong", [{"tau0_ns": -1}, {"alpha_ns": -1}, {"step_rows": 0}, {"noise": -0.1}])
def test_service_time_refuses_nonsense(wrong):
    """Negative times, steps or noise are refused when the model is made."""
    with pytest.raises(ValueError, match="must not be negative"):
        ServiceTime(**{"tau0_ns": 1, "alpha_ns": 1, **wrong})
