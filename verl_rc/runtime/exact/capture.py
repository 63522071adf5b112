"""Names under which both sides capture the result of an operation: those of vLLM's modules."""

EMBEDDING, ATTENTION, ROTARY = "embed_tokens", "self_attn.attn", "self_attn.rotary_emb"
QKV, GATE_UP, ACTIVATION = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.act_fn"
OUTPUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
HEAD, LOG_PROBS = "logits", "log_probs"
RESIDUAL = ".residual"
"""Suffix of a norm's name for the sum that it normalises."""
CAPTURED_MODULES = ("norm", ATTENTION, QKV, GATE_UP, OUTPUT, DOWN)
"""Suffixes of the names of modules whose outputs are captured."""
FIRST_LAYER = "layers.0"
"""Suffix of the name of the module whose input is captured as ``EMBEDDING``: it has Gemma's factor."""
