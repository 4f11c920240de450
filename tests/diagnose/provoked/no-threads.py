# ruff: noqa
import resource
import threading
import time

resource.setrlimit(resource.RLIMIT_AS, (300 * 2**20, 300 * 2**20))
for _ in range(1000):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
