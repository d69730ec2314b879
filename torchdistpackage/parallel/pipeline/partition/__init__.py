"""Where a model is cut into stages, and the stages that come of it."""
