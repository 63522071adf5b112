"""verl's keys of tools, interactions and agent loops mean an environment, or are refused by name."""

import pytest
from sound_run import sound_run

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config, load_run_config
from verl_rc.config.rollout import EnvironmentConfig
from verl_rc.config.run import RunConfig
from verl_rc.config.verl.environments import ADAPTER
from verl_rc.config.verl.migration import migrate

ROLLOUT = "actor_rollout_ref.rollout"
TURNS, AGENT, ENVIRONMENT = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent", f"{ROLLOUT}.environment"
GSM8K = [
    f"{ROLLOUT}.mode=async",
    f"{TURNS}.enable=True",
    f"{TURNS}.max_assistant_turns=5",
    f"{TURNS}.format=hermes",
    f"{TURNS}.tool_config_path=gsm8k_tool_config.yaml",
    "data.return_raw_chat=True",
]
"""The keys of verl's GSM8K example with its tool."""


def environment(*overrides: str) -> EnvironmentConfig:
    return load_config(RunConfig, [*sound_run(), *overrides]).actor_rollout_ref.rollout.environment


def test_files_of_tools_are_an_environment_whose_reward_is_the_functions() -> None:
    config = load_run_config([*sound_run(), *GSM8K])
    rollout = config.actor_rollout_ref.rollout
    assert rollout.environment == EnvironmentConfig(
        name=ADAPTER,
        arguments={
            "tool_config_path": "gsm8k_tool_config.yaml",
            "max_assistant_turns": 5,
            "format": "hermes",
        },
        reward="function",
    )
    assert not rollout.multi_turn.enable


def test_its_reward_its_hosts_and_its_limits_may_be_chosen() -> None:
    chosen = environment(
        f"{TURNS}.interaction_config_path=i.yaml",
        f"{TURNS}.function_tool_path=f.py",
        f"{TURNS}.tool_timeout_seconds=7",
        f"{AGENT}.num_workers=3",
        f"{AGENT}.default_agent_loop=tool_agent",
        f"{ENVIRONMENT}.reward=sum",
    )
    assert (chosen.reward, chosen.hosts, chosen.step_seconds) == ("sum", 3, 7.0)
    assert chosen.arguments == {
        "interaction_config_path": "i.yaml",
        "function_tool_path": "f.py",
        "default_agent_loop": "tool_agent",
    }


def test_a_file_of_agent_loops_is_an_environment_too() -> None:
    chosen = environment(f"{AGENT}.agent_loop_config_path=loops.yaml", f"{AGENT}.default_agent_loop=mine")
    assert chosen.arguments == {"agent_loop_config_path": "loops.yaml", "default_agent_loop": "mine"}


def test_workers_are_hosts_of_any_environment() -> None:
    own = f"{ENVIRONMENT}.name=recipes.environments.guess:GuessNumber"
    assert environment(own, f"{AGENT}.num_workers=2").hosts == 2
    assert environment(f"{AGENT}.num_workers=8") == EnvironmentConfig()


def test_keys_without_a_file_say_nothing_of_an_environment() -> None:
    given = [f"{TURNS}.{name}=null" for name in ("tool_config_path", "function_tool_path")]
    assert environment(*given, f"{AGENT}.agent_loop_config_path=null") == EnvironmentConfig()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([f"{AGENT}.num_workers=4"], "no environment to give processes to"),
        ([f"{AGENT}.agent_loop_manager_class=a.B"], "call the chat endpoint as an agent"),
        ([f"{AGENT}.custom_async_server.path=x.py"], "one loop drives all engines"),
        ([f"{AGENT}.default_agent_loop=mine"], "there is one loop"),
        ([f"{TURNS}.tool_env_manifest_path=x.yaml"], "extra_info.tool_selection"),
        (["data.tool_config_path=x.yaml"], f"it always equals {TURNS}.tool_config_path"),
        ([*GSM8K, "data.tool_config_path=other.yaml"], f"it always equals {TURNS}.tool_config_path"),
        ([*GSM8K, f"{ENVIRONMENT}.name=guessing:Guess"], "both answer the policy's turns"),
        ([*GSM8K, f"{TURNS}.tool_timeout_seconds=7", f"{ENVIRONMENT}.step_seconds=8"], "give it once"),
        ([f"{TURNS}.enable=True", f"{TURNS}.max_user_turns=2"], "needs a tool: .*tool_config_path"),
    ],
)
def test_what_has_no_effect_is_refused_by_name(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_run_config([*sound_run(), *overrides])


def test_datas_copy_of_the_key_may_say_the_same() -> None:
    same = "data.tool_config_path=gsm8k_tool_config.yaml"
    assert environment(*GSM8K, same) == environment(*GSM8K)


def test_a_recipe_is_migrated_to_the_keys_of_the_environment() -> None:
    migrated = migrate(GSM8K)
    assert f"{ENVIRONMENT}.name={ADAPTER}" in migrated.overrides
    assert f"{ENVIRONMENT}.arguments.tool_config_path=gsm8k_tool_config.yaml" in migrated.overrides
    again = load_config(RunConfig, [*sound_run(), *migrated.overrides])
    assert again == load_config(RunConfig, [*sound_run(), *GSM8K])
