"""The data of a training: from files to batches.

    spec ─► prepare (one process) ─► cache on disk ─► open_samples (every rank) ─► Order ─► batch

Readers (`examples`), what makes text of them (`chat`, `recipes`), what makes tokens of that (`tokens`, `cache`), and
what a loop sees (`samples`, `order`).
"""
