"""The catalogue of symptoms, as data: see `catalogue.py`, and docs/diagnose.md for what each key means."""
