"""Compatibility with verl and with older names: accepted, translated and refused keys, recipe scripts."""
