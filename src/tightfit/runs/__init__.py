"""A run: its folder, the processes that are started for it, and what they report while they work.

The desk and the worker meet in files only. What goes in is `plan/worker.json`; what comes out are lines in
`events.jsonl`, a log for each rank, and, where a rank leaves in distress, `errors/rank-N.json`.
"""
