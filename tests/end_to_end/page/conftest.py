"""All tests of the page share a browser; each has a gateway and tabs of its own, unless it only looks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.end_to_end.page.browser import Chromium, find_chromium, running_chromium
from tests.end_to_end.page.fake_gateway import KEY, FakeGateway
from tests.end_to_end.page.page_object import Page, PageMaker
from tests.gateway.server_process import ServerProcess


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


@contextmanager
def opened_tabs(chromium: Chromium) -> Iterator[PageMaker]:
    """Makes tabs that ask for a gateway's key.

    At the end of the block none may have broken the content security policy, thrown, or asked another origin.
    """
    pages: list[tuple[Page, str]] = []
    with ExitStack() as tabs:

        def make(url: str, view: str = "", **options: int | bool) -> Page:
            page = tabs.enter_context(chromium.opened_page(**options))  # type: ignore[arg-type]
            pages.append((page, url))
            page.go(f"{url}/{view}")
            page.until_shown("#sign-in")
            return page

        yield make
        for page, url in pages:
            assert [said for said in page.complaints() if not said.startswith("network")] == []
            mine = (f"{url}/", f"blob:{url}/", "data:")  # the last are the browser's icons of fields
            assert [address for address in page.requested() if not address.startswith(mine)] == []


@pytest.fixture
def open_tab(chromium: Chromium) -> Iterator[PageMaker]:
    with opened_tabs(chromium) as make:
        yield make


@pytest.fixture
def open_page(gateway: FakeGateway, open_tab: PageMaker) -> PageMaker:
    return lambda **options: open_tab(gateway.url, **options)


def show_board(page: Page) -> None:
    """Signs in and waits for the first answers."""
    page.sign_in(KEY)
    page.until("document.querySelector('.pool path') && document.querySelector('.line')")


@pytest.fixture(scope="module")
def still_board(chromium: Chromium) -> Iterator[Page]:
    """A board that the tests of a module only look at, over a gateway that gives the same answers all the time."""
    gateway = FakeGateway()
    with ExitStack() as closing:
        gateway.start()
        closing.callback(gateway.stop)
        page = closing.enter_context(opened_tabs(chromium))(gateway.url)
        show_board(page)
        yield page


@pytest.fixture
def open_board(open_page: PageMaker) -> PageMaker:
    """Makes tabs that have signed in and show the first answers, or the view that is named."""

    def make(view: str | None = None, **options: int | bool) -> Page:
        page = open_page(**options)
        show_board(page)
        if view is not None:
            page.click(f"#views [href='#/{view}']")
        return page

    return make


@pytest.fixture
def board(open_board: PageMaker) -> Page:
    return open_board()


@pytest.fixture
def open_view(server: ServerProcess, open_tab: PageMaker) -> PageMaker:
    """Makes tabs that have signed in to a gateway that serves and show a view of it."""

    def make(view: str) -> Page:
        page = open_tab(server.admin_url, f"#/{view}")
        page.sign_in(server.admin_key)
        return page

    return make
