"""Versions as vendors, nightly builds and checkouts write them: each is the release that it was made from."""

from __future__ import annotations

import pytest

import tightfit
from tightfit.inputs.versions import release
from tightfit.types import ConfigError


@pytest.mark.parametrize("written", ["0.19.0+git1", "0.19.0+unknown", "0.19.0.dev20260101", "0.19.0rc1", "0.19"])
def test_estimate_takes_a_build_for_the_release_that_it_is_of(written: str) -> None:
    build, newer, older = (
        tightfit.estimate(model="qwen2.5-7b", engine="zero2", world=8, deepspeed_version=version).footprint
        for version in (written, "0.19.0", "0.18.9")
    )
    assert (build.gpu, build.host) == (newer.gpu, newer.host)
    assert build.gpu.init_peak_bytes > older.gpu.init_peak_bytes


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("0.14.2+das.opt1.dtk25041", (0, 14, 2)),
        ("5.10", (5, 10, 0)),
        ("5.3.0.dev0", (5, 3, 0)),
        ("2.1.0a0+git32f93b1", (2, 1, 0)),
        ("6.2.41133-dd7f95766", (6, 2, 41133)),
    ],
)
def test_release(written: str, read: tuple[int, int, int]) -> None:
    assert release(written) == read


def test_a_word_is_no_version() -> None:
    with pytest.raises(ConfigError, match="is not a version"):
        release("latest")
