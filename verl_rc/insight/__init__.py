"""Reading a run from its files, during it or after it: what happened and why."""
