"""docs/migration_from_verl.md, from the tables of translations and verl's own example recipes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

from documents.markdown import table

from verl_rc.config.run import FOLLOWED_KEYS, RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.verl import environments
from verl_rc.config.verl.keys import MOVED, VALUE_NAMES, WRITTEN_HERE, moved
from verl_rc.config.verl.migration import migrate
from verl_rc.config.verl.refused import REFUSED_VALUES, RENAMED, Refusal, refusal_of

RECIPES = Path(__file__).parents[2] / "tests" / "verl_recipes" / "examples"
"""Example recipes of verl: keys that people type."""

_HEAD = """\
# Coming from verl

An override of a verl recipe for FSDP and vLLM has the same meaning here, or the run refuses it
before anything starts, with exit code 2, and says what to write instead. An override that another
key turns off is refused too, or `verl-rc explain` lists it.

```bash
verl-rc migrate --recipe verl_run.sh > recipe.sh                # a shell script of any release as a recipe that runs, with notes
verl-rc migrate run.yaml +algorithm.rollout_is_threshold=2.0    # the same for run files and overrides
verl-rc explain recipe.sh                                       # what the recipe will do, in words
verl-rc doctor recipe.sh                                        # whether it can run on this machine
```

`verl-rc migrate` runs the script in a shell to learn the values of its variables. No program that
the script calls by name, Python among them, does anything there.

- **`+key=value`** means `key=value` where the key is known.
- **Data files and reward functions** have verl's column names and signature.
- **Metrics** have verl's names. Memory is `perf/*` and not `actor/perf/*`.
  [rollout_correction.md](rollout_correction.md#coming-from-verl) lists metrics that have verl's
  name and another meaning.
- **Keys that are not given** have verl's defaults, with
  [a few exceptions](#same-key-another-default).

`python -m scripts.documents` writes this page from the tables in `verl_rc/config/verl`.
"""  # noqa: E501

SAME_KEYS: Mapping[str, tuple[str, str]] = {
    "trainer.n_gpus_per_node": ("GPUs of a node", "the same; on a CPU the number of trainer ranks"),
    "trainer.device": ("`cuda` or `npu`", "`auto` (GPUs where there are any), `cuda` or `cpu`"),
    "actor_rollout_ref.actor.strategy": ("`fsdp` is FSDP1", "both names mean FSDP2"),
    "actor_rollout_ref.model.lora.merge": (
        "False where it is not given: engines apply the adapters",
        "True where it is not given: merged weights need nothing of an engine. False is as in verl; refused "
        "beside experts",
    ),
    "actor_rollout_ref.actor.clip_ratio": (
        "without effect: the two sides have defaults of their own",
        "the clip range of every side that is null",
    ),
    "distillation.distillation_loss.clip_ratio": (
        "without effect: the two sides have defaults of their own",
        "the clip range of every side that is null",
    ),
    "distillation.distillation_loss.use_policy_gradient": (
        "False: the weights of rollout correction do not reach the term",
        "they multiply it, True or False",
    ),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (
        "without effect: the temperature decides",
        "False is greedy",
    ),
    "data.truncation": (
        "without effect: prompts are cut on the left",
        "`error` stops at a prompt too long, `left` cuts it",
    ),
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": (
        "the side that is cut; before May 2026 (pull request 6313) the side that was kept",
        "the side that is cut; with `middle`, an odd limit keeps one character more of the beginning",
    ),
    "trainer.val_before_train": (
        "validates before the first step, of a resumed run too",
        "validates before step 1; a resumed run validates next at a multiple of `trainer.test_freq`",
    ),
    "trainer.val_only": (
        "without effect unless `trainer.val_before_train=True`",
        "validates and ends the run, whatever `trainer.val_before_train` says",
    ),
    "algorithm.adv_estimator": (
        "in a group of one sample, `opo` gives it its score, and `grpo_passk` raises",
        "both give it 0; with `rollout.n=1` they are refused",
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "bounds of k1 rules are executed on rollout/train",
        "they bound train/rollout, as the documents of both projects say",
    ),
    "algorithm.rollout_correction.bypass_mode": (
        "switches the loss in the driver's copy only",
        "switches driver and actor",
    ),
}
"""Keys with a different meaning in verl: (key, meaning in verl, meaning here)."""

_FOLLOWS_MODEL = "the critic is made of the model that is trained, and as it is"
_BY_MEMORY = "the estimate of memory decides"
_FOLLOWS_CLIP = "`clip_ratio` is 0.2, and acts here"
_EXAMPLES = "verl's are examples"
OTHER_DEFAULTS: Mapping[str, tuple[object, str]] = {
    "data.train_files": ("~/data/rlhf/gsm8k/train.parquet", _EXAMPLES),
    "data.val_files": ("~/data/rlhf/gsm8k/test.parquet", _EXAMPLES),
    "data.dataloader_num_workers": (8, "the driver loads text fastest itself"),
    "actor_rollout_ref.model.path": ("~/models/deepseek-llm-7b-chat", _EXAMPLES),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        True,
        "True on GPUs, as there; False on a CPU, which has memory and no time for it",
    ),
    "actor_rollout_ref.model.lora.merge": (
        False,
        "merged weights need nothing of an engine, and sample as fast as without adapters",
    ),
    "actor_rollout_ref.actor.strategy": ("fsdp", "both names mean FSDP2"),
    "actor_rollout_ref.actor.clip_ratio_low": (0.2, _FOLLOWS_CLIP),
    "actor_rollout_ref.actor.clip_ratio_high": (0.2, _FOLLOWS_CLIP),
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": (False, _BY_MEMORY),
    "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": (
        1,
        "verl's older name, `actor_rollout_ref.ref.ulysses_sequence_parallel_size`, follows it too",
    ),
    "actor_rollout_ref.rollout.load_format": (
        "dummy",
        "the trainer's weights come before the first sample either way",
    ),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (
        False,
        "the temperature decides, as it does in verl, where this key is without effect",
    ),
    "critic.strategy": ("fsdp", "both names mean FSDP2"),
    "critic.model.path": ("~/models/deepseek-llm-7b-chat", _FOLLOWS_MODEL),
    "critic.model.trust_remote_code": (False, _FOLLOWS_MODEL),
    "critic.model.use_remove_padding": (True, _FOLLOWS_MODEL),
    "critic.model.enable_gradient_checkpointing": (True, _FOLLOWS_MODEL),
    "critic.fsdp_config.use_no_sync_for_gradient_accumulation": (False, _BY_MEMORY),
    "critic.checkpoint.async_save": (False, "both models lie in one checkpoint"),
    "reward.num_workers": (8, "one for each core, at most 8"),
    "reward.reward_model.n_gpus_per_node": (8, "the reward model computes on the CPU unless it gets a GPU"),
    "distillation.distillation_loss.clip_ratio_low": (0.2, _FOLLOWS_CLIP),
    "distillation.distillation_loss.clip_ratio_high": (0.2, _FOLLOWS_CLIP),
    "trainer.device": ("cuda", "GPUs where there are any"),
    "trainer.project_name": ("verl_examples", _EXAMPLES),
    "trainer.experiment_name": ("gsm8k", _EXAMPLES),
    "trainer.default_local_dir": (
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "null means the same folder",
    ),
}
"""Keys whose default is not that of verl 0.9.1: its default, and why."""

_SAID_ELSEWHERE = (_EXAMPLES, _FOLLOWS_MODEL, _FOLLOWS_CLIP)
"""Reasons that the text above the table of defaults, or the table of meanings, gives once."""

_DEFAULTS_HEAD = """
## Same key, another default

The value of a key that is not given, in verl 0.9.1 and here. Data files and model must be given:
verl's defaults are examples, as are its project and experiment. Keys of `critic.model` follow those
of the actor's model, and `clip_ratio_low` and `clip_ratio_high` follow `clip_ratio`. All other
shared keys have the same default.

"""

_REFUSED_HEAD = """
## Keys that are refused

The table has the refused keys that one of {count} example recipes of verl gives. A run refuses other
keys in the same way. Values in the last column are accepted, because they ask for what happens here
anyway. "`False` of `KEY`" means that the whole section is accepted while `KEY` is `False`.

"""

_VALUES_HEAD = """
These values are refused:

"""

REWARDS_AND_TOOLS: Mapping[str, tuple[str, str]] = {
    "GSM8K": (
        "texts are compared, `#### 4.0` for 4 is wrong; the last 300 characters count",
        "numbers are compared; the whole response counts; blanks, dollar signs and a full stop are ignored",
    ),
    "MATH": (
        "texts are compared after normalising",
        "math-verify compares meaning: what verl accepts, and `0.3333333`, `2^{10}` or `\\pm 3` for what "
        "they are; text behind a number that is no unit is not cut off. Words are compared as text: "
        "`listen` is not `silent`",
    ),
    "`math_dapo`, `math`, `aime*`": (
        "texts are compared after normalising; without `Answer:`, a box in the last 100 characters must hold "
        "the exact text",
        "as MATH, in the last 300 characters",
    ),
    "`numina_*`": (
        "answers without a box count (`the answer is 34`); so does a number for a hundredth or a hundredfold "
        "of itself",
        "as MATH: only a box counts",
    ),
    "percent signs, degree signs, units": (
        "ignored; 0.1 is not 10 %, but for `numina_*`",
        "ignored; 0.1 is not 10 %",
    ),
    "a ground truth that cannot be read": (
        "every response is wrong, in silence",
        "every response is wrong (GSM8K: the run stops), with the row named and counted in "
        "`reward/failed_fraction`",
    ),
    "a tool that raises": (
        "the policy reads the exception and goes on",
        "as in verl for tools of verl's files, counted as `env/tool_errors/*`; for `multi_turn.tools` "
        "`ToolError` is what the policy reads, and any other exception fails its sample",
    ),
    "a call that is not JSON": (
        "ignored",
        "ignored with verl's files; with `multi_turn.tools` answered with what is wrong",
    ),
    "further words of a `tool_schema` (`items` of an array)": ("left out of the prompt", "kept"),
    "the last words of an interaction that is done": ("appended to the response", "left out"),
    "the limit of a tool's answer": ("of its result", "of errors as well"),
}
"""What verl does, and what happens here."""

_CORRECTION = """
## Rollout correction of every release

`verl-rc migrate` reads the settings of every release since August 2025. Presets are accepted by all
their [names](rollout_correction.md#presets), and
[rollout_correction.md](rollout_correction.md#coming-from-verl) has the keys and metrics that were
renamed. An example of October 2025:

```text
{settings}
```

becomes

```text
{overrides}
```

{notes}
"""

CORRECTION_EXAMPLE = (
    "algorithm.rollout_is=True",
    "algorithm.rollout_is_level=token",
    "algorithm.rollout_is_mode=mask",
    "algorithm.rollout_is_threshold=2.0",
    "algorithm.rollout_is_threshold_lower=0.5",
)


def render() -> str:
    """The whole page."""
    return "".join(
        [_HEAD, _moved(), _refused(), _same_keys(), _defaults(), _rewards_and_tools(), _correction()]
    )


def _moved() -> str:
    values = {
        f"{key}={_override_value(value)}": f"{key}={_override_value(translation)}"
        for (key, value), translation in VALUE_NAMES.items()
        if value != translation
    }
    return (
        "\n## Keys by another name\n\nTheir values are taken over:\n\n"
        + table(("verl", "here"), ((f"`{key}`", f"`{new_key}`") for key, new_key in (MOVED | values).items()))
        + "\nThese belong to verl's recipes for asynchronous training:\n\n"
        + table(("verl", "here"), ((f"`{key}`", replacement) for key, replacement in WRITTEN_HERE.items()))
        + "\nThese must be written as they are called here, because verl itself may ignore them:\n\n"
        + table(("verl", "write"), ((f"`{key}`", f"`{new_key}`") for key, new_key in sorted(RENAMED.items())))
        + f"\n{fill(_of_environments(), 100, break_on_hyphens=False)}\n"
    )


def _of_environments() -> str:
    """The keys of tools, interactions and agent loops, in words."""
    short = {
        key.removeprefix("actor_rollout_ref.rollout."): here
        for key, here in environments.WRITTEN_HERE.items()
    }
    arguments = _listed(key for key, here in short.items() if "argument" in here)
    others = "; ".join(f"`{key}`: {here}" for key, here in short.items() if "argument" not in here)
    return (
        "Keys of tools, interactions and agent loops belong to an environment, where one of their files is "
        f"given ([tasks.md](tasks.md#coming-from-verl)). {arguments} are its arguments of the "
        f"same names. {others}."
    )


def _refused() -> str:
    """Tables of refused keys and values; keys with the same reason share a row."""
    recipes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECIPES.glob("*.json"))]
    typed = {word.lstrip("+").partition("=")[0] for recipe in recipes for word in recipe["overrides"]}
    refusals = dict(sorted(entry for key in typed if (entry := refusal_of(moved(key))) is not None))
    keys_by_row: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key, refusal in refusals.items():
        keys_by_row[refusal.reason, _accepted(refusal)].append(key)
    rows = ((_listed(keys), reason, accepted) for (reason, accepted), keys in keys_by_row.items())
    return (
        _REFUSED_HEAD.format(count=len(recipes))
        + table(("verl", "why, and what instead", "accepted"), rows)
        + _VALUES_HEAD
        + table(("key", "values", "write"), _refused_values())
    )


def _refused_values() -> Iterable[tuple[str, str, str]]:
    """Refused values of a key with what to write instead; keys with the same values share a row."""
    values: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (key, value), reason in REFUSED_VALUES.items():
        values[key, reason.rpartition("write ")[2]].append(value)
    keys: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (key, instead), refused in values.items():
        keys[_listed(refused), instead].append(key)
    return ((_listed(names), refused, instead) for (refused, instead), names in keys.items())


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _accepted(refusal: Refusal) -> str:
    """Values that are accepted for a refused key, in the syntax of overrides."""
    words = ", ".join(f"`{_override_value(value)}`" for value in refusal.accepted)
    return f"{words} of `{refusal.switch}`" if refusal.switch and words else words


def _override_value(value: object) -> str:
    """A value in the syntax of overrides."""
    return "null" if value is None else "''" if value == "" else str(value)


def _same_keys() -> str:
    rows = ((f"`{key}`", verl_meaning, meaning) for key, (verl_meaning, meaning) in SAME_KEYS.items())
    return "\n## Same key, another meaning\n\n" + table(("key", "in verl", "here"), rows)


def _defaults() -> str:
    """The table of other defaults; keys with the same defaults for the same reason share a row."""
    keys_by_row: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key, (verl_default, reason) in OTHER_DEFAULTS.items():
        if key not in SAME_KEYS and reason not in _SAID_ELSEWHERE:
            keys_by_row[f"`{_override_value(verl_default)}`", _own_default(key), reason].append(key)
    rows = ((_listed(keys), *defaults_and_reason) for defaults_and_reason, keys in keys_by_row.items())
    return _DEFAULTS_HEAD + table(("key", "in verl", "here", "why"), rows)


def _own_default(key: str) -> str:
    field = fields_of(RunConfig)[key]
    if field.is_required():
        return "must be given"
    return (
        f"that of `{FOLLOWED_KEYS[key]}`" if key in FOLLOWED_KEYS else f"`{_override_value(field.default)}`"
    )


def _rewards_and_tools() -> str:
    rows = (
        (name, verl_behaviour, behaviour) for name, (verl_behaviour, behaviour) in REWARDS_AND_TOOLS.items()
    )
    return "\n## Rewards and tools\n\n" + table(("what", "in verl", "here"), rows)


def _correction() -> str:
    migration = migrate(CORRECTION_EXAMPLE)
    notes = (fill(note, 100, initial_indent="- ", subsequent_indent="  ") for note in migration.notes)
    return _CORRECTION.format(
        settings="\n".join(CORRECTION_EXAMPLE),
        overrides="\n".join(migration.overrides),
        notes="\n".join(notes),
    )
