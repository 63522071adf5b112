"""Distributed PPO for language models whose centre is rollout correction; docs/ and README.md say where to
start."""

__version__ = "0.2.0.dev0"
