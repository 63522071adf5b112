"""The border to verl and to older names: accepted, translated and refused keys, recipe scripts. Nothing else knows the past."""
