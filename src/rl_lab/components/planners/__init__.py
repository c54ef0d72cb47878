"""Planners: decisions by looking ahead in a model."""
