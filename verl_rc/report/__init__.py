"""Reports for people: a configuration in words, preflight checks, training curves, generated documents."""
