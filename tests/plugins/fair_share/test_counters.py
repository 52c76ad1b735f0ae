"""fair-share: the scheduler's contract, equal service, no credit for idleness, a light tenant's bounded wait."""

from mini_infer.interfaces import OrderPolicy
from mini_infer.reference.scheduler import ArrivalOrder, ComposedScheduler, LastArrived, WholePrompts
from mini_infer.testing.contracts import scheduler_suite
from mini_infer.testing.contracts.scheduler import FakeRequest, World
from mini_infer_plugins.fair_share.counters import FairShare


def composed(order: OrderPolicy | None = None) -> ComposedScheduler:
    return ComposedScheduler(order or FairShare(1.0, 2.0), LastArrived(), WholePrompts())


TestContract = scheduler_suite(composed)


def fake(name: str, arrival: float, tenant: str, prompt: int = 8, output: int = 4) -> FakeRequest:
    return FakeRequest(name, arrival, prompt, output, 0, None, tenant)


def world(num_seqs: int = 2) -> World:
    made = World.random(0)
    made.budget, made.max_num_seqs = 64, num_seqs
    return made


def served(world: World) -> dict[str, int]:
    """Tokens granted to each tenant so far."""
    total: dict[str, int] = {}
    for step in world.log:
        for name, num_tokens, _ in step:
            total[name[0]] = total.get(name[0], 0) + num_tokens
    return total


def wait_of_a_light_request(order: OrderPolicy, flood: int) -> float:
    """Seconds until tenant b's one request is admitted behind tenant a's flood."""
    w, scheduler = world(), composed(order)
    w.waiting += [fake(f"a{number}", w.now, "a") for number in range(flood)]
    for _ in range(4):
        w.step(scheduler)
    arrived, light = w.now, fake("b", w.now, "b")
    w.waiting.append(light)
    while not light.running:
        w.step(scheduler)
    return w.now - arrived


def test_a_light_tenant_s_wait_does_not_grow_with_another_s_flood() -> None:
    waits = [wait_of_a_light_request(FairShare(1.0, 2.0), flood) for flood in (10, 40, 160)]
    assert waits[0] == waits[1] == waits[2] <= 5 * 0.05  # four steps a request: a slot is free within them
    assert wait_of_a_light_request(ArrivalOrder(), 160) > 10 * waits[0]


def test_tenants_with_work_waiting_are_served_alike() -> None:
    """Sheng et al., theorem 4.4: the difference never exceeds twice the larger of a prompt's and a batch's service."""
    w, scheduler = world(4), composed()
    w.waiting += [fake(f"a{number}", w.now, "a", prompt=30, output=2) for number in range(60)]
    w.waiting += [fake(f"b{number}", w.now, "b", prompt=6, output=12) for number in range(120)]
    while sum(r.tenant == "a" for r in w.waiting) and sum(r.tenant == "b" for r in w.waiting):
        w.step(scheduler)
        policy = scheduler._order
        assert isinstance(policy, FairShare)
        assert abs(policy._counters["a"] - policy._counters["b"]) <= 2 * max(30, 2 * 4 * 12)
    assert set(served(w)) == {"a", "b"}


def test_idleness_is_no_credit() -> None:
    """b comes back after a has been served for long: they take turns from then on."""
    w, scheduler = world(1), composed()
    w.waiting.append(fake("b-first", w.now, "b"))
    w.waiting += [fake(f"a{number}", w.now, "a") for number in range(60)]
    for _ in range(80):
        w.step(scheduler)
    w.waiting += [fake(f"b{number}", w.now, "b") for number in range(20)]
    before = served(w)
    for _ in range(60):
        w.step(scheduler)
    gained = {tenant: tokens - before[tenant] for tenant, tokens in served(w).items()}
    assert abs(gained["a"] - gained["b"]) <= 2 * (8 + 4)
