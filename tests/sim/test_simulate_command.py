"""`shoal simulate`: the keys it prints, agreement with theory, and clear words about wrong options."""

import json

import pytest

from shoal.cli.simulate import main
from shoal.sim.closed_forms import no_batching

BASE = ["--tau0-ms", "1.8874", "--alpha-ms", "0.1438", "--rate-per-s", "200"]
KEYS = [
    "mean_ms",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "mean_batch_rows",
    "max_batch_rows",
    "served",
    "refused",
    "expired",
    "busy_fraction",
]


def test_json_has_exactly_the_promised_keys(capsys):
    """One JSON object with these keys in this order, the same for the same seed."""
    outputs = []
    for _ in range(2):
        assert main([*BASE, "--requests", "2000", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    summary = json.loads(outputs[0])
    assert list(summary) == KEYS
    assert (summary["served"], summary["refused"], summary["expired"]) == (2000, 0, 0)


def test_without_batching_it_is_an_m_d_1_queue(capsys):
    """--max-batch-size 1 at half load comes within 5 % of M/D/1."""
    service = 1.8874 + 0.1438
    arguments = ["--tau0-ms", "1.8874", "--alpha-ms", "0.1438", "--rate-per-s", str(500 / service)]
    assert main([*arguments, "--max-batch-size", "1", "--requests", "40000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_ms"] == pytest.approx(no_batching(0.5 / service, service), rel=0.05)


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "onoff"])
def test_table_for_people(capsys, arrivals):
    """Without --json every key has a line of its own; overload with bounds and timeouts shows up in it."""
    options = [
        "--arrivals",
        arrivals,
        "--requests",
        "3000",
        "--max-queue-rows",
        "50",
        "--timeout-ms",
        "4",
        "--slots",
        "2",
        "--stage",
    ]
    assert main(["--tau0-ms", "5", "--alpha-ms", "1", "--rate-per-s", "20000", "--max-delay-ms", "1", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == KEYS
    assert int(lines[KEYS.index("refused")].split()[1].replace(",", "")) > 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--tau0-ms", "-1", "must be at least 0"),
        ("--alpha-ms", "nan", "must be at least 0"),
        ("--rate-per-s", "0", "must be above 0"),
        ("--rate-per-s", "inf", "must be above 0"),
        ("--requests", "0", "must be between 1 and"),
        ("--requests", "1.5", "is not a whole number"),
        ("--slots", "0", "must be between 1 and"),
        ("--max-delay-ms", "soon", "is not a number"),
        ("--timeout-ms", "0", "must be above 0"),
        ("--arrivals", "pareto", "invalid choice"),
        ("--max-queue-rows", "0", "must be between 1 and"),
    ],
)
def test_wrong_values_are_named(capsys, option, value, words):
    """A wrong value ends with status 2 and a line naming option and reason, never a traceback."""
    with pytest.raises(SystemExit) as ended:
        main([*BASE, option, value])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert option in error
    assert words in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tau0-ms", "0", "--alpha-ms", "0"], "must take some time"),
        (["--rows", "10", "--max-queue-rows", "5"], "never fits"),
        (["--rate-per-s", "1e-9"], "three years"),
        (["--rows", "100000", "--rate-per-s", "1e6"], "pieces"),
    ],
)
def test_contradictions_are_named(capsys, options, words):
    """Options that are fine alone but not together: status 2 and a sentence."""
    assert main([*BASE, *options]) == 2
    assert words in capsys.readouterr().err
