"""The page of the scan's benchmark is what its rows say."""

from __future__ import annotations

import json

import scan_speed


def test_the_page_is_what_the_rows_say() -> None:
    rows, on_gpu = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in (scan_speed.ROWS, scan_speed.GPU_ROWS)
    )
    official = json.loads(scan_speed.OFFICIAL.read_text(encoding="utf-8"))
    assert scan_speed.PAGE.read_text(encoding="utf-8") == scan_speed.page(rows, on_gpu, official), (
        "run: python benchmarks/scan_speed.py page"
    )


def test_ours_is_faster_than_the_official_kernels_and_keeps_less() -> None:
    official = json.loads(scan_speed.OFFICIAL.read_text(encoding="utf-8"))
    for line in scan_speed.GPU_ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["what"] == "lengths":
            continue
        theirs = scan_speed.official_of(row["shape"], official, {"scan": "selective", "mixer": "mamba"}[row["what"]])
        assert row["forward_ms"] + row["backward_ms"] < theirs["fwd_ms"] + theirs["bwd_ms"]
        assert row["kept_gib"] < 0.76 * theirs["saved_GiB"]


def test_ours_is_ten_times_faster_than_transformers_and_keeps_a_fifth_of_either() -> None:
    for line in scan_speed.ROWS.read_text(encoding="utf-8").splitlines():
        sides = json.loads(line)["sides"]
        both = {name: side["forward_s"] + side["backward_s"] for name, side in sides.items()}
        assert both["transformers"] > 10 * both["ours"]
        assert both["mambapy"] > both["ours"]
        assert min(sides[name]["kept_bytes"] for name in ("transformers", "mambapy")) > 5 * sides["ours"]["kept_bytes"]
