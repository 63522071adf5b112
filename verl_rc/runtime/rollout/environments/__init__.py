"""Environments that are part of this package."""
