import re

from fleet.admin.page_files import fleet_page

NAMED = re.compile(r'(?:from|href=|src=) ?"(?:\./)?([\w/]+\.(?:js|css|svg|html))"')


def test_every_file_that_the_page_names_is_served_and_no_other() -> None:
    files = fleet_page()
    texts = [blob.content.decode() for blob in files.values()]
    named = {f"/{name}" for text in texts for name in NAMED.findall(text)}
    assert {*files} - named == {"/", "/index.html"}
    assert named <= {*files}


def test_the_page_is_the_fleets_own() -> None:
    files = fleet_page()
    assert b'id="replicas"' in files["/"].content
    assert b"replicasTable" in files["/main.js"].content
