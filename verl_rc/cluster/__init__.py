"""Ray: starting it, placing processes, calling them, splitting work by rank and merging what comes back."""

from verl_rc.cluster.environment import prepare_driver

prepare_driver()
