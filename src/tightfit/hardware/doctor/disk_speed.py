"""A process of its own that writes to a folder for a moment and says how fast that went: run by path.

The file has no name from its first byte on where the system can do that, and loses it at once elsewhere: nothing is
left behind, even if the process is killed. A folder that is not there yet is looked for upwards, here and not by who
asks, for a network disk whose server is gone holds every question about it. One JSON object comes out: folder, bytes,
seconds, free, total; or a problem.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

CHUNK_BYTES = 4 * 2**20
MOST_BYTES = 256 * 2**20
MOST_S = 0.6
SPARE_BYTES = 512 * 2**20
"""A disk that is nearly full is not written to."""


def main(folder: str) -> int:
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    try:
        told = os.statvfs(folder)
        free = told.f_bavail * told.f_frsize
        tree: dict[str, object] = {"folder": folder, "free": free, "total": told.f_blocks * told.f_frsize}
        if free > SPARE_BYTES + MOST_BYTES:
            tree |= _measure_writing(folder)
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        tree = {"folder": folder, "problem": error.strerror or str(error)}
    sys.stdout.write(json.dumps(tree))
    return 0


def _measure_writing(folder: str) -> dict[str, object]:
    data = os.urandom(CHUNK_BYTES)  # a file system that packs or dedupes must not look faster than it is
    done, begun = 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while done < MOST_BYTES and time.monotonic() - begun < MOST_S:
            done += file.write(data)
            os.fsync(file.fileno())
        return {"bytes": done, "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
