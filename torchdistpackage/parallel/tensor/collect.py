"""`collect`, beside the layers whose parameters it speaks of; see layout/collect.py."""

from torchdistpackage.layout.collect import collect

__all__ = ["collect"]
