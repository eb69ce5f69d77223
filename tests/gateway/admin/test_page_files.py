from pathlib import Path

from gateway.admin.page_files import DIRECTORY, page_files


def test_files_are_served_by_their_names_with_their_types(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "index.html").write_text("<p>")
    (tmp_path / "parts" / "one.js").write_text("1")
    files = page_files(tmp_path)
    assert set(files) == {"/", "/index.html", "/parts/one.js"}
    assert files["/"] is files["/index.html"]
    assert files["/parts/one.js"].content_type == "text/javascript; charset=utf-8"


def test_files_of_other_kinds_are_not_served(tmp_path: Path) -> None:
    for name in ("__init__.py", ".secret", "notes.txt", "style.css.orig"):
        (tmp_path / name).write_text("x")
    assert page_files(tmp_path) == {}


def test_the_package_has_a_page() -> None:
    assert "/" in page_files(DIRECTORY)


def test_where_there_is_no_page_there_is_none_to_serve(tmp_path: Path) -> None:
    assert page_files(tmp_path / "missing") == {}
