"""torchshard.nn._reduction: torch's own functions, of which torchshard has a copy."""

from torch.nn._reduction import get_enum, legacy_get_enum, legacy_get_string

__all__ = ["get_enum", "legacy_get_enum", "legacy_get_string"]
