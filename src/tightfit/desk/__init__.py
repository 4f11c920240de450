"""What is asked of a plan or an estimate, and the answer, whoever asks: see `request.py`."""
