import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings

from admission.share import weight_of
from gateway.background import beside
from gateway.tenants.live_policy import Check, Edition, LivePolicy, scheduling_policy
from quotas.policy.limit import Resource
from quotas.policy.policy import DEFAULT_POLICY, Policy
from quotas.policy.policy_file import PolicyError
from tests.examples import examples
from tests.quotas.policies import policies as random_policies

News = TypeVar("News")

ONE = "tenants:\n  acme:\n    weight: 2\n"
TWO = "tenants:\n  acme:\n    weight: 3\n"


def policies(path: Path, text: str = ONE) -> LivePolicy:
    path.write_text(text)
    return LivePolicy(path)


async def edit(held: LivePolicy, text: str) -> None:
    (path,) = held.files()
    path.write_text(text)
    await held.reload()


def telling(told: list[News]) -> Callable[[News], Awaitable[None]]:
    async def tell(news: News) -> None:
        told.append(news)

    return tell


def test_without_a_file_the_built_in_policy_holds() -> None:
    assert LivePolicy(None).current is DEFAULT_POLICY


def test_an_invalid_policy_is_nothing_to_begin_with(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"p\.yaml:1:"):
        policies(tmp_path / "p.yaml", "tenant: {}\n")


async def test_a_listener_that_fails_keeps_no_edit_from_the_others(tmp_path: Path) -> None:
    held = policies(tmp_path / "p.yaml")
    told: list[Policy | PolicyError] = []

    async def fail(_: object) -> None:
        raise RuntimeError

    held.on_change += [fail, telling(told)]
    held.on_failure += [fail, telling(told)]
    for text in (TWO, "tenant: {}\n"):
        with pytest.raises(ExceptionGroup, match="listeners"):
            await edit(held, text)
    assert told == [held.current, held.problem]


def heavier_than(most: float) -> Check:
    return lambda policy: [
        (f"tenants.{name}.weight", f"is above {most:g}: lower it")
        for name, tenant in policy.tenants.items()
        if tenant.weight > most
    ]


async def test_an_edit_that_the_gateway_cannot_keep_to_changes_nothing_and_is_told_at_its_place(tmp_path: Path) -> None:
    held = policies(tmp_path / "p.yaml")
    held.require(heavier_than(2))
    before = held.current
    await edit(held, TWO)
    assert held.current is before
    assert str(held.problem) == f"{tmp_path / 'p.yaml'}:3:5: tenants.acme.weight: is above 2: lower it"
    await edit(held, "defaults: {weight: 4}\ntenants: {acme: }\n")
    assert str(held.problem) == f"{tmp_path / 'p.yaml'}:1:12: tenants.acme.weight: is above 2: lower it"
    await edit(held, "tenants: {acme: {weight: 1}}\n")
    assert held.problem is None and held.current.tenant("acme").weight == 1


@pytest.mark.parametrize("name", ["acme", "a.b", "a.b.c", "defaults", "acme.weight"])
def test_an_inherited_field_is_told_at_the_place_of_the_default_also_of_a_name_with_dots(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a.yaml").write_text("unnamed_tenants: allow\n")
    (tmp_path / "p.yaml").write_text(f"defaults:\n  prefix_cache:\n    floor: 1GiB\ntenants:\n  {name}:\n")
    field = f"tenants.{name}.prefix_cache.floor"
    with pytest.raises(PolicyError, match=rf"p\.yaml:3:5: {field}: too much"):
        LivePolicy(tmp_path).require(lambda _: [(field, "too much")])


def test_a_policy_that_the_gateway_cannot_keep_to_is_nothing_to_begin_with(tmp_path: Path) -> None:
    held = policies(tmp_path / "p.yaml")
    with pytest.raises(PolicyError, match=r"p\.yaml:3:5: tenants\.acme\.weight: is above 1"):
        held.require(heavier_than(1))
    LivePolicy(None).require(heavier_than(1))


async def test_an_edit_of_comments_alone_changes_nothing(tmp_path: Path) -> None:
    held = policies(tmp_path / "p.yaml")
    before = held.current
    await edit(held, f"# a comment\n{ONE}")
    assert held.current is before and held.num_reloads == 0


async def test_every_version_is_remembered_with_what_it_changed(tmp_path: Path) -> None:
    now = iter((10.0, 20.0))
    (tmp_path / "p.yaml").write_text(ONE)
    held = LivePolicy(tmp_path / "p.yaml", clock=lambda: next(now))
    first = held.current.version
    await edit(held, TWO)
    assert list(held.history) == [
        Edition(first, 10.0, ()),
        Edition(held.current.version, 20.0, ("tenant acme", "  weight: 2 -> 3")),
    ]


async def test_the_listener_for_failures_is_told_the_problem(tmp_path: Path) -> None:
    held = policies(tmp_path / "p.yaml")
    told: list[PolicyError] = []
    held.on_failure.append(telling(told))
    await edit(held, "tenant: {}\n")
    assert told == [held.problem]


async def test_all_files_of_a_folder_are_taken_up_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(ONE)
    held = LivePolicy(tmp_path)
    (tmp_path / "b.yaml").write_text("tenants:\n  other:\n    weight: 5\n")
    assert len(list(held.files())) == 2
    await held.reload()
    assert (held.current.tenant("acme").weight, held.current.tenant("other").weight) == (2, 5)


async def test_of_two_reloads_at_once_the_later_edit_wins_for_all_listeners(tmp_path: Path) -> None:
    held = policies(tmp_path / "p.yaml")
    told: list[float] = []

    async def tell(policy: Policy) -> None:
        if not told:
            told.append(0)
            (tmp_path / "p.yaml").write_text(ONE.replace("2", "4"))
            later.append(asyncio.create_task(held.reload()))
            for _ in range(3):
                await asyncio.to_thread(tuple)
        told.append(policy.tenant("acme").weight)

    later: list[asyncio.Task[None]] = []
    held.on_change.append(tell)
    await edit(held, TWO)
    await later[0]
    assert told == [0, 3, 4]
    assert held.current.tenant("acme").weight == 4


async def test_a_policy_that_is_edited_before_the_files_are_watched_takes_effect(tmp_path: Path) -> None:
    """As while the model loads."""
    policy = tmp_path / "policy.yaml"
    held = policies(policy, "tenants:\n  acme:\n    weight: 2\n")
    edited = asyncio.Event()

    async def tell(_: object) -> None:
        edited.set()

    policy.write_text("tenants:\n  acme:\n    weight: 30\n")
    held.on_change.append(tell)
    async with beside(held.follow()):
        await edited.wait()
    assert held.current.tenant("acme").weight == 30


@pytest.mark.parametrize("refused", ["open", "iterdir"])
async def test_an_edit_while_the_files_cannot_be_read_is_followed_once_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(ONE)
    held = LivePolicy(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    file.write_text(f"{TWO}    # edited")
    with monkeypatch.context() as patch:
        patch.setattr(Path, refused, refuse)
        for _ in range(5):
            await held._watcher.poll()
        assert "Too many open files" in str(held.problem) and held.num_failures == 1
    for _ in range(2):
        await held._watcher.poll()
    assert held.current.tenant("acme").weight == 3 and held.problem is None


@settings(max_examples=examples(30), deadline=None)
@given(random_policies())
def test_the_scheduler_is_told_of_the_tenants_that_differ_and_knows_all(policy: Policy) -> None:
    told = scheduling_policy(policy)
    for name in (*policy.tenants, "stranger"):
        tenant = policy.tenant(name)
        bounds = [limit.amount for limit in tenant.limits if limit.resource is Resource.QUEUED_REQUESTS]
        assert weight_of(name, told.weights) == tenant.weight / policy.default.weight
        assert told.most_waiting(name) == (bounds[0] if bounds else None)


async def test_an_edit_of_one_tenant_reads_that_tenant_alone(tmp_path: Path) -> None:
    names = "".join(f"  t{number}: {{weight: {1 + number}}}\n" for number in range(200))
    held = policies(tmp_path / "p.yaml", f"tenants:\n{names}")
    before = held.current
    await edit(held, f"tenants:\n{names}".replace("weight: 51}", "weight: 900}"))
    assert held._reader.known.num_read == 201
    assert [name for name in before.tenants if held.current.tenants[name] is not before.tenants[name]] == ["t50"]
    assert held.history[-1].changes == ("tenant t50", "  weight: 51 -> 900")
