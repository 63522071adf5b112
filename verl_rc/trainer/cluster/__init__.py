"""Ray: start-up, placement, remote calls, splitting work by rank and merging the results."""

from verl_rc.trainer.cluster.ray_session import prepare_driver

prepare_driver()
