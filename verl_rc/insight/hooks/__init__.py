"""Token records from inside another trainer: one module a trainer, which docs/your_trainer.md shows.

A module that holds no code says which option of its trainer writes what the readers need.
"""
