"""Keys of verl: moved ones reach their place, accepted defaults are dropped, what is off means nothing, all
else is refused."""

from typing import Any

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of, has_key
from verl_rc.config.verl.keys import (
    AGREEMENTS,
    MOVED,
    VALUE_NAMES,
    is_verl_key,
    moved,
    translate_key,
    translate_tree,
)
from verl_rc.config.verl.refused import refusal_of

KNOWN = set(fields_of(RunConfig))
SOUND = [
    "data.train_files=a.parquet",
    "data.val_files=b.parquet",
    "actor_rollout_ref.model.path=org/model",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.n=2",
    "algorithm.adv_estimator=grpo",
]


def nested(**leaves: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *path, leaf = key.split("/")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[leaf] = value
    return tree


def test_moved_keys_lead_to_keys_and_are_no_keys_themselves() -> None:
    assert all(has_key(RunConfig, key) for key in MOVED.values())
    assert not any(has_key(RunConfig, key) for key in MOVED)


def test_names_of_values_and_agreements_are_about_the_right_keys() -> None:
    assert {key for key, _ in VALUE_NAMES} <= KNOWN
    assert not set(AGREEMENTS) & KNOWN


def test_a_section_moves_with_its_leaves() -> None:
    assert moved("critic.model.fsdp_config.param_offload") == "critic.fsdp_config.param_offload"
    assert moved("critic.fsdp_config.param_offload") == "critic.fsdp_config.param_offload"
    assert is_verl_key("critic.fsdp.anything")
    assert not is_verl_key("data.train_files")


def test_a_moved_value_stands_in_its_place() -> None:
    given = nested(**{"critic/fsdp/param_offload": True, "actor_rollout_ref/actor/grad_clip": 0.5})
    expected = nested(
        **{"critic/fsdp_config/param_offload": True, "actor_rollout_ref/actor/optim/clip_grad": 0.5}
    )
    assert translate_tree(given).tree == expected


def test_one_option_given_twice_must_say_the_same() -> None:
    both = {"actor_rollout_ref/actor/grad_clip": 0.5, "actor_rollout_ref/actor/optim/clip_grad": 0.5}
    assert translate_tree(nested(**both)).tree["actor_rollout_ref"]["actor"]["optim"]["clip_grad"] == 0.5
    with pytest.raises(ConfigError, match="are one option"):
        translate_tree(nested(**{**both, "actor_rollout_ref/actor/optim/clip_grad": 1.0}))


def test_an_accepted_default_leaves_nothing_behind() -> None:
    given = nested(**{"actor_rollout_ref/actor/pad_to_length": False, "trainer/use_v1": True})
    assert translate_tree(given).tree == {}


@pytest.mark.parametrize(
    ("value", "is_accepted"), [(False, True), (None, True), (True, False), (0, False), ("False", False)]
)
def test_accepted_values_are_compared_with_their_type(value: Any, is_accepted: bool) -> None:
    leaf = translate_key("actor_rollout_ref.model.use_liger", value, {})
    assert (leaf.accepted, leaf.problem is None) == (is_accepted, is_accepted)


@pytest.mark.parametrize(
    ("switch", "is_refused"), [({}, False), ({"enable": False}, False), ({"enable": True}, True)]
)
def test_details_matter_only_where_they_are_turned_on(switch: dict[str, bool], is_refused: bool) -> None:
    given = {f"actor_rollout_ref.actor.qat.{name}": value for name, value in switch.items()}
    leaf = translate_key("actor_rollout_ref.actor.qat.mode", "w4a16", given)
    assert (leaf.problem is not None) == is_refused


def test_the_switch_of_a_section_may_be_a_key_of_this_schema() -> None:
    name = "reward.reward_model.rollout.max_num_seqs"
    assert translate_key(name, 8, {"reward.reward_model.enable": False}).accepted
    assert translate_key(name, 8, {"reward.reward_model.enable": True}).problem is not None


def of_judge(**given: Any) -> Any:
    """What a section ``reward.reward_model`` with these keys becomes."""
    return translate_tree({"reward": {"reward_model": given}}).tree["reward"]["reward_model"]


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ({"prompt_length": 8192, "response_length": 4096}, 12288),
        ({"prompt_length": 512}, 2560),  # and verl's default
        ({"prompt_length": None}, None),
    ],
)
def test_prompt_and_response_of_a_reward_model_are_one_conversation(lengths: Any, tokens: Any) -> None:
    served = {"name": "vllm", **lengths}
    found = of_judge(enable=True, rollout=served)
    assert found == {"enable": True, "max_length": tokens, "rollout": {"name": "vllm"}}
    assert of_judge(enable=False, rollout=served) == {"enable": False, "rollout": {"name": "vllm"}}
    with pytest.raises(ConfigError, match=r"\.prompt_length=.* and .*\.max_length=9 are one option"):
        of_judge(enable=True, rollout=served, max_length=9)


@pytest.mark.parametrize(
    ("leaf", "value"),
    [("seed", 1), ("max_model_len", 64), ("free_cache_engine", True), ("enforce_eager", False)],
)
def test_other_keys_of_what_serves_a_reward_model_are_refused(leaf: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^reward.reward_model.rollout.{leaf}={value} is refused"):
        of_judge(enable=True, rollout={"name": "vllm", leaf: value})
    happens = {"skip_tokenizer_init": False, "enforce_eager": True, "free_cache_engine": False}
    assert of_judge(enable=True, rollout={"name": "vllm", **happens})["rollout"] == {"name": "vllm"}
    assert of_judge(enable=True, rollout={"dtype": "bfloat16"}) == {"enable": True, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("key", "theirs", "ours"),
    [
        ("actor_rollout_ref.rollout.nnodes", 0, None),
        ("actor_rollout_ref.rollout.nnodes", 2, 2),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "naive", "auto"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl", "broadcast"),
        ("algorithm.filter_groups.metric", "reward", "reward"),
        ("algorithm.filter_groups.max_num_gen_batches", -1, 0),
        ("data.shuffle", False, False),
        ("actor_rollout_ref.model.lora.merge", False, False),
    ],
)
def test_values_by_their_names_in_verl(key: str, theirs: Any, ours: Any) -> None:
    assert translate_key(key, theirs, {}).value == ours


def test_refusals_for_one_reason_are_one_message() -> None:
    switches = {f"actor_rollout_ref/{role}/pad_to_length": True for role in ("actor", "ref")}
    with pytest.raises(ConfigError) as caught:
        translate_tree(nested(**switches))
    assert len(str(caught.value).splitlines()) == 1
    assert "actor_rollout_ref.ref.pad_to_length=True are refused" in str(caught.value)


def test_the_message_of_a_renamed_key_can_be_pasted() -> None:
    with pytest.raises(ConfigError, match=r"write reward.custom_reward_function.path=x.py"):
        translate_tree(nested(**{"custom_reward_function/path": "x.py"}))
    found = refusal_of("custom_reward_function.path")
    assert found is not None


@pytest.mark.parametrize(
    ("overrides", "holds"),
    [
        ("actor_rollout_ref.rollout.prompt_length=512", True),
        ("actor_rollout_ref.rollout.prompt_length=256", False),
        ("actor_rollout_ref.actor.rollout_n=2", True),
        ("critic.rollout_n=3", False),
        ("trainer.max_critic_ckpt_to_keep=3 trainer.max_actor_ckpt_to_keep=3", True),
        ("trainer.max_critic_ckpt_to_keep=3", False),
        ("reward.reward_manager.name=naive", True),
        ("reward.reward_manager.name=dapo", True),
        ("reward.reward_manager.name=gdpo", False),
        ("reward.reward_manager.name=prime", False),
        ("actor_rollout_ref.actor.router_replay.mode=disabled", True),
        ("actor_rollout_ref.actor.router_replay.mode=R3", False),
        ("actor_rollout_ref.actor.router_replay.mode=R2", False),
        (
            "actor_rollout_ref.actor.router_replay.mode=R3 "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            True,
        ),
        (
            "actor_rollout_ref.actor.router_replay.mode=disabled "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            False,
        ),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent", True),
        ("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", False),
        (
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent "
            "actor_rollout_ref.rollout.multi_turn.enable=True "
            "actor_rollout_ref.rollout.multi_turn.tools=[calculator]",
            True,
        ),
    ],
)
def test_keys_that_another_one_decides(overrides: str, holds: bool) -> None:
    given = [*SOUND, *overrides.split()]
    if holds:
        load_run_config(given)
        return
    with pytest.raises(ConfigError, match=r"is refused: .*write "):
        load_run_config(given)


def test_the_overlong_penalty_is_not_naive() -> None:
    penalty = "reward.reward_kwargs.overlong_buffer_cfg"
    with pytest.raises(ConfigError, match="write dapo"):
        load_run_config(
            [*SOUND, "reward.reward_manager.name=naive", f"+{penalty}.enable=True", f"+{penalty}.len=8"]
        )


@pytest.mark.parametrize(
    "padding",
    [
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.actor.use_remove_padding=False",
        "critic.model.use_remove_padding=False",
    ],
)
def test_verls_prefix_grouper_packs_rows_here(padding: str) -> None:
    """In verl it needs padded rows."""
    grouper = "actor_rollout_ref.actor.use_prefix_grouper=True"
    config = load_run_config([*SOUND, grouper, padding])
    model = config.actor_rollout_ref.model
    assert (model.share_prefixes, model.use_remove_padding) == (True, True)
    if not padding.startswith("critic"):
        assert not load_run_config([*SOUND, padding]).actor_rollout_ref.model.use_remove_padding


def test_shared_prefixes_need_packed_rows() -> None:
    both = ["actor_rollout_ref.model.share_prefixes=True", "actor_rollout_ref.model.use_remove_padding=False"]
    with pytest.raises(ConfigError, match=r"share_prefixes=True needs packed rows"):
        load_run_config([*SOUND, *both])
    with pytest.raises(ConfigError, match=r"share_prefixes=True; pass .*share_prefixes=auto"):
        load_run_config([*SOUND, both[0], "actor_rollout_ref.exact=True"])
    with pytest.raises(ConfigError, match=r"model\.share_prefixes"):
        load_run_config([*SOUND, "actor_rollout_ref.model.share_prefixes=never"])
