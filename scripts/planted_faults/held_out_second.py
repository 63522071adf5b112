"""A second set of faults planted by somebody who had not read the doctor's rules, as ``held_out.py`` has the
first.

No rule or threshold may be changed because of them: a fault that a rule was mended for says no longer how
well others are named.
"""

from collections.abc import Mapping

from planted_faults.faults import ACTOR, ROLLOUT
from planted_faults.held_out import HeldOut

_BF16 = (f"{ROLLOUT}.dtype=bfloat16",)

HELD_OUT_2: Mapping[str, HeldOut] = {
    "min-p 0.05": HeldOut(
        broken="The engine samples with min_p=0.05, a default of the serving recipe: tokens with less than a "
        "twentieth of the largest probability are never drawn, and the reported log-probs are those of what "
        "is left. The trainer knows of no filter.",
        cause="a filter of the engine's sampler that the trainer's log-probs do not mirror: rare tokens are "
        "missing",
        remedy="sample without min_p",
        planted="min_p:0.05",
    ),
    "repetition penalty 1.1": HeldOut(
        broken="The engine samples with repetition_penalty=1.1, from the model's generation_config.json: "
        "tokens of the prompt and of the response so far have their logits divided by it, or multiplied "
        "below 0. The trainer knows of no penalty.",
        cause="a sampling parameter of the engine that the trainer's log-probs do not mirror; it depends on "
        "the tokens so far",
        remedy="sample with repetition_penalty=1",
        planted="repetition_penalty:1.1",
    ),
    "LoRA adapters not delivered": HeldOut(
        broken="The run trains LoRA adapters, but each weight update sends the base weights alone: the merge "
        "leaves the adapters out. The engine loads and acknowledges every tensor.",
        cause="the engine samples from the base model for the whole run: what is trained never reaches it",
        remedy="merge the adapters into what is sent, or load them into the engine",
        planted="adapters_not_sent",
        # Ten times the task's learning rate, as is usual for adapters.
        overrides=(*_BF16, "actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.optim.lr=5e-4"),
    ),
    "system prompt in the engine alone": HeldOut(
        broken="The engine's server puts a system prompt before each prompt (five tokens), by a default of "
        "its chat template; the trainer scores the prompt without.",
        cause="engine and trainer see different prompts",
        remedy="apply the chat template once, and give both sides the same ids",
        planted="system_prompt",
    ),
    "int8 weights": HeldOut(
        broken="The engine rounds the weights of its linear layers to int8, one scale for each output "
        "channel, whenever they are loaded: a quantised build is served, while the configuration says "
        "bfloat16.",
        cause="the engine computes with rounded weights: its precision is lower than the configuration says",
        remedy="serve unquantised weights, or say in the configuration what the engine has and correct for "
        "it",
        planted="int8_weights",
    ),
    "norm epsilon of the engine": HeldOut(
        broken="The engine's norms add 1e-4 where the checkpoint says 1e-6: its model code does not read the "
        "key that this checkpoint has it under, and takes a default (hf_overrides stand in for that code).",
        cause="engine and trainer compute different models: same weights, slightly another forward pass on "
        "every token",
        remedy="make both sides read the epsilon of one config.json",
        overrides=(*_BF16, f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides={{rms_norm_eps:0.0001}}"),
    ),
    "temperature 0.9 and every second update skipped": HeldOut(
        broken="Two faults at once: the engine samples at 0.9 times the configured temperature, and every "
        "second weight update is acknowledged but not loaded.",
        cause="another temperature in the engine, and weights that are one version old in every second step; "
        "either alone explains only a part",
        remedy="sample at the trainer's temperature, and load every update: both are needed",
        planted="temperature:0.9,skip_every_second_sync",
    ),
    "one of two engines stale": HeldOut(
        broken="Of two engines behind one router the second keeps the weights of the run's start, as a "
        "replica that was restarted or was left out of the update's group; it acknowledges every update.",
        cause="one replica samples from old weights: half of the rows are off, and ever more so, while the "
        "others are sound",
        remedy="load the current weights into that replica, and compare the replicas with each other",
        planted="stale_second_engine",
        overrides=(*_BF16, "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=2"),
    ),
}
"""All beside an engine in bfloat16, as the arms of ``faults.py``."""

_ENGINE = "the engine had other prompts, sampling, cache or weights"
_OLD = ("older weights", "weights never arrive")
RIGHT_2: Mapping[str, tuple[str, ...]] = {
    "min-p 0.05": ("sampling filter not mirrored",),
    # What the report says to a temperature names a repetition penalty as the next thing to look for.
    "repetition penalty 1.1": (_ENGINE, "temperature", "sampled from another distribution than reported"),
    "LoRA adapters not delivered": _OLD,
    "system prompt in the engine alone": (
        *("the engine was given other inputs", _ENGINE),
        "not the sampled tokens, or not their log-probs",  # it tells to compare ids and templates
    ),
    "int8 weights": (_ENGINE,),
    "norm epsilon of the engine": ("the engine's code computes otherwise than the trainer's",),
    # One of the two is named first.
    "temperature 0.9 and every second update skipped": ("temperature", "an update was missed", *_OLD),
    "one of two engines stale": (_ENGINE, *_OLD),
}
"""Causes that lead to the remedy above, by arm: written by who wrote the rules, before any run was judged."""
