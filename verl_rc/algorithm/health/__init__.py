"""What is judged in every step: the causes of a gap, healthy ranges, and what stops a run. Pure."""
