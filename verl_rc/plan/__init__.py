"""Before a run: what it will do, whether it fits this machine, and whether the parts work."""
