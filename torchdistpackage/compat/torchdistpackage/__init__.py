"""Functions and classes of the earlier TorchDistPackage that have no use beside it."""
