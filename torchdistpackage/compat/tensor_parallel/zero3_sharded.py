"""The class behind `apply_sharding`, by its earlier name."""

from torchdistpackage.parallel.auto.zero3 import ShardingManager

Sharded = ShardingManager
