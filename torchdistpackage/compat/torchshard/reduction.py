"""torchshard.nn._reduction, a copy of torch's own file: these are torch's functions."""

from torch.nn._reduction import get_enum, legacy_get_enum, legacy_get_string

__all__ = ["get_enum", "legacy_get_enum", "legacy_get_string"]
