"""`tightfit run -- COMMAND…`: a trainer that is not ours, read from outside, watched, and started again.

Its command line, script and configs are read (`command.py`, `script.py`, `config.py`), its processes watched
(`process.py`, `hang.py`), its checkpoints found (`resume.py`), and a smaller config is written where memory was missing
(`ladder.py`).
"""
