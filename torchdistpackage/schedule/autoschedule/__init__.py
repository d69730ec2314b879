"""Schedules made by search for given costs: list scheduling, rules, local search."""
