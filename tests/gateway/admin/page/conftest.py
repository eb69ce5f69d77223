"""A browser for all tests of the page; a gateway and tabs for each."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.gateway.admin.page.browser import Chromium, Page, find_chromium, running_chromium
from tests.gateway.admin.page.fake_gateway import KEY, FakeGateway
from tests.gateway.admin.page.steps import PageMaker, sign_in


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("the page is tested in Chromium, and there is none: apt-get install chromium")
    with running_chromium(binary) as chromium:
        yield chromium


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    gateway = FakeGateway()
    gateway.start()
    yield gateway
    gateway.stop()


@pytest.fixture
def open_page(chromium: Chromium, gateway: FakeGateway) -> Iterator[PageMaker]:
    """Makes a tab that asks for the key. No test may break the policy, throw, or ask another origin."""
    pages: list[Page] = []
    with ExitStack() as tabs:

        def make(**options: int | bool) -> Page:
            page = tabs.enter_context(chromium.opened_page(**options))  # type: ignore[arg-type]
            pages.append(page)
            page.go(gateway.url)
            page.until("!document.querySelector('#sign-in').hidden")
            return page

        yield make
        for page in pages:
            assert [said for said in page.complaints() if not said.startswith("network")] == []
            mine = (f"{gateway.url}/", f"blob:{gateway.url}/", "data:")  # the last are the browser's icons of fields
            assert [url for url in page.requested() if not url.startswith(mine)] == []


@pytest.fixture
def open_board(open_page: PageMaker) -> PageMaker:
    """Makes a tab that has signed in and shows the first answers."""

    def make(**options: int | bool) -> Page:
        page = open_page(**options)
        sign_in(page, KEY)
        page.until("document.querySelector('.pool path') && document.querySelector('.line')")
        return page

    return make


@pytest.fixture
def board(open_board: PageMaker) -> Page:
    return open_board()
