"""Evidence in, verdict out: what went wrong first, how sure that is, and what to do."""
