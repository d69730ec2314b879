"""The stock schedules: a compute order each, by name in the registry."""
