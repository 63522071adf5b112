"""``verl-rc doctor --gpu``: what no CPU can show, measured on a node in about ten minutes, one stage after
the other."""
