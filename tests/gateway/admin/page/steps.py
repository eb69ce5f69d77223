"""What people do on the page."""

from collections.abc import Callable

from tests.gateway.admin.page.browser import Page

PageMaker = Callable[..., Page]


def sign_in(page: Page, key: str) -> None:
    page.click("#admin-key")
    page.type(key)
    page.press("Enter")


def tab_to(page: Page, selector: str, most: int = 60) -> None:
    """By the Tab key alone, from wherever the focus is."""
    for _ in range(most):
        page.press("Tab")
        if page.call("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{most} presses of Tab do not reach {selector}")


def until_nothing_is_cut_off(page: Page) -> None:
    """Wait until neither the page nor a table scrolls sideways, which it does for a frame after a change of width."""
    page.until("document.documentElement.scrollWidth <= innerWidth")
    page.until("[...document.querySelectorAll('.scroller')].every(box => box.scrollWidth <= box.clientWidth)")


def first_column(page: Page, table: str) -> list[str]:
    return [text.strip() for text in page.texts(f"{table} tbody tr > :first-child")]


def column(page: Page, table: str, number: int) -> list[str]:
    """Cells of the column, counted from 1."""
    return [text.strip() for text in page.texts(f"{table} tbody tr > :nth-child({number})")]
