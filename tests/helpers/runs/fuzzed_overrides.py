"""Random overrides of a run: values of the keys' own types, and mistakes of every kind."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from verl_rc.config.run import RunConfig

FOLDER = Path(__file__).parents[2] / "verl_recipes"
VERLS_KEYS = sorted(json.loads((FOLDER / "defaults" / "ppo_trainer.json").read_text()))
EARLIER_KEYS = [
    "actor_rollout_ref.actor.tis_imp_ratio_cap",
    "algorithm.rollout_is",
    "algorithm.rollout_is_level",
    "algorithm.rollout_is_veto_threshold",
    "actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is",
]
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "0.5",
    "1e-300",
    "1e300",
    "1e999",
    "nan",
    "-inf",
    str(10**30),
    "9" * 5000,
    "1_000",
]
WORDS = [
    "auto",
    "grpo",
    "gae",
    "gdpo",
    "vllm",
    "sglang",
    "fsdp2",
    "megatron",
    "token",
    "sequence",
    "trm",
    "kept",
    "exclude",
    "acc",
]
THRESHOLDS = [
    "0.5_5",
    "2.0",
    "0.999_1.001,0.1",
    "{lower: 5, upper: 0.5}",
    "[0.5,5]",
    "seq_mean_k1,token_k1",
    "5_0.5",
    "_",
    "0_0",
]
TEXTS = [
    "",
    "null",
    "True",
    "~/x",
    "~nobody/x",
    "module:function",
    ":",
    "a=b",
    "a,b",
    "é",
    "🦆",
    "x y",
    "\x00",
    "\ud800",
    "a" * 9000,
]
STRUCTURES = [
    "[]",
    "[1,2]",
    "[null]",
    "[[[]]]",
    "{}",
    "{a: 1}",
    "{a: {b: [1]}}",
    "[True]",
    "['a','b']",
    "[0.5,0.5]",
]
GRAMMAR = [
    "'open",
    "[1,",
    "{a:",
    "${",
    "${nope}",
    "${data.seed}",
    "${oc.env:NOPE}",
    "???",
    "range(1,5)",
    "1,2",
    "&a",
    "!!python/x:y",
]
VALUES = [*NUMBERS, *WORDS, *THRESHOLDS, *TEXTS, *STRUCTURES, *GRAMMAR]
NO_KEYS = [
    "",
    "+",
    "~",
    ".",
    "data.",
    "hydra.run.dir",
    "hydra",
    "trainer",
    "algorithm.rollout_correction",
    "-x",
    "a.b.c",
    "_target_",
]


def leaves(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation


KEYS = dict(leaves(RunConfig))


def fitting(annotation: Any, rng: random.Random) -> str:
    """A value of a key's own type, small or extreme, so that what holds between keys is reached."""
    kinds = [annotation, *get_args(annotation)]
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if words:
        return rng.choice(words)
    if bool in kinds:
        return rng.choice(["True", "False"])
    if int in kinds or float in kinds:
        return rng.choice(
            [
                "0",
                "1",
                "2",
                "3",
                "7",
                "64",
                "1000",
                "100000",
                str(2**31),
                str(2**62),
                "0.5",
                "0.99",
                "1e-9",
                "1e300",
            ]
        )
    return rng.choice(["x", "org/model", "[a,b]", "acc", "[1,2]", *WORDS, *THRESHOLDS])


def typed(rng: random.Random) -> list[str]:
    """Some keys with values of their own types."""
    return [f"{key}={fitting(KEYS[key], rng)}" for key in rng.sample(sorted(KEYS), rng.randint(1, 4))]


def mistyped(rng: random.Random) -> list[str]:
    """Some keys, of this schema, of verl's, of earlier ones, spelled wrongly or not at all, with values of
    any kind."""
    mutated = []
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(
            [*rng.choices(sorted(KEYS), k=8), *rng.choices(VERLS_KEYS, k=2), rng.choice(EARLIER_KEYS)]
        )
        place = rng.randrange(len(key) + 1)
        key = rng.choice(
            [key] * 8
            + [
                f"{key[:place]}{rng.choice('x._é =[@/')}{key[place + 1 :]}",
                key.rpartition(".")[0],
                f"{key}.x",
            ]
        )
        key = rng.choice([key] * 9 + [rng.choice(NO_KEYS)])
        mutated.append(
            rng.choice(["", "", "", "+", "++", "~", "+++"])
            + key
            + rng.choice(["="] * 9 + ["", "==", ":="])
            + rng.choice(VALUES)
        )
    return mutated
