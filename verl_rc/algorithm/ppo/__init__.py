"""The composition of PPO, still pure: evaluated rollouts to a train batch, current log-probs and batch to a
loss."""
