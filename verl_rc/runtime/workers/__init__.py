"""Trainer workers: policy, reference and critic, and the forward and backward loop they share."""
