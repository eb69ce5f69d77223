"""Refused and expired requests on an overloaded simulated machine."""

from dataclasses import replace
from random import Random

import pytest

from admission.controller import Controller
from admission.core import PRIOR_STEP_TIME, CoreConfig, Overload, make_core
from admission.expiry import DeadlineExpiry
from admission.ledger import work_of
from admission.outcome import DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.overload import LearnedGuard
from admission.promise import Promise
from admission.scheduling_policy import QueueBounds, SchedulingPolicy
from admission.share import ASKING_S
from backend.config import EngineConfig
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from labs.controlled_delay import ControlledDelay
from labs.simulation.arrival import Arrival
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import AttemptOutcome, Objective
from labs.simulation.study import SimulatedRun
from tests.admission.clocked_core import ClockedCore
from tests.backend.sequences import make_sequence
from tests.labs.simulation.runs import DEVICE, simulated

ENGINE = "max_num_batched_tokens=512,max_num_seqs=192,prefill_chunk=512"
SMALL = EngineConfig(num_blocks=4096, max_model_len=8192, max_num_seqs=32, prefill_chunk=512)
PREFILL = 0.5  # seconds
INTERVAL, TARGET = 2.0, 0.5


def poisson(rate: float, seconds: float, tenant: str = "a", seed: int = 1, **fields: object) -> list[Arrival]:
    random, time, made = Random(seed), 0.0, []
    while (time := time + random.expovariate(rate)) < seconds:
        prompt, output = round(random.lognormvariate(6.6, 0.9)) + 1, round(random.lognormvariate(4.5, 0.8)) + 1
        made.append(Arrival(time, min(prompt, 8000), min(output, 1000), tenant=tenant, deadline=2.0, **fields))
    return made


def outcomes(policy: str, arrivals: list[Arrival]) -> list[tuple[Arrival, AttemptOutcome]]:
    recorder, core, _ = simulated(f"{policy},{ENGINE}", sorted(arrivals))
    assert not core.scheduler.has_work and core.backlog.total.count == 0
    return recorder.outcomes


def share(found: list[tuple[Arrival, AttemptOutcome]], *wanted: AttemptOutcome, tenant: str | None = None) -> float:
    own = [outcome for arrival, outcome in found if tenant in (None, arrival.tenant)]
    return sum(outcome in wanted for outcome in own) / len(own)


def waiting(core: Controller, n: int, tenant: str = "a", prompt: int = 400, **fields: object) -> Controller:
    for number in range(n):
        core.arrive(sequence(f"{tenant}{number}", tenant, prompt, **fields), 0.0)
    return core


def busy(n: int = 0, tenant: str = "a", **config: object) -> Controller:
    """A number of sequences of a tenant wait there."""
    return waiting(make_core(CoreConfig(**config), SMALL), n, tenant)


def sequence(name: str, tenant: str = "a", prompt: int = 400, **fields: object) -> Sequence:
    return make_sequence(name, tenant, prompt, 100, **fields)


def test_under_overload_refusing_early_serves_more_than_any_baseline() -> None:
    arrivals = poisson(9.0, 40)
    policies = ("order=fcfs,overload=unbounded", "order=adaptive_lifo,overload=controlled_delay", "order=fair")
    none, codel, deadline = (share(outcomes(policy, arrivals), AttemptOutcome.GOOD) for policy in policies)
    assert none < codel < deadline


def test_a_light_load_is_hardly_ever_refused() -> None:
    assert share(outcomes("order=fair", poisson(2.0, 40)), AttemptOutcome.GOOD) > 0.99


def test_a_tenant_beyond_its_share_is_refused_and_the_others_hardly_ever() -> None:
    flood = poisson(12.0, 60, "flood")
    light = [arrival for n in range(3) for arrival in poisson(0.6, 60, f"light-{n}", seed=n + 2)]
    fair, fcfs = (outcomes(f"order={order}", flood + light) for order in ("fair", "fcfs"))

    def lights(found: list[tuple[Arrival, AttemptOutcome]], *those: AttemptOutcome) -> float:
        return share([(arrival, outcome) for arrival, outcome in found if arrival.tenant != "flood"], *those)

    assert lights(fair, AttemptOutcome.GOOD) > 0.9 > lights(fcfs, AttemptOutcome.GOOD)
    turned_away = (AttemptOutcome.REFUSED, AttemptOutcome.EXPIRED)
    assert share(fair, *turned_away, tenant="flood") > 5 * lights(fair, *turned_away)


def test_a_flood_in_classes_that_no_other_tenant_uses_leaves_them_room() -> None:
    """What debtors leave was learned by class: 0.54 of the others' requests were good beside this flood."""
    flood = poisson(6.0, 60, "flood", 26, priority_class=0) + poisson(6.0, 60, "flood", 25, priority_class=2)
    light = [a for n in range(3) for a in poisson(0.6, 60, f"light-{n}", n + 177, priority_class=1)]
    found = outcomes("order=fair", flood + light)
    assert share([one for one in found if one[0].tenant != "flood"], AttemptOutcome.GOOD) > 0.9


@pytest.mark.parametrize(
    "hostile",
    [
        [Arrival(0.05 * n, 20, 1, tenant="hostile", deadline=0.001) for n in range(1200)],
        [Arrival(5.0 * n, 20, 1, tenant="hostile") for n in range(12)],
    ],
    ids=["refused at once", "of a more urgent class, without deadlines"],
)
def test_requests_that_cost_their_tenant_nothing_leave_others_the_time_that_they_had(hostile: list[Arrival]) -> None:
    """Neither deadlines that nobody could meet nor a class that is only asked for make other requests leave room."""
    honest = [a for n in range(3) for a in poisson(1.7, 60, f"honest-{n}", seed=n + 2, priority_class=1)]
    found = outcomes("order=fair", honest + hostile)
    assert share([one for one in found if one[0].tenant != "hostile"], AttemptOutcome.GOOD) > 0.99


@pytest.mark.parametrize("order", ["fair", "earliest_deadline"])
def test_urgent_work_goes_before_what_can_wait_and_the_urgent_pay_for_their_hurry(order: str) -> None:
    arrivals = [
        arrival._replace(deadline=deadline)
        for deadline, seed in ((0.7, 1), (2.0, 2), (8.0, 3))
        for arrival in poisson(2.4, 80, f"tenant-{seed}", seed)
    ]
    found = outcomes(f"order={order}", arrivals)
    recorder = {deadline: [f for a, f in found if a.deadline == deadline] for deadline in (0.7, 2.0, 8.0)}
    refused = {deadline: each.count(AttemptOutcome.REFUSED) / len(each) for deadline, each in recorder.items()}
    assert max(refused[8.0], refused[2.0]) < 0.05 < refused[0.7]
    assert share(found, AttemptOutcome.EXPIRED) < 0.01


@pytest.mark.parametrize("order", ["fair", "earliest_deadline"])
def test_no_admission_makes_an_admitted_request_late(order: str) -> None:
    core = busy(order=order)
    core.arrive(sequence("first", prompt=2000), 0.0)
    core.schedule(0.0)
    calm = sequence("calm", prompt=4000, first_token_by=9.9)
    told = core.arrive(calm, 0.0).first_token
    assert told is not None
    calm.request = replace(calm.request, first_token_by=1.02 * told)
    with pytest.raises(DeadlineInfeasible, match="others need the time in between"):
        core.arrive(sequence("urgent", prompt=2000, first_token_by=1.02 * told - 0.01), 0.0)
    core.arrive(sequence("more urgent class", prompt=10, first_token_by=0.99 * 1.02 * told), 0.0)


def test_a_lower_class_is_refused_before_a_higher_one() -> None:
    arrivals = poisson(5.0, 30, priority_class=0) + poisson(5.0, 30, seed=2, priority_class=1)
    found = outcomes("order=fair", arrivals)
    low, high = (
        share([(a, f) for a, f in found if a.priority_class == level], AttemptOutcome.REFUSED, AttemptOutcome.EXPIRED)
        for level in (1, 0)
    )
    assert low > 2 * high


def test_a_tenant_within_its_share_is_not_refused_for_the_classes_of_another() -> None:
    """Bursts in two classes had all requests of lower classes leave all of their time, for a minute after each; and, by
    what they were refused for one another, the lower class of a tenant of two.
    """
    in_classes = poisson(20.0, 60, "eager", priority_class=0) + poisson(20.0, 60, "eager", seed=2, priority_class=1)
    bursts = [arrival for arrival in in_classes if arrival.time % 20 < 3]
    light = poisson(1.0, 60, "light", seed=3, priority_class=1)
    found = outcomes("order=fair", bursts + light)
    assert share(found, AttemptOutcome.GOOD, tenant="light") > 0.9
    found = outcomes("order=fair", bursts + light + poisson(1.0, 60, "light", seed=4, priority_class=0))
    for level in (0, 1):
        of_class = [(arrival, outcome) for arrival, outcome in found if arrival.priority_class == level]
        assert share(of_class, AttemptOutcome.GOOD, tenant="light") > 0.85


def test_what_a_tenants_classes_refuse_each_other_has_no_other_tenant_leave_room() -> None:
    guard = LearnedGuard()
    before = guard.kept_for("b", 0, 1.0, 0.0)
    for _ in range(4):
        guard.learn("a", 0, False, True, 0.0)
    assert guard.kept_for("a", 1, 0.0, 0.0) > 0.9 and guard.kept_for("a", 1, 0.0, ASKING_S) == 0.0
    assert guard.kept_for("b", 0, 1.0, 0.0) <= before and guard.kept_for("b", 1, 0.0, 0.0) == 0.0
    for _ in range(4):
        guard.learn("c", 0, True, False, 0.0)
    assert min(guard.kept_for("b", level, 1.0, 0.0) for level in range(3)) > 0.9
    assert guard.kept_for("c", 1, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("deadline", ["first_token_by", "done_by"])
def test_an_idle_machine_refuses_only_requests_late_by_far(deadline: str) -> None:
    core = busy()
    with pytest.raises(DeadlineInfeasible) as refusal:
        core.arrive(sequence("hopeless", prompt=8000, **{deadline: 1e-3}), 0.0)
    assert refusal.value.slack == 1e-3 and not core.scheduler.waiting
    core.arrive(sequence("close", prompt=8000, **{deadline: 0.7 * refusal.value.estimate}), 0.0)
    assert len(core.scheduler.waiting) == 1


def test_a_replay_may_let_in_what_would_be_late_with_its_deadline() -> None:
    core = busy(200)
    core.control.refuses_late = False
    late = sequence("late", "b", first_token_by=0.01)
    told = core.arrive(late, 0.0).first_token
    assert told is not None and told > 0.01
    assert core.schedule(0.02) is not None
    assert core.take_ended() == [late]


def test_a_refusal_tells_the_estimate_and_when_to_come_back() -> None:
    core = busy(200)
    with pytest.raises(DeadlineInfeasible) as refusal:
        core.arrive(sequence("late", "b", first_token_by=0.01), 0.0)
    assert refusal.value.estimate > refusal.value.slack == 0.01
    assert 1 <= refusal.value.retry_after <= 60
    assert core.backlog.of("b").count == 0 and len(core.scheduler.waiting) == 200


def test_a_refusal_for_the_tenants_own_backlog_says_so() -> None:
    def is_own_doing(owner: str) -> bool:
        core = busy(200, owner, order="fcfs")
        with pytest.raises(DeadlineInfeasible) as refusal:
            core.arrive(sequence("x", "a", first_token_by=2.0), 0.0)
        return refusal.value.own_backlog

    assert is_own_doing("a") and not is_own_doing("b")


def test_a_last_token_that_would_be_late_is_a_reason_too() -> None:
    core = busy(50)
    with pytest.raises(DeadlineInfeasible, match="the last token is expected"):
        core.arrive(sequence("late", done_by=0.05), 0.0)


def test_a_length_that_no_answer_has_shown_refuses_nobody_who_waits_for_nobody() -> None:
    """Refused for it, a tenant would stay unknown for as long as the machine has work."""
    machine = ClockedCore(busy(), lambda step: PRIOR_STEP_TIME.seconds(work_of(step)))
    machine.add(sequence("running"))
    for _ in range(5):
        machine.step()

    def unknown(name: str, prompt: int) -> Sequence:
        return make_sequence(name, "b", prompt, 150, done_by=machine.now + 0.3)

    with pytest.raises(DeadlineInfeasible, match="the last token is expected"):
        machine.add(unknown("hopeless", 8000))
    machine.add(unknown("first", 10))
    with pytest.raises(DeadlineInfeasible, match="the last token is expected"):
        machine.add(unknown("behind", 10))


def test_a_request_without_a_deadline_waits_and_counts_as_deferred() -> None:
    core = busy(100)
    core.arrive(sequence("batch", first_token_target=0.01), 0.0)
    assert core.control.deferred == 1


def test_an_expired_request_never_computes_a_token_and_is_told_of_once() -> None:
    core = busy(1)
    late = sequence("late", first_token_by=5.0)
    core.arrive(late, 0.0)
    core.schedule(6.0)
    assert late.finish_reason is FinishReason.EXPIRED and late.num_computed_tokens == 0
    assert core.take_ended() == [late] and core.take_ended() == []


def test_bounds_are_kept_for_all_and_for_each_tenant() -> None:
    core = busy(5, max_waiting=8, tenant_max_waiting_tokens=2000)
    with pytest.raises(TenantQueueFull, match="2,400 tokens would wait, at most 2,000 may"):
        core.arrive(sequence("own"), 0.0)
    waiting(core, 4, "b")
    with pytest.raises(QueueFull, match="10 requests would wait, at most 8 may") as refusal:
        core.arrive(sequence("all", "b"), 0.0)
    assert refusal.value.waiting == 9 and not refusal.value.of_class


def in_answering(promise: Promise) -> float:
    """Seconds from its first token to its last, as it was told."""
    assert promise.first_token is not None and promise.last_token is not None
    return promise.last_token - promise.first_token


def test_a_last_token_is_expected_by_how_long_answers_have_taken() -> None:
    """Of answers that might have 100 tokens and have 10, a request that can wait for less than 100 is admitted."""
    core = busy()  # nothing is to be learned but lengths
    machine = ClockedCore(core, lambda step: PRIOR_STEP_TIME.seconds(work_of(step)))

    def last(name: str) -> Sequence:
        return machine.add(sequence(name, done_by=machine.now + 60.0))

    answers = [last(str(n)) for n in range(40)]
    cold = in_answering(core.ledger.promises[answers[-1]])
    while machine.scheduler.has_work:
        machine.step()
        for answer in answers:
            if len(answer.output) == 10:
                machine.finish(answer, FinishReason.STOP)
    assert 0 <= in_answering(core.ledger.promises[last("next")]) < cold / 4


@pytest.mark.parametrize(("rate", "kind"), [(4.0, "deadline"), (9.0, "deadline"), (9.0, "done_within")])
def test_nine_in_ten_first_and_last_tokens_come_by_when_clients_were_told(rate: float, kind: str) -> None:
    arrivals = [a._replace(**{"deadline": None, kind: 2.0 if kind == "deadline" else 20.0}) for a in poisson(rate, 90)]
    _, core, _ = simulated(f"order=fair,{ENGINE}", arrivals)
    calibration = core.control.calibration
    assert calibration.coverage == pytest.approx(0.9, abs=0.03)
    assert calibration.completion_coverage == pytest.approx(0.9, abs=0.04)


def test_an_infeasible_request_is_refused_before_it_costs_anything() -> None:
    arrivals = [arrival._replace(deadline=None, done_within=15.0) for arrival in poisson(9.0, 60)]
    found = {overload: outcomes(f"order=fcfs,overload={overload}", arrivals) for overload in ("deadline", "unbounded")}
    done = {name: share(each, AttemptOutcome.GOOD) for name, each in found.items()}
    assert done["deadline"] > 2 * done["unbounded"]
    assert share(found["deadline"], AttemptOutcome.EXPIRED) < 0.3


@pytest.mark.parametrize("overload", [Overload.UNBOUNDED, Overload.BOUNDED])
def test_baselines_give_up_nobody(overload: Overload) -> None:
    arrivals = [arrival._replace(deadline=0.5) for arrival in poisson(9.0, 20)]
    found = outcomes(f"order=fair,overload={overload},max_waiting=5", arrivals)
    assert share(found, AttemptOutcome.EXPIRED) == 0
    assert (share(found, AttemptOutcome.REFUSED) > 0) == (overload is Overload.BOUNDED)


@pytest.mark.parametrize(("overload", "deadline"), [("unbounded", 2.0), ("unbounded", 8.0), ("bounded", 2.0)])
def test_where_nobody_is_given_up_missed_deadlines_give_no_more_than_a_share(overload: str, deadline: float) -> None:
    """A deadline of the past must not be due before all others for ever."""
    tenants = {"stating": deadline, "silent": None}
    asked = [a._replace(deadline=by) for name, by in tenants.items() for a in poisson(9.0, 30, name)]
    policy = parse_simulated_policy(f"order=fair,overload={overload},{ENGINE}", DEVICE)
    run = SimulatedRun(policy, sorted(asked), DEVICE, Objective())
    run.loop.advance(30.0)
    stating, silent = (run.recorder.tenants[name].seconds for name in tenants)
    assert stating == pytest.approx(silent, rel=0.1)


def test_a_tenant_that_fills_the_queue_is_refused_and_one_within_its_share_is_not() -> None:
    core = busy(8, "flood", max_waiting=8)
    with pytest.raises(QueueFull):
        core.arrive(sequence("flood-8", tenant="flood"), 0.0)
    waiting(core, 4, "light")
    with pytest.raises(QueueFull):
        core.arrive(sequence("light-4", tenant="light"), 0.0)


def test_a_full_class_asks_what_a_tenant_has_waiting_in_it_and_not_in_others() -> None:
    core = busy()
    core.set_policy(SchedulingPolicy(offsets=(0.0, 2.0), bounds=(QueueBounds(count=8),)), 0.0)
    waiting(core, 8, "batch", priority_class=1)
    waiting(core, 8, "flood")
    core.arrive(sequence("urgent", "batch"), 0.0)
    with pytest.raises(QueueFull, match="10 requests would wait, at most 8 may"):
        core.arrive(sequence("flood-8", "flood"), 0.0)


def test_however_many_tenants_come_the_queue_stays_bounded() -> None:
    core, refused = busy(max_waiting=8), 0
    for number in range(40):
        try:
            core.arrive(sequence(f"{number}", tenant=f"tenant-{number}"), 0.0)
        except QueueFull:
            refused += 1
    assert (len(core.scheduler.waiting), refused) == (16, 24)


# who is given up


def watched(*sequences: Sequence) -> DeadlineExpiry:
    deadlines = DeadlineExpiry(lambda _: PREFILL)
    for each in sequences:
        deadlines.arrived(each, 0.0)
    return deadlines


def test_a_queued_request_is_given_up_when_even_the_fastest_prefill_would_be_late() -> None:
    one = make_sequence("one", first_token_by=2.0)
    deadlines = watched(one)
    assert deadlines.due(1.5) == []
    assert deadlines.due(1.6) == [one]


def test_a_queued_request_is_not_given_up_while_measured_prefill_is_fast_enough() -> None:
    prefill, one = 0.5, make_sequence("one", first_token_by=2.0)
    deadlines = DeadlineExpiry(lambda _: prefill)
    deadlines.arrived(one, 0.0)
    prefill = 0.125
    assert deadlines.due(1.75) == [] and deadlines.due(1.875) == []
    assert deadlines.due(1.9) == [one]


def test_a_request_in_prefill_has_until_the_deadline() -> None:
    one = make_sequence("one", first_token_by=2.0)
    one.status = SequenceStatus.RUNNING
    deadlines = watched(one)
    assert deadlines.due(1.9) == [] and deadlines.due(2.0) == [] and deadlines.due(2.1) == [one]


def test_a_request_with_a_deadline_for_its_last_token_is_given_up_when_even_the_first_would_be_late() -> None:
    one = make_sequence("one", done_by=2.0)
    deadlines = watched(one)
    assert deadlines.due(1.5) == [] and deadlines.due(1.6) == [one]
    running = make_sequence("running", done_by=2.0)
    running.status = SequenceStatus.RUNNING
    deadlines = watched(running)
    assert deadlines.due(1.6) == [] and deadlines.due(2.1) == [running]


def test_a_request_that_missed_several_deadlines_is_given_up_once_and_in_their_order() -> None:
    late, later = (
        make_sequence("late", first_token_by=1.0, done_by=4.0),
        make_sequence("later", first_token_by=2.0, done_by=3.0),
    )
    deadlines = watched(later, late)
    assert deadlines.due(9.0) == [late, later] and deadlines.due(9.0) == []


def test_a_first_token_settles_the_first_deadline_and_not_the_last() -> None:
    one = make_sequence("one", first_token_by=2.0, done_by=5.0)
    one.status, one.output = SequenceStatus.RUNNING, [7]
    deadlines = watched(one)
    assert deadlines.due(3.0) == [] and deadlines.due(5.1) == [one]


def test_a_request_that_ended_or_has_no_deadline_is_never_given_up() -> None:
    ended, free = make_sequence("ended", first_token_by=1.0), make_sequence("free")
    ended.status = SequenceStatus.FINISHED
    assert watched(ended, free).due(1e9) == []


def test_a_queue_not_empty_for_an_interval_bounds_waits_by_the_target() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    waiting = [make_sequence(str(n)) for n in range(30)]
    for n, each in enumerate(waiting):
        delay.arrived(each, n / 10)
        if n >= 2:
            delay.left_queue(waiting[n - 2], n / 10)  # two wait at any time
    late, early = waiting[-2:]
    assert delay.due(2.9 + TARGET - 0.05) == [late] and delay.due(2.9 + TARGET + 0.05) == [late, early]


def test_a_request_that_leaves_the_queue_is_not_given_up() -> None:
    delay = ControlledDelay(INTERVAL, TARGET)
    one = make_sequence("one")
    delay.arrived(one, 0.0)
    delay.left_queue(one, 0.1)
    delay.left_queue(one, 0.2)
    assert delay.due(100.0) == []
