"""Who is let in, and what every answer carries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, TOKEN, client, stranger

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
    assert "set-cookie" not in answer.headers
    visitor.cookies.set("tightfit_8741", token.replace("ü", "u") or "x")
    assert visitor.get("/runs").status_code == 403


def test_the_link_sets_a_cookie_and_leaves_the_address(tmp_path: Path) -> None:
    visitor = stranger(tmp_path)
    answer = visitor.get("/runs/view", params={"run": "0/a b", "token": TOKEN})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/view?run=0%2Fa+b"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert visitor.get("/runs").status_code == 200


def test_the_first_page_keeps_the_language_that_was_asked_for(tmp_path: Path) -> None:
    assert client(tmp_path).get("/?lang=zh", follow_redirects=False).headers["location"].endswith("?lang=zh")


def test_from_a_link_in_another_page_the_cookie_is_kept_too(tmp_path: Path) -> None:
    """A browser does not send such a cookie along with a redirect that another site began."""
    answer = stranger(tmp_path).get("/runs", params={"token": TOKEN}, headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert 'content="0;url=/runs"' in answer.text
    assert TOKEN not in answer.text
    assert "HttpOnly" in answer.headers["set-cookie"]


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "///evil.example"])
def test_the_link_leads_nowhere_else(path: str, tmp_path: Path) -> None:
    answer = stranger(tmp_path).get(f"http://127.0.0.1:8741{path}", params={"token": TOKEN})
    place = answer.headers["location"]
    assert place[0] == "/"
    assert place[1:2] not in ("/", "\\")


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
    visitor.cookies.set("tightfit_8741", TOKEN)
    assert visitor.get("/runs", headers={"Host": "10.0.0.7:8741"}).status_code == 200
    assert visitor.get("/runs", headers={"Host": "evil.example:8741"}).status_code == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:8741", "http://127.0.0.1:8742"])
def test_another_page_may_not_ask(origin: str, tmp_path: Path) -> None:
    visitor = client(tmp_path)
    assert visitor.post("/diagnose/answer", content=b"x", headers={"Origin": origin}).status_code == 403
    assert visitor.get("/runs", headers={"Origin": origin}).status_code == 403
    own = {"Origin": "http://127.0.0.1:8741"}
    assert visitor.post("/diagnose/answer", content=b"all is well", headers=own).status_code == 200


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
        assert headers["referrer-policy"] == "no-referrer"
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
