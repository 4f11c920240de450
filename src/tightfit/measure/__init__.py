"""What this machine reaches, found by trying: one process for each GPU, spawned by `start/measure.py`."""
