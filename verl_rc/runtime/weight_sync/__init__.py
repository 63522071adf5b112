"""Trainer to engine: what is sent, how it travels, and the proof that it arrived. Only the receiver imports
vllm."""
