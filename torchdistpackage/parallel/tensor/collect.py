"""`collect`, beside the layers whose parameters it speaks of; see layout/mark.py."""

from torchdistpackage.layout.mark import collect

__all__ = ["collect"]
