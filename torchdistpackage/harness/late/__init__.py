"""The late transport: NCCL's asynchrony on CPUs, for tests (docs/late_transport.md)."""
