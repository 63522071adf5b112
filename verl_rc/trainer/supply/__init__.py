"""Supplying steps with samples."""
