"""Reports for people: a configuration in words, preflight checks, training curves, the report page, generated
documents."""
