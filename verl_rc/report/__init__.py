"""What people read: a configuration in words, and whether a run can start."""
