"""Who goes first: tenants by weight, deadlines, levels with ageing, filling up; and what is given up. Values computed by hand."""

from shoal.config.settings import BatchingSettings, LengthSettings, LevelSettings, QueueSettings
from shoal.core.decisions import Dispatch, Drop, Refuse
from shoal.core.latency import LatencyModel
from shoal.core.scheduler import Scheduler
from shoal.core.ticket import Ticket, TicketState

MS = 1_000_000


def scheduler(executors=1, latency=None, queue=None, **batching):
    """A scheduler with a batch limit of 4."""
    settings = BatchingSettings(**{"max_batch_size": 4, **batching})
    return Scheduler(settings, QueueSettings(**(queue or {})), executors=executors, latency=latency)


def exact(fixed_ms=1.0, row_ms=1.0):
    """A model of time that knows the law of batches."""
    latency = LatencyModel()
    for rows in (1, 2, 4, 8):
        latency.observe(rows, 0, round((fixed_ms + row_ms * rows) * MS))
    return latency


def batches(machine, now_ns=0, taken_ns=1, most=100):
    """The payloads of the batches that one executor runs one after the other."""
    found = []
    for _ in range(most):
        started = [decision.batch for decision in machine.poll(now_ns) if isinstance(decision, Dispatch)]
        if not started:
            return found
        found.append([ticket.payload for ticket in started[0].members])
        now_ns += taken_ns
        machine.complete(started[0], now_ns)
    return found


def submit(machine, names, now_ns=0, **fields):
    """One ticket of one row for each name; all are accepted."""
    for name in names:
        ticket = Ticket(payload=name, **fields)
        assert machine.submit(ticket, now_ns) is None


def test_weights_one_to_three():
    """Of every batch of four the tenant of weight 3 has three rows, from the first batch on."""
    machine = scheduler(queue={"tenant_weights": {"a": 1.0, "b": 3.0}})
    submit(machine, ["a"] * 20, tenant="a")
    submit(machine, ["b"] * 20, tenant="b")
    assert [sorted(batch) for batch in batches(machine)[:5]] == [["a", "b", "b", "b"]] * 5


def test_without_fairness_tenants_do_not_matter():
    """First in, first out."""
    machine = scheduler(order="deadline")
    submit(machine, [1, 2, 3], tenant="a")
    submit(machine, [4, 5], tenant="b")
    assert batches(machine) == [[1, 2, 3, 4], [5]]


def test_tenants_beyond_the_bound_share_one_place():
    """With room for two tenants the third and the fourth stand in one flow, and get one share together."""
    machine = scheduler(queue={"fair_tenants": True, "max_tenants": 2}, max_batch_size=3)
    for tenant in "abcd":
        submit(machine, [tenant] * 6, tenant=tenant)
    first = [name for batch in batches(machine, most=4) for name in batch]
    assert (first.count("a"), first.count("b"), first.count("c") + first.count("d")) == (4, 4, 4)


def test_earliest_deadline_first_inside_a_tenant():
    """Shorter timeouts overtake; without one a request counts as accepted plus the objective."""
    machine = scheduler(order="deadline", max_batch_size=2, queue={"slo_ms": 20})
    submit(machine, ["objective"])
    submit(machine, ["late"], deadline_ns=50 * MS)
    submit(machine, ["soon"], deadline_ns=5 * MS)
    assert batches(machine) == [["soon", "objective"], ["late"]]


def test_levels_are_strict_and_the_lower_ones_fill_up():
    """A lower level rides along only where there is room left."""
    machine = scheduler(order="deadline", queue={"priority_levels": 2})
    submit(machine, ["low"] * 5, level=2)
    submit(machine, ["high"] * 3, level=1)
    assert batches(machine) == [["high", "high", "high", "low"], ["low"] * 4]


def test_filling_up_stops_at_the_next_allowed_size():
    """Three rows are padded to four anyway: one lower row fills that place, no more."""
    machine = scheduler(max_batch_size=8, allowed_batch_sizes=(1, 2, 4, 8), queue={"priority_levels": 2})
    submit(machine, ["low"] * 5, level=2)
    submit(machine, ["high"] * 3, level=1)
    assert batches(machine)[0] == ["high", "high", "high", "low"]


def test_ageing():
    """After one `aging_ms` level 2 stands on level 1 and wins by age; after two it goes before everything."""
    queue = {"priority_levels": 2, "aging_ms": 10}
    machine = scheduler(max_batch_size=1, queue=queue)
    submit(machine, ["low"], level=2)
    submit(machine, ["high"], now_ns=9 * MS, level=1)
    assert batches(machine, now_ns=9 * MS + 1, most=1) == [["high"]]
    submit(machine, ["higher"], now_ns=10 * MS, level=1)
    assert batches(machine, now_ns=10 * MS, most=2) == [["low"], ["higher"]]


def test_the_largest_batch_in_time_and_who_is_passed_over():
    """l(b) = 1 + b ms. Deadlines 2.5, 4, 9, 9, 9 ms: of four, ending at 5 ms, one would be late; three end at 4 ms, in time."""
    machine = scheduler(early_drop=True, latency=exact())
    for name, deadline in (("a", 2.5), ("b", 4), ("c", 9), ("d", 9), ("e", 9)):
        submit(machine, [name], deadline_ns=round(deadline * MS))
    decisions = machine.poll(0)
    (batch,) = [decision.batch for decision in decisions if isinstance(decision, Dispatch)]
    assert [ticket.payload for ticket in batch.members] == ["b", "c", "d"]
    assert not any(isinstance(decision, Drop) for decision in decisions), "another executor might still serve it"


def test_what_is_hopeless_goes_at_once():
    """A deadline before now + l(1) is given up at the next start, as DROPPED, and counted; without a model nothing is."""
    machine = scheduler(early_drop=True, latency=exact())
    submit(machine, ["late"], deadline_ns=round(1.9 * MS))
    submit(machine, ["good"], deadline_ns=2 * MS)
    (drop, dispatch) = sorted(machine.poll(0), key=lambda decision: isinstance(decision, Dispatch))
    assert [(ticket.payload, ticket.state) for ticket in drop.tickets] == [("late", TicketState.DROPPED)]
    assert [ticket.payload for ticket in dispatch.batch.members] == ["good"]
    assert machine.snapshot(0).dropped == 1
    blind = scheduler(early_drop=True)
    submit(blind, ["late"], deadline_ns=1)
    assert batches(blind) == [["late"]]


def test_budget_by_cost_to_the_exact_limit():
    """Costs 4 + 6 fill a budget of 10 exactly; 11 alone is refused by name; what is behind it goes on."""
    machine = scheduler(max_batch_cost=10, cost="costs:of")
    costs = []
    for cost in (4, 6, 3, 10, 11):
        ticket = Ticket(payload=cost)
        ticket.cost = cost
        costs.append(machine.submit(ticket, 0))
    assert costs == [None, None, None, None, Refuse("too_large", "cost", 10, 11)]
    assert batches(machine) == [[4, 6], [3], [10]]


def test_rows_of_like_length_go_together():
    """With 40 padded tokens a head of length 10 takes the other tens along, not the long row between them."""
    machine = scheduler(max_batch_cost=40, cost="tokens", lengths={"ids": LengthSettings(policy="pad", mask="mask")})
    for length in (10, 40, 10, 9, 10):
        ticket = Ticket(payload=length)
        ticket.length = length
        assert machine.submit(ticket, 0) is None
    assert [sorted(batch) for batch in batches(machine)] == [[9, 10, 10, 10], [40]]


def test_a_level_has_bounds_and_timeouts_of_its_own():
    """Level 2 holds one request and gives it 5 ms; level 1 is not touched by that."""
    own = LevelSettings(max_queue_requests=1, default_timeout_ms=5)
    machine = scheduler(queue={"priority_levels": 2, "levels": {2: own}})
    first, second = Ticket(level=2), Ticket(level=2)
    assert machine.submit(first, 0) is None
    assert machine.submit(second, 0) == Refuse("queue_full", "requests", 1, 1)
    assert machine.submit(Ticket(level=1), 0) is None
    assert machine.next_wakeup_ns() == 0
    assert first.expiry_ns == 5 * MS


def test_settings_change_under_way():
    """A smaller limit holds from the next batch on; what waited keeps its place; a cap comes on top and goes again."""
    machine = scheduler()
    submit(machine, [1, 2, 3, 4, 5, 6, 7])
    machine.cap_rows(1, 0)
    assert batches(machine, most=1) == [[1]]
    machine.cap_rows(None, 0)
    machine.reconfigure(BatchingSettings(max_batch_size=3, mode="adaptive"), QueueSettings(), 0)
    assert batches(machine) == [[2, 3, 4], [5, 6, 7]]
