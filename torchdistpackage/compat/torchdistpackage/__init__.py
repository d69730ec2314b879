"""Functions and classes of the earlier TorchDistPackage that only its users need."""
