"""Who is let in, and what every answer carries."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import HTTPError, Request, urlopen

import pytest

import patience

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, TOKEN, client, enter, home_of, need_a_browser, opened, served, stranger, window, within

from tightfit.web.guard import Site

HOME = "http://127.0.0.1:8741"
PATHS = ("/", "/runs", "/runs/stream?run=0/", "/diagnose", "/plan", "/static/app.css", "/static/run.js", "/nowhere")


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_there_is_nothing(path: str, tmp_path: Path) -> None:
    answer = stranger(tmp_path).get(path)
    assert answer.status_code == 403
    assert "tightfit ui" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ü" * 20])
def test_a_wrong_token_opens_nothing(token: str, tmp_path: Path) -> None:
    visitor = stranger(tmp_path)
    answer = visitor.get("/runs", params={"token": token}, headers=HTML)
    assert answer.status_code == 403
    assert "location" not in answer.headers
    for user in ("tightfit", TOKEN):
        assert visitor.get("/runs", auth=(user, token)).status_code == 403
    assert visitor.get("/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 403


def test_the_link_leaves_the_address_at_once_and_can_be_used_again(tmp_path: Path) -> None:
    visitor = stranger(tmp_path)
    for _ in range(3):
        answer = visitor.get("/runs/view", params={"run": "0/a b", "token": TOKEN})
        assert answer.status_code == 303
        way_in = answer.headers["location"]
        assert TOKEN not in way_in
        entered = visitor.get(way_in)
        assert 'data-place="/runs/view?run=0%2Fa+b"' in entered.text
        assert f'href="//tightfit:{TOKEN}@127.0.0.1:8741/enter?to=%2Fruns%2Fview' in entered.text
        assert visitor.get(way_in).status_code == 403  # the code was good once
        assert not {"set-cookie"} & {*answer.headers, *entered.headers}


def test_a_browser_is_asked_for_the_token_at_one_address_alone(tmp_path: Path) -> None:
    """Anywhere else a page that is still open would have it asked again and again."""
    asked = stranger(tmp_path).get("/enter")
    assert asked.status_code == 401
    assert asked.headers["www-authenticate"].startswith('Basic realm="tightfit"')
    assert "www-authenticate" not in stranger(tmp_path).get("/runs").headers
    assert client(tmp_path).get("/enter", headers={"Sec-Fetch-Mode": "cors"}).status_code == 204
    assert client(tmp_path).get("/enter?to=/runs%3Flang=zh").headers["location"] == HOME + "/runs?lang=zh"
    assert client(tmp_path).get("/runs").status_code == 200


def test_the_first_page_keeps_the_language_that_was_asked_for(tmp_path: Path) -> None:
    assert client(tmp_path).get("/?lang=zh", follow_redirects=False).headers["location"].endswith("?lang=zh")


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "///evil.example"])
def test_the_way_in_leads_nowhere_else(path: str, tmp_path: Path) -> None:
    visitor = stranger(tmp_path)
    way_in = visitor.get(f"http://127.0.0.1:8741{path}", params={"token": TOKEN}).headers["location"]
    place = visitor.get(way_in).text.partition('data-place="')[2].partition('"')[0]
    to = client(tmp_path).get("/enter", params={"to": path}).headers["location"]
    for led_to in (place, to.removeprefix(HOME)):
        assert led_to[0] == "/"
        assert led_to[1:2] not in ("/", "\\")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8741", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.7", "", "["],
)
def test_a_foreign_host_is_refused(host: str, tmp_path: Path) -> None:
    """DNS rebinding: a foreign name that points at this machine."""
    assert client(tmp_path).get("/runs", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8741", "localhost:8741", "LOCALHOST:9000", "[::1]:8741", "127.0.0.1"])
def test_the_names_of_this_machine_are_ours(host: str, tmp_path: Path) -> None:
    assert client(tmp_path).get("/runs", headers={"Host": host}).status_code == 200


def test_with_another_host_its_addresses_are_ours_and_names_are_not(tmp_path: Path) -> None:
    visitor = stranger(tmp_path, host="0.0.0.0")  # noqa: S104
    visitor.auth = ("tightfit", TOKEN)
    assert visitor.get("/runs", headers={"Host": "10.0.0.7:8741"}).status_code == 200
    assert visitor.get("/runs", headers={"Host": "evil.example:8741"}).status_code == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8741", "http://127.0.0.1:8742"])
def test_another_page_may_not_ask(origin: str, tmp_path: Path) -> None:
    visitor = client(tmp_path)
    assert visitor.post("/diagnose/answer", content=b"x", headers={"Origin": origin}).status_code == 403
    assert visitor.get("/runs", headers={"Origin": origin}).status_code == 403
    own = {"Origin": "http://127.0.0.1:8741"}
    assert visitor.post("/diagnose/answer", content=b"step 1 loss 3.2", headers=own).status_code == 200


FRAME = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
SCRIPT = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}
LINK = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_page_may_only_link_here(site: str, tmp_path: Path) -> None:
    """A page on another port is of the same site, and browsers send the credentials along with what it asks for."""
    visitor = client(tmp_path)
    assert visitor.get("/runs", headers={**LINK, "Sec-Fetch-Site": site}).status_code == 200
    assert visitor.post("/diagnose/answer", content=b"x", headers={**LINK, "Sec-Fetch-Site": site}).status_code == 403
    for asked in (FRAME, SCRIPT):
        assert visitor.get("/runs", headers={**asked, "Sec-Fetch-Site": site}).status_code == 403
        assert visitor.get("/runs", headers={**asked, "Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(method: str, tmp_path: Path) -> None:
    assert client(tmp_path).request(method, "/runs").status_code == 405


def test_a_post_where_none_belongs(tmp_path: Path) -> None:
    assert client(tmp_path).post("/runs", content=b"x").status_code == 405
    assert stranger(tmp_path).post(f"/diagnose?token={TOKEN}", content=b"x").status_code == 403


@pytest.mark.thorough
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_carries_the_policy(path: str, tmp_path: Path) -> None:
    for visitor in (stranger(tmp_path), client(tmp_path)):
        if "stream" in path:
            path = "/runs/stream?run=9/"
        headers = visitor.get(path, headers=HTML).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] in ("no-store", "no-cache")


def test_pages_hold_no_script_or_style_of_their_own(tmp_path: Path) -> None:
    for path in ("/runs", "/diagnose", "/plan", "/nowhere"):
        text = client(tmp_path).get(path, headers=HTML).text
        assert " style=" not in text
        assert "<style" not in text
        assert " onclick=" not in text
        assert all('type="application/json"' in tag or " src=" in tag for tag in text.split("<script")[1:])


@pytest.mark.parametrize(
    "path",
    ["/static/", "/static", "/static/vendor/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"],
)
def test_folders_are_not_listed_and_not_left(path: str, tmp_path: Path) -> None:
    answer = client(tmp_path).get(path)
    assert answer.status_code in (404, 307)
    assert "import" not in answer.text


# --- in a real browser, beside a server that is not ours ------------------------------------------


@contextmanager
def hostile(target: str) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Somebody else's server on another port of this machine, and what browsers have sent it."""
    received: list[dict[str, str]] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            received.append(dict(self.headers.items()))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(
                f"<iframe src='{target}/runs'></iframe>"
                f"<form method=post action='{target}/plan/config'><button>Send</button></form>"
                f"<a href='{target}/runs'>Runs</a>".encode()
            )

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def status_of(place: str, headers: dict[str, str]) -> int:
    with_host = {name: value for name, value in headers.items() if name.lower() not in ("host", "connection")}
    try:
        with urlopen(Request(place, headers=with_host), timeout=60) as answer:  # noqa: S310
            return int(answer.status)
    except HTTPError as error:
        return error.code


@pytest.mark.thorough
def test_a_server_on_another_port_gets_nothing_that_opens_the_page(tmp_path: Path) -> None:
    need_a_browser()
    with served(cwd=tmp_path) as link, window() as made, hostile(home_of(link)) as (elsewhere, received):
        page = made.new_page()
        sent: list[tuple[str, int]] = []
        page.on("response", lambda answer: sent.append((answer.url, answer.status)))
        enter(page, within(link, "/runs?lang=zh"))
        assert page.text_content("h1") == "运行"
        assert "token" not in page.url
        page.goto(elsewhere)
        # It got what the browser has for this machine: the language. Sent to us by itself, that opens nothing.
        assert received[0]["Cookie"] == "tightfit_language=zh"
        for headers in received:
            assert "Authorization" not in headers
            assert status_of(home_of(link) + "/runs", headers) == 403
        # What its page asks us for comes with the credentials, and is refused.
        asked = {urlsplit(place).path: status for place, status in sent if place.startswith(home_of(link))}
        assert asked["/runs"] == 403
        page.click("button")
        assert "请求来自其他页面" in page.text_content("main")
        page.goto(elsewhere)
        page.click("a")  # whoever follows a link sees the page
        assert page.text_content("h1") == "运行"


@pytest.mark.thorough
def test_without_scripts_the_pages_are_there_too(tmp_path: Path) -> None:
    with served(cwd=tmp_path) as link, window(java_script_enabled=False) as made:
        page = made.new_page()
        page.goto(within(link, "/runs"))
        page.click("a")
        page.wait_for_url("**/runs")
        page.get_by_role("link", name="Plan").click()
        assert page.locator(".verdict").text_content()


@pytest.mark.thorough
def test_the_browser_is_opened_without_the_token_in_its_arguments(tmp_path: Path) -> None:
    """`ps` shows everybody on the machine what a program was started with."""
    told = tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv, open({str(told)!r} + '.new', 'w'))\n"
                       f"import os; os.rename({str(told)!r} + '.new', {str(told)!r})\n")  # fmt: skip
    browser.chmod(0o755)
    with served(cwd=tmp_path, env={"BROWSER": f"{browser} %s"}) as link:
        end = patience.now() + 60
        while not told.exists() and patience.now() < end:
            time.sleep(0.05)
        _, way_in = json.loads(told.read_text())
        assert urlsplit(link).query.removeprefix("token=") not in way_in
        # Somebody else on this machine has seen it, and is quicker.
        if os.getuid() == 0:
            thief = (
                "import os, sys, urllib.request, encodings.idna\nos.setuid(65534)\n"
                "try: print(urllib.request.urlopen(sys.argv[1]).status)\n"
                "except urllib.request.HTTPError as error: print(error.code)\n"
            )
            done = subprocess.run([sys.executable, "-c", thief, way_in], capture_output=True, text=True, check=True)
            assert done.stdout == "403\n"
        with opened(way_in) as page:
            assert urlsplit(page.url).path == "/plan"
        assert status_of(way_in, {}) == 403  # and it was good once
        with opened(link) as page:
            assert urlsplit(page.url).path == "/plan"


def test_what_listens_everywhere_says_where_others_find_it() -> None:
    for host, local in (("0.0.0.0", "127.0.0.1"), ("::", "[::1]")):  # noqa: S104
        everywhere = Site(token=TOKEN, host=host, port=8741, roots=())
        elsewhere, here = everywhere.links
        assert here == f"http://{local}:8741/?token={TOKEN}"
        assert everywhere.home == f"http://{local}:8741"
        name = urlsplit(elsewhere).hostname
        assert name
        assert name not in ("127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104
    for host, place in (("127.0.0.1", "127.0.0.1"), ("fe80::1", "[fe80::1]"), ("here.example", "here.example")):
        assert Site(token=TOKEN, host=host, port=1, roots=()).links == (f"http://{place}:1/?token={TOKEN}",)
