"""Before a run starts: can the chat template render what its tools or environment reply?"""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from published_templates import PUBLISHED_TEMPLATES, PublishedTemplate
from sound_run import sound_run
from tools_of_verl import schema

from verl_rc import main_ppo
from verl_rc.cli import main as verl_rc_command
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.plan.doctor import Inputs, check_conversations
from verl_rc.records.episode import Episode, Opening, Reply, Turn
from verl_rc.records.tokenize import load_tokenizer
from verl_rc.runtime.rollout.chat_template import check_chat_template
from verl_rc.runtime.rollout.conversation import Conversations
from verl_rc.runtime.rollout.environment import Environment

ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = (f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.tools=[calculator]")
LOST = "a message of the role 'tool' it makes '</s>"


class Silent(Environment):
    """It does not say what it replies."""

    async def reset(self, row: Any, seed: int) -> None:
        """Nothing."""

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True)


class Both(Silent):
    """Its two kinds of replies are known."""

    def reply_roles(self) -> Sequence[Sequence[str]]:
        return [["user"], ["user", "tool"]]


def environment(name: str, **arguments: str) -> tuple[str, ...]:
    given = [f"+{ROLLOUT}.environment.arguments.{key}={value}" for key, value in arguments.items()]
    return f"{ROLLOUT}.environment.name={name}", *given


VERL = "verl_rc.runtime.rollout.environments.verl_loops:VerlLoops"


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """The arguments of a run with the model of a template."""

    def of(name: str, *given: str) -> list[str]:
        model = (
            PUBLISHED_TEMPLATES[name] if name in PUBLISHED_TEMPLATES else PublishedTemplate(name, ("</s>",))
        )
        return [*sound_run(), f"actor_rollout_ref.model.path={model.save(tmp_path / 'model')}", *given]

    return of


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ((), None),
        (TOOLS, LOST),
        (environment("recipes.environments.guess:GuessNumber"), None),
        (environment("recipes.environments.research:Research"), LOST),
        (environment(f"{__name__}:Both"), LOST),
        (environment(VERL), None),
        (
            (
                *environment("recipes.environments.guess:GuessNumber"),
                f"{ROLLOUT}.environment.choices={{look: {{name: 'recipes.environments.research:Research'}}}}",
            ),
            LOST,
        ),
    ],
)
def test_what_tools_and_environments_are_known_to_reply_must_be_rendered(
    given: tuple[str, ...], refused: str | None, arguments: Any
) -> None:
    """The template of Zephyr skips the role tool."""
    config = load_run_config(arguments("Zephyr, TinyLlama", *given))
    if refused is None:
        assert check_chat_template(config) == []
        return
    with pytest.raises(ValueError, match="for several turns") as raised:
        check_chat_template(config)
    assert refused in str(raised.value)


@pytest.mark.parametrize(
    ("key", "content", "refused"),
    [
        (
            "tool_config_path",
            {"tools": [{"class_name": "tools_of_verl.Judge", "tool_schema": schema("j")}]},
            True,
        ),
        (
            "interaction_config_path",
            {"interaction": [{"class_name": "tools_of_verl.TruthInteraction"}]},
            False,
        ),
    ],
)
def test_what_verls_files_reply_is_known(
    key: str, content: Any, refused: bool, arguments: Any, tmp_path: Path
) -> None:
    (tmp_path / "file.yaml").write_text(json.dumps(content))
    given = environment(VERL, **{key: str(tmp_path / "file.yaml")})
    config = load_run_config(arguments("Zephyr, TinyLlama", *given))
    if not refused:
        assert check_chat_template(config) == []
        return
    with pytest.raises(ValueError, match="a message of the role 'tool'"):
        check_chat_template(config)


def test_roles_of_an_environment_that_does_not_say_them_are_notes(arguments: Any) -> None:
    (note,) = check_chat_template(
        load_run_config(arguments("Zephyr, TinyLlama", *environment(f"{__name__}:Silent")))
    )
    assert note.startswith("a reply of the role tool fails its episode: for several turns")


def test_a_template_that_can_render_no_role_is_refused_for_every_environment(arguments: Any) -> None:
    config = load_run_config(
        arguments("{% for m in messages %}{{ m.content }}{% endfor %}", *environment(f"{__name__}:Silent"))
    )
    with pytest.raises(ValueError, match="must end an assistant's turn with the EOS token or another"):
        check_chat_template(config)


def test_a_template_without_tools_is_noted_where_it_gets_them(arguments: Any) -> None:
    notes = check_chat_template(load_run_config(arguments("SmolLM2", *TOOLS)))
    assert notes == ["it does not read the descriptions of tools: prompts must say what the tools are"]
    tag = (*TOOLS, f"{ROLLOUT}.multi_turn.format=tag")
    assert check_chat_template(load_run_config(arguments("SmolLM2", *tag))) == []
    assert check_chat_template(load_run_config(arguments("Qwen3", *TOOLS))) == []


def test_parallel_calls_need_a_template_for_several_answers(arguments: Any) -> None:
    one = "{% for m in messages %}{{ m.content if loop.last or m.role != 'tool' else '' }}</s>{% endfor %}"
    assert len(check_chat_template(load_run_config(arguments(one, *TOOLS)))) == 1  # of the tools
    several = f"{ROLLOUT}.multi_turn.max_parallel_calls=3"
    with pytest.raises(ValueError, match="role 'tool'"):
        check_chat_template(load_run_config(arguments(one, *TOOLS, several)))


def test_doctor_explain_and_the_run_refuse_alike(
    arguments: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments("Zephyr, TinyLlama", *TOOLS)
    config = load_run_config(given)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    (finding,) = check_conversations(config, Inputs(tokenizer=tokenizer))
    assert (finding.status, finding.subject) == ("failed", "chat template")
    with pytest.raises(SystemExit, match="2"):
        verl_rc_command(["explain", *given])
    captured = capsys.readouterr()
    assert captured.out == ""

    def no_ray(*_: Any) -> "Future[None]":
        raise AssertionError("Ray was started")

    monkeypatch.setattr("verl_rc.trainer.cluster.ray_session.start_ray_in_background", no_ray)
    with pytest.raises(ConfigError) as raised:
        main_ppo._train(config)
    assert LOST in finding.found
    assert LOST in captured.err
    assert LOST in str(raised.value)


def test_doctor_and_explain_say_what_the_template_can_do(
    arguments: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments("Qwen3", *TOOLS)
    config = load_run_config(given)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    assert [finding.status for finding in check_conversations(config, Inputs(tokenizer=tokenizer))] == ["ok"]
    assert verl_rc_command(["explain", *given]) == 0
    assert capsys.readouterr().out.endswith(
        "Chat template\n  tried: it goes on behind the policy's turns with what answers them\n"
    )
    away = [*given, "actor_rollout_ref.model.path=someone/model"]
    assert verl_rc_command(["explain", *away]) == 0
    assert "not tried: someone/model is no folder here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "opening", "restart", "closed"),
    [
        ("/no_think", None, None, True),
        ("x", None, None, False),
        ("x", "/no_think", None, True),
        ("/no_think", "x", None, False),
        ("/no_think", "x", "/no_think", True),
    ],
)
def test_what_follows_a_turn_belongs_to_the_conversation_that_the_turn_ended(
    prompt: str, opening: str | None, restart: str | None, closed: bool, tmp_path: Path
) -> None:
    """SmolLM3's system message sets the mode of every turn; a reply may begin another conversation."""
    tokenizer = load_tokenizer(str(PUBLISHED_TEMPLATES["SmolLM3"].save(tmp_path)))

    def messages(system: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": "1"}]

    episode = Episode(
        (0, 0, 0), {"prompt": messages(prompt)}, 0, None if opening is None else Opening(messages(opening))
    )
    answer = Reply([{"role": "user", "content": "2"}])
    replies = [answer] if restart is None else [answer, Reply(opening=Opening(messages(restart))), answer]
    conversations = Conversations(tokenizer, hosts=None, template_arguments={})  # type: ignore[arg-type]
    tokens = conversations._encoder_behind(episode, replies).encode(answer.messages)
    assert tokenizer.decode(tokens).endswith("<think>\n\n</think>\n") == closed
