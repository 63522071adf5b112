"""docs/migration_from_verl.md, from the tables of translations and verl's own example recipes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

from documents.markdown import table

from verl_rc.config.run import FOLLOWED_KEYS, RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.verl.keys import MOVED, VALUE_NAMES, WRITTEN_HERE, moved
from verl_rc.config.verl.migration import migrate
from verl_rc.config.verl.refused import REFUSED_VALUES, RENAMED, refusal_of

RECIPES = Path(__file__).parents[2] / "tests" / "verl_recipes" / "examples"
"""Example recipes of verl: keys that people type."""

_HEAD = """\
# Coming from verl

An override of a verl recipe for FSDP and vLLM has the same meaning here, or the run refuses it
before anything starts, with exit code 2, and says what to write instead. `+key=value` means
`key=value` where the key is known.

```bash
verl-rc migrate --recipe verl_run.sh > recipe.sh                # a script of any release as a recipe
verl-rc migrate run.yaml +algorithm.rollout_is_threshold=2.0    # the same for run files and overrides
verl-rc explain recipe.sh                                       # what the recipe will do, in words
verl-rc doctor recipe.sh                                        # whether it can run on this machine
```

`verl-rc migrate` runs the script in a shell to learn the values of its variables. Programs that the
script calls by name, Python among them, do not run.

Data files and reward functions have verl's column names and signature, and metrics verl's names
(memory is `perf/*`, not `actor/perf/*`);
[rollout_correction.md](rollout_correction.md#coming-from-verl) lists metrics with another meaning.
"""

SAME_KEYS: Mapping[str, tuple[str, str]] = {
    "trainer.n_gpus_per_node": ("GPUs of a node", "the same; on a CPU the number of trainer ranks"),
    "trainer.device": ("`cuda` or `npu`", "`auto` (GPUs where there are any), `cuda` or `cpu`"),
    "global_profiler.tool": (
        "profiles the roles whose `profiler.enable` is True, a trace for each",
        "profiles rank 0, or those that roles choose: a trace for each process, with all its models",
    ),
    "trainer.balance_batch": (
        "balances the whole batch over ranks, each of which then cuts its own mini-batches",
        "balances each mini-batch over ranks; which rows it has does not depend on it",
    ),
    "actor_rollout_ref.model.lora.merge": (
        "False where it is not given: engines apply the adapters",
        "True where it is not given: engines get merged weights. False is refused beside experts",
    ),
    "actor_rollout_ref.actor.clip_ratio": (
        "without effect: the two sides have defaults of their own",
        "the clip range of every side that is null",
    ),
    "distillation.distillation_loss.clip_ratio": ("the same", "the same"),
    "distillation.distillation_loss.use_policy_gradient": (
        "with False, weights of rollout correction do not reach the term",
        "they always multiply it",
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (
        "`topr`, as proposed in #6986, divides the log-ratio of a row by its length",
        "`topr` takes the product of the row's ratios, as in the paper",
    ),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (
        "without effect: the temperature decides",
        "False is greedy",
    ),
    "reward.max_concurrent": (
        "concurrent calls of the manager `rate_limited`",
        "concurrent calls of each of `reward.num_workers` processes; above 1 for an `async def` alone",
    ),
    "data.truncation": (
        "without effect: prompts are cut on the left",
        "`error` stops at a prompt too long, `left` cuts it",
    ),
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": (
        "the side that is cut; before May 2026 the side that was kept",
        "the side that is cut",
    ),
    "trainer.val_before_train": (
        "validates before the first step, of a resumed run too",
        "validates before step 1 only",
    ),
    "trainer.val_only": (
        "without effect unless `trainer.val_before_train=True`",
        "always validates and ends the run",
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "bounds of k1 rules are executed on rollout/train",
        "they bound train/rollout, as documented",
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
_NO_CONSEQUENCE = "the run is the same"
OTHER_DEFAULTS: Mapping[str, tuple[object, str]] = {
    "data.train_files": ("~/data/rlhf/gsm8k/train.parquet", _EXAMPLES),
    "data.val_files": ("~/data/rlhf/gsm8k/test.parquet", _EXAMPLES),
    "data.dataloader_num_workers": (8, "the driver loads text fastest itself"),
    "global_profiler.save_path": ("outputs/profile", "`profile` in the run's folder"),
    "actor_rollout_ref.model.path": ("~/models/deepseek-llm-7b-chat", _EXAMPLES),
    "actor_rollout_ref.actor.freeze_vision_tower": (
        False,
        "verl reads its key nowhere; a tower that follows few rewards forgets",
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (
        True,
        "True on GPUs, False on a CPU",
    ),
    "actor_rollout_ref.model.lora.merge": (
        False,
        "merged weights need nothing of an engine, and sample as fast as without adapters",
    ),
    "actor_rollout_ref.actor.clip_ratio_low": (0.2, _FOLLOWS_CLIP),
    "actor_rollout_ref.actor.clip_ratio_high": (0.2, _FOLLOWS_CLIP),
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": (False, _BY_MEMORY),
    "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size": (
        1,
        "verl's older name of it follows too",
    ),
    "actor_rollout_ref.rollout.load_format": ("dummy", _NO_CONSEQUENCE),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": (
        False,
        "the temperature decides, as it does in verl, where this key is without effect",
    ),
    "actor_rollout_ref.model.share_prefixes": (
        False,
        "a prompt is computed once for its group, on every path; verl calls it use_prefix_grouper",
    ),
    "critic.model.enable_activation_offload": (False, _FOLLOWS_MODEL),
    "critic.model.path": ("~/models/deepseek-llm-7b-chat", _FOLLOWS_MODEL),
    "critic.model.trust_remote_code": (False, _FOLLOWS_MODEL),
    "critic.model.enable_gradient_checkpointing": (True, _FOLLOWS_MODEL),
    "critic.fsdp_config.use_no_sync_for_gradient_accumulation": (False, _BY_MEMORY),
    "reward.num_workers": (8, "one for each core, at most 8"),
    "reward.reward_model.dtype": ("bfloat16", "a score is as exact as the model allows"),
    "reward.reward_model.rollout.tensor_model_parallel_size": (2, "one GPU, unless more are asked for"),
    "reward.reward_model.n_gpus_per_node": (8, "the reward model computes on the CPU unless it gets a GPU"),
    "distillation.distillation_loss.clip_ratio_low": (0.2, _FOLLOWS_CLIP),
    "distillation.distillation_loss.clip_ratio_high": (0.2, _FOLLOWS_CLIP),
    "trainer.device": ("cuda", "GPUs where there are any"),
    "trainer.project_name": ("verl_examples", _EXAMPLES),
    "trainer.experiment_name": ("gsm8k", _EXAMPLES),
    "trainer.default_local_dir": (
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        _NO_CONSEQUENCE,
    ),
}
"""Keys whose default is not that of verl 0.9.1: its default, and why."""

_NOT_IN_THE_TABLE = (_EXAMPLES, _FOLLOWS_MODEL, _FOLLOWS_CLIP, _NO_CONSEQUENCE)
"""Reasons for other defaults that need no row, or that the page gives once."""

_DEFAULTS_HEAD = """
## Same key, another default

The value of a key that is not given, in verl 0.9.1 and here. Data files and model must be given.
Keys of `critic.model` follow those of the actor's model, and `clip_ratio_low` and `clip_ratio_high`
follow `clip_ratio`. All other defaults have the same effect.

"""

_REFUSED_HEAD = """\
The first table has the refused keys that one of {count} example recipes of verl gives; a run
refuses others in the same way. A value that asks for what happens here anyway is accepted, such as
null or False for what is not built. Accepted as True, False or null, and without effect: {idle}.
"""

_ENVIRONMENTS = """
Keys of tools, interactions and agent loops (`multi_turn.*`, `agent.*`) belong to the environment
that one of their files makes: [tasks.md](tasks.md#coming-from-verl).
"""

_VALUES_HEAD = """
These values are refused:

"""

REWARDS_AND_TOOLS: Mapping[str, tuple[str, str]] = {
    "GSM8K": (
        "the texts of the last 300 characters are compared: `#### 4.0` for 4 is wrong",
        "numbers of the whole response are compared",
    ),
    "MATH": (
        "texts are compared after normalising",
        "math-verify compares meaning: what verl accepts, and `0.3333333`, `2^{10}` or `\\pm 3`",
    ),
    "`math_dapo`, `math`, `aime*`": (
        "as MATH; without `Answer:`, a box in the last 100 characters must hold the exact text",
        "as MATH, in the last 300 characters",
    ),
    "`numina_*`": (
        "answers without a box count; so does a hundredth or a hundredfold of the number",
        "as MATH: only a box counts",
    ),
    "a ground truth that cannot be read": (
        "every response is wrong, in silence",
        "every response is wrong (GSM8K: the run stops), counted in `reward/failed_fraction`",
    ),
    "a tool that raises": (
        "the policy reads the exception",
        "the same for tools of verl's files; in `multi_turn.tools` only `ToolError` is read, and any other "
        "exception fails the sample",
    ),
    "a call that is not JSON": (
        "ignored",
        "ignored with verl's files; with `multi_turn.tools` answered with what is wrong",
    ),
    "further words of a `tool_schema` (`items` of an array)": ("left out of the prompt", "kept"),
}
"""What verl does, and what happens here."""

_CORRECTION = """
## Rollout correction of every release

`verl-rc migrate` reads the settings of every release since August 2025. An example of October 2025:

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
        + "\nThese depend on other keys, most in verl's recipes for asynchronous training:\n\n"
        + table(("verl", "here"), ((f"`{key}`", replacement) for key, replacement in WRITTEN_HERE.items()))
        + "\nThese must be written as they are called here, because verl itself may ignore them:\n\n"
        + table(("verl", "write"), ((f"`{key}`", f"`{new_key}`") for key, new_key in sorted(RENAMED.items())))
        + _ENVIRONMENTS
    )


def _refused() -> str:
    """Tables of refused keys and values; keys with the same reason share a row."""
    recipes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECIPES.glob("*.json"))]
    typed = {word.lstrip("+").partition("=")[0] for recipe in recipes for word in recipe["overrides"]}
    refusals = dict(sorted(entry for key in typed if (entry := refusal_of(moved(key))) is not None))
    idle = [
        key for key, refusal in refusals.items() if True in refusal.accepted and False in refusal.accepted
    ]
    keys_by_reason: dict[str, list[str]] = defaultdict(list)
    for key, refusal in refusals.items():
        if key not in idle:
            keys_by_reason[refusal.reason].append(key)
    rows = ((_listed(keys), reason) for reason, keys in keys_by_reason.items())
    head = fill(_REFUSED_HEAD.format(count=len(recipes), idle=_listed(idle)), 100, break_on_hyphens=False)
    return (
        f"\n## Keys that are refused\n\n{head}\n\n"
        + table(("verl", "why, and what instead"), rows)
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
        if key not in SAME_KEYS and reason not in _NOT_IN_THE_TABLE:
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
