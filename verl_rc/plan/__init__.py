"""The plan of a run before it starts: what it will do, whether it fits this machine, whether its parts
work."""
