"""Names under which both sides keep what an operation computed: those of vLLM's modules."""

EMBEDDING, ATTENTION, ROTARY = "embed_tokens", "self_attn.attn", "self_attn.rotary_emb"
QKV, GATE_UP, ACTIVATION = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.act_fn"
OUTPUT, DOWN = "self_attn.o_proj", "mlp.down_proj"
HEAD, LOG_PROBS = "logits", "log_probs"
RESIDUAL = ".residual"
"""After the name of a norm: the sum that it normalises."""
KEPT_MODULES = ("norm", ATTENTION, QKV, GATE_UP, OUTPUT, DOWN)
"""Ends of the names of modules whose outputs are kept."""
FIRST_LAYER = "layers.0"
"""End of the name of the module whose input is what ``EMBEDDING`` keeps: with the factor of Gemma."""
