FUSED_CHUNK_ELEMENTS = 2**26


def fused_chunk_tokens(vocab: int) -> int:
    return max(1, FUSED_CHUNK_ELEMENTS // vocab)
