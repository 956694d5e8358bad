"""`shoal simulate`: the keys it prints, agreement with theory, and clear words about wrong options."""

import json
from xml.etree import ElementTree

import pytest

from shoal.cli.simulate import main
from shoal.sim.closed_forms import no_batching
from shoal.sim.simulator import max_min_shares

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
    "dropped",
    "busy_fraction",
    "padding_factor",
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
        ("--mode", "clever", "invalid choice"),
        ("--slo-ms", "0", "must be above 0"),
        ("--tenants", "a:1", "must look like NAME:WEIGHT:SHARE"),
        ("--tenants", "a:-1:1", "must be above 0"),
        ("--tenants", "a:1:1,a:1:1", "names a tenant twice"),
        ("--levels", "0.5,0", "must be above 0"),
        ("--aging-ms", "nan", "must be above 0"),
        ("--lengths", "normal:3:4", "must begin with lognormal: or uniform:"),
        ("--lengths", "uniform:9:4", "smallest length above the largest"),
        ("--lengths", "lognormal:20:0.7", "must look like"),
        ("--burst", "fanout:1", "must be between 2 and"),
        ("--burst", "wave:3", "must begin with fanout: or onoff:"),
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
        (["--plot", "x.svg"], "give both"),
        (["--slow-share", "2"], "at most 1"),
        (["--max-batch-tokens", "100"], "needs --lengths"),
        (["--lengths", "uniform:4:200", "--max-batch-tokens", "100"], "never fits"),
        (["--early-drop"], "needs an objective"),
    ],
)
def test_contradictions_are_named(capsys, options, words):
    """Options that are fine alone but not together: status 2 and a sentence."""
    assert main([*BASE, *options]) == 2
    assert words in capsys.readouterr().err


def test_what_an_objective_tenants_and_lengths_add(capsys):
    """Each brings its figures: shares in time and goodput, Jain's index, padding; with twice the load, weights 1 : 3 are kept."""
    options = ["--rate-per-s", "10000", "--max-batch-size", "32", "--requests", "8000", "--json"]
    tenants = ["--tenants", "a:1:0.5,b:3:0.5", "--mode", "adaptive", "--slo-ms", "12"]
    assert main([*BASE, *options, *tenants]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary) == [*KEYS, "in_time_share", "goodput_per_s", "fairness"]
    assert summary["dropped"] + summary["served"] == 8000
    assert summary["in_time_share"] == summary["served"] / 8000
    assert main([*BASE, "--lengths", "uniform:10:30", "--requests", "2000", "--json"]) == 0
    assert 1.0 <= json.loads(capsys.readouterr().out)["padding_factor"] < 1.5


def test_comparison_as_table_and_picture(capsys, tmp_path):
    """One line for each policy under a head line; the picture names every policy and is well-formed XML."""
    picture = tmp_path / "compare.svg"
    assert main([*BASE, "--requests", "2000", "--compare", "--slo-ms", "8", "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert names[:2] == ["policy", "no batching"]
    assert names[-1] == "adaptive"
    assert len(lines) == 8
    texts = [element.text for element in ElementTree.fromstring(picture.read_text()).iter() if element.tag.endswith("text")]
    assert set(names[1:]) <= set(texts)
    assert main([*BASE, "--requests", "10", "--compare", "--plot", str(tmp_path / "no" / "x.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_fair_shares_by_weight():
    """Who wants little gets it; the rest goes by weight. 100 for wants of 10, 90 and 90 with weights 1, 1 and 2."""
    assert max_min_shares({"a": 10.0, "b": 90.0, "c": 90.0}, {"c": 2.0}, 100.0) == {"a": 10.0, "c": 60.0, "b": 30.0}
    assert max_min_shares({"a": 1.0, "b": 2.0}, {}, 100.0) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(("rate", "weighted"), [("3000", True), ("10000", True), ("10000", False)])
def test_fairness_is_about_fair_shares(capsys, rate, weighted):
    """With and without overload, whatever they send and weigh, fair queueing gives tenants the same part of their fair share."""
    tenants = "a:1:0.5,b:3:0.5" if weighted else "a:1:0.9,b:9:0.1"
    options = ["--rate-per-s", rate, "--max-batch-size", "32", "--requests", "8000", "--tenants", tenants, "--json"]
    assert main([*BASE, *options, "--mode", "adaptive", "--slo-ms", "12"]) == 0
    assert json.loads(capsys.readouterr().out)["fairness"] == pytest.approx(1.0, abs=0.01)


def test_steps_make_batches_slower(capsys):
    """With steps of 16 rows a lone request takes as long as 16: 1.8874 + 16 · 0.1438 ms."""
    assert main([*BASE, "--rate-per-s", "1", "--requests", "50", "--step-rows", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_ms"] == pytest.approx(1.8874 + 16 * 0.1438, rel=0.01)
