"""`tightfit run -- COMMAND…`: a trainer that is not ours, read from outside, watched, and started again.

Its command line, script and configs are read (`command.py`, `script.py`, `config.py`), its processes watched
(`process.py`), and it is started again from its checkpoints, with a smaller config where memory was missing
(`trainer.py`, `config.py`).
"""
