"""Mamba that trains without a CUDA build. This room knows torch, and nothing of the rest of the house."""

from tightfit.mamba.scan import selective_scan

__all__ = ["selective_scan"]
