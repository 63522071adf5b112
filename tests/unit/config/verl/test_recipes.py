"""Shell recipes of verl's examples (text models, FSDP, vLLM) compose and validate, or are refused for keys
that are listed.

``tests/verl_recipes/examples`` holds one recipe a file: where it comes from, its overrides, the keys it is
refused for. ``tests/verl_recipes/defaults`` holds every key
of verl 0.9.1 with its default, null where that follows another key, and which.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents.configuration import OWN_LOSSES, OWN_SECTIONS, sections
from documents.migration import OTHER_DEFAULTS

from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.run import FOLLOWED_KEYS as OURS
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of, has_key
from verl_rc.config.verl.keys import AGREEMENTS, is_verl_key, moved, translate_key, translate_tree
from verl_rc.config.verl.refused import REFUSED_VALUES, refusal_of
from verl_rc.plan.explain import plan_text

FOLDER = Path(__file__).parents[3] / "verl_recipes"
RECIPES = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "examples").glob("*.json"))}
DEFAULTS = json.loads((FOLDER / "defaults" / "ppo_trainer.json").read_text())
FOLLOWED_KEYS = json.loads((FOLDER / "defaults" / "followed_keys.json").read_text())
KNOWN = set(fields_of(RunConfig))


@pytest.fixture
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a recipe has its adapters."""
    (tmp_path / "adapter").mkdir()
    saved = {"peft_type": "LORA", "r": 64, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**saved, "exclude_modules": None}))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("_home")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_or_refused_for_what_is_not_built(name: str) -> None:
    recipe = RECIPES[name]
    if not recipe["refused"]:
        assert "Objective" in plan_text(load_run_config(recipe["overrides"]))
        return
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe["overrides"])
    assert keys_named(str(caught.value)) == set(recipe["refused"])


def keys_named(message: str) -> set[str]:
    """The keys in front of every line's reason."""
    heads = [re.split(r" (?:is|are) refused: ", line)[0] for line in message.splitlines()]
    return {pair.partition("=")[0] for head in heads for pair in re.split(r", (?=[a-z_]+\.)", head)}


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe["refused"]])
def test_every_refused_key_is_documented(name: str) -> None:
    given = dict(override.lstrip("+").split("=", 1) for override in RECIPES[name]["overrides"])
    for key in RECIPES[name]["refused"]:
        by_table = refusal_of(moved(key)) is not None or moved(key) in AGREEMENTS
        assert by_table or (key, given.get(key)) in REFUSED_VALUES


def test_most_recipes_are_accepted_and_no_key_of_any_is_unknown() -> None:
    assert len(RECIPES) >= 50
    assert sum(not recipe["refused"] for recipe in RECIPES.values()) >= 30
    keys = {
        override.lstrip("+").partition("=")[0]
        for recipe in RECIPES.values()
        for override in recipe["overrides"]
    }
    free = (
        "data.apply_chat_template_kwargs.",
        "ray_kwargs.ray_init.runtime_env.",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.",
    )
    assert not [
        key
        for key in keys
        if not has_key(RunConfig, moved(key)) and not is_verl_key(key) and not key.startswith(free)
    ]


@pytest.mark.parametrize("section", sorted({key.split(".")[0] for key in DEFAULTS}))
def test_every_key_of_verl_is_known_and_may_be_given_its_default(section: str) -> None:
    for key, value in DEFAULTS.items():
        if key.split(".")[0] == section:
            assert is_verl_key(key) or any(f"{key}.".startswith(f"{known}.") for known in KNOWN), key
            translate_tree(nested(key, value))


OUTSIDE_THE_SCHEMA = {
    "reward.reward_kwargs.overlong_buffer_cfg.enable": "False",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "4096",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": "1.0",
    "reward.reward_kwargs.overlong_buffer_cfg.log": "False",
    "reward.reward_kwargs.max_resp_len": "8192",
    "actor_rollout_ref.rollout.repetition_penalty": "1.0",
    "actor_rollout_ref.rollout.val_kwargs.repetition_penalty": "1.0",
    "actor_rollout_ref.model.override_config.max_position_embeddings": None,
    "actor_rollout_ref.ref.router_replay.mode": "disabled",
    "actor_rollout_ref.ref.router_replay.record_file": "null",
    "actor_rollout_ref.ref.router_replay.replay_file": "null",
    "actor_rollout_ref.actor.checkpoint.save_lora_only": "False",
    "actor_rollout_ref.model.target_parameters": "null",
    "data.cache_dir": "~/.cache/verl/rlhf",
    "data.chat_template_func": "null",
    "data.filter_prompts": "True",
    "data.need_tools_kwargs": "False",
    "reward.timeout": "60.0",
    "reward.max_concurrent": "1",
    "reward.max_rpm": "null",
    "reward.max_tpm": "null",
    "reward_model.reward_manager": None,
    "reward_model.reward_kwargs.max_resp_len": None,
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": None,
    "reward_model.overlong_buffer.len": None,
    "custom_reward_function.path": None,
    "model_engine": None,
}
"""Keys of verl's recipes that its own schema lacks, or that some releases never read; the value that is
accepted, None: there is none."""


@pytest.mark.parametrize("key", OUTSIDE_THE_SCHEMA)
def test_keys_outside_of_verls_schema_are_accepted_or_refused_by_name(key: str) -> None:
    value = OUTSIDE_THE_SCHEMA[key]
    if value is not None:
        load_run_config([*FREQUENT, f"+{key}={value}"])
        return
    with pytest.raises(ConfigError, match=rf"^{key}=7 is refused: .*(write|edit)"):
        load_run_config([*FREQUENT, f"+{key}=7"])


REFUSED_BY_NAME = {
    "actor_rollout_ref.ref.router_replay.mode=R3": "write disabled",
    "actor_rollout_ref.ref.router_replay.replay_file=a": "drop it",
    "actor_rollout_ref.actor.checkpoint.save_lora_only=True": "a checkpoint has the adapters alone where",
    "actor_rollout_ref.model.target_parameters=gate_up_proj": "write target_modules",
    "data.cache_dir=/tmp/a": "drop it",
    "data.chat_template_func=f": "tokenizer_config.json",
    "data.filter_prompts=False": "write that",
    "data.need_tools_kwargs=True": "extra_info.tools_kwargs",
    "reward.max_rpm=60": "limit them in your function",
    "actor_rollout_ref.rollout.agent.num_workers=4": "one loop drives all engines",
    "data.tool_config_path=tools.yaml": "it always equals actor_rollout_ref.rollout.multi_turn.tool_config",
    "actor_rollout_ref.model.override_config.attn_implementation=eager": "edit config.json",
    "critic.model.override_config.num_labels=1": "edit config.json",
}


@pytest.mark.parametrize("override", REFUSED_BY_NAME)
def test_what_is_done_in_another_way_here_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{override} is refused: .*{REFUSED_BY_NAME[override]}"):
        load_run_config([*FREQUENT, override])


def test_what_verl_calls_otherwise_has_its_effect() -> None:
    lora = ["actor_rollout_ref.model.lora_rank=8", "+actor_rollout_ref.actor.checkpoint.save_lora_only=True"]
    assert load_run_config([*FREQUENT, "+reward.timeout=5", *lora]).reward.timeout_seconds == 5
    with pytest.raises(
        ConfigError, match=r"(?s)Write instead:\n  algorithm\.rollout_correction\.rollout_is=token"
    ):
        load_run_config(
            [*FREQUENT, "+actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is=token"]
        )


WITHOUT_A_DEFAULT = (
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.actor.optim.lr_scheduler_type",  # under its older name warmup_style
    "critic.optim.lr_scheduler_type",
)
"""Keys for which verl's file says null, and takes what is the default here."""


def test_defaults_are_verls_but_for_those_that_the_document_lists() -> None:
    shared = {
        key: value
        for key, value in DEFAULTS.items()
        if moved(key) in KNOWN and key not in FOLLOWED_KEYS and value != "???"
    }
    differing = {
        moved(key): value
        for key, value in shared.items()
        if translate_key(key, value, {}).value != default_of(moved(key))
    }
    assert len(shared) > 150
    for key in WITHOUT_A_DEFAULT:
        del differing[key]
    assert differing == {key: value for key, (value, _) in OTHER_DEFAULTS.items()}


OF_VERLS_RECIPES = ("async_training", "reward.reward_kwargs.overlong_buffer_cfg")
"""Sections that recipes of verl add to its file."""


def test_the_document_names_the_sections_and_losses_that_verl_lacks() -> None:
    verls = {moved(key) for key in (*DEFAULTS, *FOLLOWED_KEYS)}
    own = {key for key in KNOWN if not any(f"{name}.".startswith(f"{key}.") for name in verls)}
    lacking = {
        name
        for name, model in sections(RunConfig)
        if own >= {f"{name}.{leaf}" for leaf in model.model_fields} & KNOWN
    }
    assert lacking == {*OWN_SECTIONS, *OF_VERLS_RECIPES}
    losses = {
        name
        for name, spec in POLICY_LOSSES.items()
        if own & {f"actor_rollout_ref.actor.{option.key}" for option in spec.options}
    }
    assert losses == set(OWN_LOSSES)


def default_of(key: str) -> Any:
    section: Any = RunConfig
    *path, leaf = key.split(".")
    for part in path:
        section = section.model_fields[part].annotation
    field = section.model_fields[leaf]
    return None if field.is_required() else field.default


@pytest.mark.parametrize(
    "key", [key for key, source in FOLLOWED_KEYS.items() if key in KNOWN and source in KNOWN]
)
def test_keys_follow_what_they_follow_in_verl(key: str) -> None:
    assert OURS.get(key) == FOLLOWED_KEYS[key]


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


FREQUENT = [
    *(
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "data.train_files=['a.parquet','b.parquet']",
        "data.train_batch_size=512",
    ),
    *(
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "trainer.n_gpus_per_node=8",
        "data.val_files=b.parquet",
    ),
    *(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.project_name=DAPO",
        "trainer.experiment_name=x",
    ),
    *(
        "data.max_prompt_length=2048",
        "data.max_response_length=8192",
        "actor_rollout_ref.actor.optim.lr=1e-6",
    ),
    *(
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.80",
        "trainer.logger=['console','wandb']",
        "trainer.nnodes=2",
    ),
    *(
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.save_freq=-1",
        "trainer.test_freq=5",
    ),
    *(
        "actor_rollout_ref.rollout.n=16",
        "data.truncation='left'",
        "trainer.total_epochs=10",
        "algorithm.use_kl_in_reward=False",
    ),
    *("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001"),
    *("actor_rollout_ref.actor.entropy_coeff=0", "actor_rollout_ref.model.use_remove_padding=True"),
    *("actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.val_before_train=False"),
    *(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    ),
    *("data.filter_overlong_prompts=True", "actor_rollout_ref.actor.fsdp_config.param_offload=True"),
    *(
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    ),
    *(
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    ),
    *(
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    ),
    *("actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_low=0.2"),
    *("+trainer.default_local_dir=ckpts/DAPO/x", "++actor_rollout_ref.actor.clip_ratio_c=10.0"),
]


def test_the_most_frequent_keys_all_work() -> None:
    assert len(FREQUENT) >= 40
    config = load_run_config(FREQUENT)
    assert (config.num_ranks, config.num_engines, config.needs_reference) == (16, 8, True)
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28
