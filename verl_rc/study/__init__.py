"""Studies: runs of the trainer that differ in one thing at a time, each with several seeds, each kept."""
