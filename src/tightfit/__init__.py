"""tightfit makes large-model training fit the GPUs you have, and stay fitted."""

__version__ = "0.1.0"

__all__ = ["__version__"]
