"""The page: `tightfit ui` shows plans, runs and diagnoses in the browser of this machine."""
