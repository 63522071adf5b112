"""What one process does."""
