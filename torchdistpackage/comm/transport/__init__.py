"""Collectives made of other calls, where a back end lacks them or is slow at them."""
