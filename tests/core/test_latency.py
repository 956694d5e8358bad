"""The cost model: what it makes of lines, staircases, scatter, drift and nonsense, and that its record comes back the same."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.latency import LatencyModel


def taught(pairs, **options):
    """A model that has seen (work, nanoseconds)."""
    model = LatencyModel(**options)
    for work, taken_ns in pairs:
        model.observe(work, 0, taken_ns)
    return model


@given(tau0=st.integers(0, 10**7), alpha=st.integers(1, 10**6))
def test_an_exact_line_is_found(tau0, alpha):
    """Noiseless batches of 1, 2, 4, …, 64 rows give back tau0, alpha, and estimates without margin."""
    model = taught([(rows, tau0 + alpha * rows) for rows in (1, 2, 4, 8, 16, 32, 64)])
    assert model.tau0_ns == pytest.approx(tau0, rel=1e-6, abs=alpha * 1e-3)
    assert model.alpha_ns == pytest.approx(alpha, rel=1e-6)
    assert model.upper_ns(10) == pytest.approx(tau0 + 10 * alpha, rel=1e-6, abs=2)


def test_nothing_known_is_nothing_said():
    """Before the second size (or the twentieth batch of one) estimates are 0; then one size is taken to be proportional."""
    model = LatencyModel()
    assert (model.known, model.expected_ns(5), model.upper_ns(5)) == (False, 0, 0)
    for _ in range(20):
        model.observe(4, 0, 4000)
    assert model.known
    assert (model.expected_ns(4), model.expected_ns(8)) == (4000, pytest.approx(8000, abs=1))


def test_equal_sizes_leave_the_line_alone():
    """Ten thousand batches of one size, slower by half, move that size's mean and not what is known of others."""
    model = taught([(rows, 1000 + 100 * rows) for rows in (1, 8, 64)])
    for _ in range(10_000):
        model.observe(8, 0, 2700)
    assert model.expected_ns(8) == pytest.approx(2700, rel=0.01)
    assert model.expected_ns(64) >= 7000


def test_staircases_by_size():
    """A size seen twenty times is known by its mean, wherever the line runs."""
    model = taught([(rows, 1000 * -(-rows // 8)) for _ in range(30) for rows in range(1, 33)])
    means = [model.expected_ns(rows) for rows in (1, 8, 9, 16, 32)]
    assert means == pytest.approx([1000, 1000, 2000, 2000, 4000], rel=0.06)
    assert model.tau0_ns + model.alpha_ns * 1 < 700 or model.tau0_ns + model.alpha_ns * 8 > 1100, "the line itself is far off"


def test_coverage_under_scatter():
    """With 5 % scatter about 95 % of batches stay within the upper estimate, and a few pauses of 3 times do not blow it up."""
    draw = random.Random(3)
    model = LatencyModel()
    inside = []
    for index in range(4000):
        rows = draw.randint(1, 64)
        taken_ns = round((2e6 + 1e5 * rows) * draw.lognormvariate(0.0, 0.05) * (3 if index % 100 == 99 else 1))
        if index > 500:
            inside.append(taken_ns <= model.upper_ns(rows))
        model.observe(rows, 0, taken_ns)
    assert 0.92 < sum(inside) / len(inside) < 0.98
    assert model.upper_ns(32) < 1.15 * 5.2e6


def test_drift_is_followed():
    """When batches take twice as long, so do the estimates within some hundred batches."""
    draw = random.Random(4)
    model = taught([(rows, 1000 + 100 * rows) for _ in range(50) for rows in (1, 8, 32, 64)])
    for _ in range(600):
        rows = draw.choice([1, 8, 32, 64])
        model.observe(rows, 0, 2000 + 200 * rows)
    assert model.expected_ns(32) == pytest.approx(8400, rel=0.1)


@given(
    st.lists(st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.integers(0, 300), st.integers(-5, 10**12)), max_size=60)
)
def test_nonsense_never_makes_negative_or_infinite_estimates(observations):
    """Whatever is reported, estimates are finite and not negative."""
    model = LatencyModel()
    for work, length, taken_ns in observations:
        model.observe(work, length, taken_ns)
    for work in (1, 7, 1000):
        for length in (0, 5, 200):
            assert 0 <= model.expected_ns(work, length) < 10**30
            assert 0 <= model.upper_ns(work, length) < 10**30


def test_a_new_length_borrows_from_the_nearest():
    """Nothing was seen of length 100: the line of length 64 says what its tokens cost."""
    model = LatencyModel()
    for rows in (1, 2, 4):
        model.observe(rows * 64, 64, 1000 + rows * 640)
        model.observe(rows * 8, 8, 1000 + rows * 8000)
    assert model.expected_ns(100, 100) == pytest.approx(2000, rel=0.01)


def test_record_round_trip_and_rubbish():
    """What was written comes back the same through JSON; anything else is a ValueError."""
    model = taught([(rows, 1000 + 100 * rows) for _ in range(30) for rows in (1, 3, 9)])
    again = LatencyModel.from_record(json.loads(json.dumps(model.to_record())))
    assert [again.upper_ns(rows) for rows in range(1, 40)] == [model.upper_ns(rows) for rows in range(1, 40)]
    record = model.to_record()
    for rubbish in (
        {},
        {**record, "format": 99},
        {**record, "scatter": "much"},
        {**record, "lines": {"0": {}}},
        {**record, "lines": 5},
    ):
        with pytest.raises(ValueError):
            LatencyModel.from_record(rubbish)
