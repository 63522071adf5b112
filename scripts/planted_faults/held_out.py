"""Faults planted by somebody who had not read the doctor's rules, and what they held to be right before any
run.

The three texts of each stay as they were first committed. On 2026-11-23 rules were mended because of this
set. It is spent: it no longer tells how well unforeseen faults are named. ``held_out_second.py`` was written
after that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planted_faults.faults import ROLLOUT, Fault

_BF16 = (f"{ROLLOUT}.dtype=bfloat16",)


@dataclass(frozen=True)
class HeldOut:
    """One fault, in the words of somebody who knows the trainer and not the doctor."""

    broken: str
    """What is done wrong, and how a user comes to it."""
    cause: str
    """What a maintainer would call it."""
    remedy: str
    """What mends it."""
    planted: str = ""
    """What the workers do wrong, see ``held_out_workers.py``; empty: the configuration alone makes the fault.
    """
    overrides: tuple[str, ...] = _BF16


HELD_OUT: Mapping[str, HeldOut] = {
    "rope base of the engine": HeldOut(
        broken="The engine computes rotary positions with base 1e6 where the checkpoint says 10000: "
        "hf_overrides were copied from the recipe of another model.",
        cause="engine and trainer compute different models: same weights, another forward pass, on every "
        "token from the first on",
        remedy="take the override away; both sides must read one config.json",
        overrides=(
            *_BF16,
            f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides={{rope_parameters:{{rope_theta:1000000.0,rope_type:default}}}}",
        ),
    ),
    "key heads exchanged": HeldOut(
        broken="Every update loads the key heads of layer 1 into the engine in the wrong order: the "
        "conversion of names and shards is that of another parallel layout.",
        cause="the engine does not hold the trainer's weights: one tensor is loaded wrongly by every weight "
        "update",
        remedy="mend the conversion of that tensor; until then compare loaded weights with sent ones by name",
        planted="exchanged_key_heads",
    ),
    "presence penalty": HeldOut(
        broken="The engine samples with presence_penalty=0.5, a default of the chat server that came with "
        "the model; the trainer knows of no penalty.",
        cause="a sampling parameter of the engine that the trainer's log-probs do not mirror; it depends on "
        "the tokens so far",
        remedy="sample without penalties",
        planted="presence_penalty:0.5",
    ),
    "packed rows see each other": HeldOut(
        broken="The trainer packs rows two by two without a border: the second attends to the first, and its "
        "positions go on where those of the first end.",
        cause="the trainer's forward pass is wrong: scores of a row depend on the row that is packed before "
        "it",
        remedy="separate packed rows in attention and positions, or train with use_remove_padding=False",
        planted="packed_without_borders",
    ),
    "second start token": HeldOut(
        broken="The engine puts a start token before each prompt that has one already (template and "
        "tokenizer both add it); the trainer scores the prompt without.",
        cause="engine and trainer see different prompts",
        remedy="tokenize once, and give both sides the same ids",
        planted="second_start_token",
    ),
    "stop token at 0": HeldOut(
        broken="The engine ends a response at a stop token that it does not return; it is added behind, with "
        "log-prob 0.",
        cause="the recorded rollout log-prob of each response's last token is made up",
        remedy="record the engine's log-prob of the stop token, or leave this token out of ratio and loss",
        planted="stop_token_at_0",
    ),
    "rows of a micro-batch exchanged": HeldOut(
        broken="Of the recomputed log-probs the last quarter of each batch comes back one row too late: rows "
        "sorted by length for micro-batches are not put back into their order.",
        cause="old log-probs of the trainer stand in the wrong rows; engine and current policy are sound",
        remedy="undo the sorting in the recomputation of old log-probs",
        planted="exchanged_rows",
    ),
    "logits in bf16": HeldOut(
        broken="The trainer rounds logits to bfloat16 before the softmax (an autocast around the head), "
        "while the engine computes in float32.",
        cause="rounding in the trainer: its head is less precise than the engine",
        remedy="compute logits and softmax of the trainer in float32",
        planted="bf16_logits",
        overrides=(f"{ROLLOUT}.dtype=float32",),
    ),
}
"""All but the last run beside an engine in bfloat16, as the arms of ``faults.py`` do."""

_TRAINER = "the trainer scores other inputs or with noise"
_ENGINE = "the engine had other prompts, sampling, cache or weights"
_OTHER_TOKENS = "not the sampled tokens, or not their log-probs"
RIGHT: Mapping[str, tuple[str, ...]] = {
    "rope base of the engine": (_ENGINE, "the engine's code computes otherwise than the trainer's"),
    "key heads exchanged": (_ENGINE,),
    # What the report says to a temperature names a repetition penalty as the next thing to look for.
    "presence penalty": (_ENGINE, "temperature", "sampled from another distribution than reported"),
    "packed rows see each other": (_TRAINER,),
    "second start token": (_OTHER_TOKENS, _TRAINER, _ENGINE, "the engine was given other inputs"),
    "stop token at 0": (_OTHER_TOKENS,),
    "rows of a micro-batch exchanged": (_TRAINER, _OTHER_TOKENS),
    "logits in bf16": (_TRAINER,),
}
"""Causes of the doctor that lead to the remedy: written after its rules were read, before any of these runs
was judged; the causes with prompts, sampling and code in their names came later."""


def as_faults(
    table: Mapping[str, HeldOut], right: Mapping[str, tuple[str, ...]], first: int
) -> Mapping[str, Fault]:
    """Held-out faults in the terms of ``faults.py``, counted from ``first`` on: these numbers are in no
    plan."""
    return {
        arm: Fault(number, right[arm], held_out.overrides, held_out.planted)
        for number, (arm, held_out) in enumerate(table.items(), first)
    }
