"""The class behind `apply_sharding`, by its earlier name."""

from torchdistpackage.compat.tensor_parallel.zero3 import ShardingManager

Sharded = ShardingManager
