"""What follows a turn under the templates of published models, and templates that are refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from published_templates import PUBLISHED_TEMPLATES, PublishedTemplate

from verl_rc.records.stop_tokens import stop_token_ids
from verl_rc.records.tokenize import (
    ContinuationEncoder,
    encode_messages,
    encode_prompt,
    load_tokenizer,
    read_worked_examples,
)

QUESTION = {"role": "user", "content": "question"}
Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads the tokenizer of a published model, or of a template whose EOS token is ``</s>``."""

    def load_tokenizer_of(name: str) -> Any:
        made = PUBLISHED_TEMPLATES.get(name) or PublishedTemplate(name, ("</s>",))
        return load_tokenizer(str(made.save(tmp_path / str(len(list(tmp_path.iterdir()))))))

    return load_tokenizer_of


def encoder(tokenizer: Any, **arguments: Any) -> ContinuationEncoder:
    return ContinuationEncoder(tokenizer, arguments, stop_token_ids(tokenizer, tokenizer.name_or_path))


def reply(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{'ab'[number]}-{role}"} for number, role in enumerate(roles)]


def following(tokenizer: Any, *roles: str, **arguments: Any) -> str:
    text: str = tokenizer.decode(encoder(tokenizer, **arguments).encode(reply(*roles)))
    return text


def chatml(role: str, text: str, opening: str = "") -> str:
    return f"\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n{opening}"


RESPONSE = "\n<tool_response>\n{}-tool\n</tool_response>"
QWEN = [
    (["user"], "user", "a-user"),
    (["system"], "system", "a-system"),
    (["tool"], "user", RESPONSE.format("a").lstrip()),
    (["tool", "tool"], "user", RESPONSE.format("a").lstrip() + RESPONSE.format("b")),
]
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
LLAMA_TURN = "<|start_header_id|>assistant<|end_header_id|>\n\n"
OUTPUT = "<|output_begin|>{}-tool<|output_end|>"
GEMMA = "\n<start_of_turn>user\na-user<end_of_turn>\n<start_of_turn>model\n"
FOUND = [
    *(("Qwen2.5", roles, chatml(role, text)) for roles, role, text in QWEN),
    *(("Qwen3", roles, chatml(role, text)) for roles, role, text in QWEN),
    *(("Qwen3 Instruct 2507", roles, chatml(role, text)) for roles, role, text in QWEN),
    *(("Qwen3 Thinking 2507", roles, chatml(role, text, "<think>\n")) for roles, role, text in QWEN),
    ("Llama 3.1, 3.2", ["user"], LLAMA.format("user", "a-user") + LLAMA_TURN),
    ("Llama 3.1, 3.2", ["tool"], LLAMA.format("ipython", '"a-tool"') + LLAMA_TURN),
    ("Mistral v0.3", ["user"], "[INST] a-user[/INST]"),
    ("Mistral Nemo", ["user"], "[INST]a-user[/INST]"),
    ("Gemma 2", ["user"], GEMMA),
    ("Gemma 3", ["user"], GEMMA),
    ("Phi-4", ["user"], "<|im_start|>user<|im_sep|>a-user<|im_end|><|im_start|>assistant<|im_sep|>"),
    ("DeepSeek-R1 distilled", ["user"], "<|User|>a-user<|Assistant|><think>\n"),
    (
        "DeepSeek-R1 distilled",
        ["tool", "tool"],
        f"<|outputs_begin|>{OUTPUT.format('a')}\n{OUTPUT.format('b')}<|outputs_end|>",
    ),
    ("SmolLM2", ["user"], chatml("user", "a-user")),
    ("SmolLM2", ["tool"], chatml("tool", "a-tool")),
    ("SmolLM3", ["user"], chatml("user", "a-user")),
    ("SmolLM3", ["tool"], chatml("user", "a-tool")),
    ("Zephyr, TinyLlama", ["user"], "\n<|user|>\na-user</s>\n<|assistant|>\n"),
]


@pytest.mark.parametrize(("name", "roles", "expected"), FOUND)
def test_what_follows_a_turn_is_what_the_template_writes_there(
    name: str, roles: list[str], expected: str, load: Load
) -> None:
    assert following(load(name), *roles) == expected


LOST = "must render a reply after the turns before it, with all that it says, but of a message of the role"
REFUSED = [
    ("Mistral v0.3", "tool", "an id has 9 letters"),
    ("Mistral Nemo", "system", "no such role"),
    ("Gemma 2", "tool", "roles must alternate"),
    ("Gemma 3", "system", "roles must alternate"),
    ("Phi-4", "tool", f"{LOST} 'tool'"),
    ("DeepSeek-R1 distilled", "system", f"{LOST} 'system'"),
    ("gpt-oss", "user", "EOS token or another stop token .*first<.end.>"),
    ("gpt-oss", "tool", "a tool answers a call of the assistant"),
    ("SmolLM3", "system", f"{LOST} 'system'"),
    ("Zephyr, TinyLlama", "tool", f"{LOST} 'tool'"),
]


@pytest.mark.parametrize(("name", "role", "reason"), REFUSED)
def test_a_role_that_the_template_cannot_render_is_refused_with_the_reason(
    name: str, role: str, reason: str, load: Load
) -> None:
    with pytest.raises(ValueError, match=reason):
        encoder(load(name)).require_roles([role])


def test_a_prompt_its_turns_and_what_follows_them_are_the_text_of_the_conversation(load: Load) -> None:
    tokenizer = load("Qwen2.5")
    turn = tokenizer("12<|im_end|>")["input_ids"]
    start, first, second = [QUESTION], reply("tool", "tool"), reply("user")
    behind = encoder(tokenizer).behind
    tokens = encode_prompt(tokenizer, start) + turn + behind(start, []).encode(first) + turn
    tokens += behind(start, [first]).encode(second)
    said = {"role": "assistant", "content": "12"}
    assert tokens == encode_prompt(tokenizer, [*start, said, *first, said, *second])


def test_what_follows_may_depend_on_the_conversation_before_the_turn(load: Load) -> None:
    """SmolLM3's mode is set by the system message, and a later block of answers begins otherwise."""
    smol = load("SmolLM3")
    quiet = [{"role": "system", "content": "be brief /no_think"}, QUESTION]
    closed = "<think>\n\n</think>\n"
    after = encoder(smol).behind(quiet, []).encode(reply("user"))
    assert smol.decode(after) == chatml("user", "a-user", closed)
    deepseek = load("DeepSeek-R1 distilled")
    second = encoder(deepseek).behind([QUESTION], [reply("tool")]).encode(reply("tool"))
    assert deepseek.decode(second) == f"\n{OUTPUT.format('a')}<|outputs_end|>"


def test_arguments_and_tools_reach_the_template(load: Load) -> None:
    closed = "<think>\n\n</think>\n\n"
    assert following(load("Qwen3"), "user", enable_thinking=False) == chatml("user", "a-user", closed)
    mistral = load("Mistral Nemo")
    offered = encoder(mistral).behind([QUESTION], [], [{"type": "function"}]).encode(reply("user"))
    assert mistral.decode(offered) == (
        '[AVAILABLE_TOOLS][{"type": "function"}][/AVAILABLE_TOOLS][INST]a-user[/INST]'
    )


def test_a_field_that_the_template_asks_for_makes_a_role_possible(load: Load) -> None:
    mistral = load("Mistral Nemo")
    answer = {"role": "tool", "content": "7", "tool_call_id": "123456789"}
    assert mistral.decode(encoder(mistral).encode([answer])) == (
        '[TOOL_RESULTS]{"content": 7, "call_id": "123456789"}[/TOOL_RESULTS]'
    )


def made_of(content: str) -> str:
    return "{% for m in messages %}{{ '<' + m.role + '>' }}" + content + "</s>{% endfor %}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content if loop.last else m.content.split('</think>')[-1] }}", "<user>a-user</s>"),
        ("{{ m.content | length if m.role == 'assistant' else m.content }}", "<user>a-user</s>"),
        ("{{ m.content | upper if m.role == 'assistant' else m.content | trim }}", "<user>a-user</s>"),
        ("{{ m.content | tojson }}", '<user>"a-user"</s>'),
        ("{{ m.content }}{{ ' ' if m.role == 'assistant' }}", "<user>a-user</s>"),
    ],
)
def test_the_turn_itself_may_be_rendered_in_any_way(content: str, expected: str, load: Load) -> None:
    assert following(load(made_of(content)), "user") == expected


BEFORE = "{% set before = loop.previtem.content if not loop.first else '' %}"
OWN = "m.role == 'assistant' or loop.first"


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content | upper }}",
        "{{ m.content[:40] }}",
        r"{{ m.content.split('\n')[0] }}",
        r"{{ m.content.split('\n')[-1] }}",
        r"{{ m.content | replace('\n', ' ') }}",
        "{{ m.content | escape }}",
        "{{ m.content | replace('-', '') }}",
        "{{ m.content if m.role == 'assistant' else 'same' }}",
        "{{ m.content if loop.index < 3 else '' }}",
        "{{ m.content if m.role != 'assistant' else 'same' }}",
        BEFORE + "{{ before + m.content }}",
        BEFORE + "{{ m.content if '<tool_call>' in before or " + OWN + " else '' }}",
        BEFORE + "{{ '!' if '</think>' in before }}{{ m.content }}",
        BEFORE + "{{ before | length }}{{ m.content }}",
    ],
)
def test_a_reply_that_is_changed_or_depends_on_the_turn_is_refused(content: str, load: Load) -> None:
    with pytest.raises(ValueError, match="for several turns the chat template must"):
        encoder(load(made_of(content))).require_roles(["user"])


def test_one_answer_of_several_that_is_lost_is_refused(load: Load) -> None:
    last = "{{ m.content if loop.last or m.role != 'tool' else '' }}"
    tried = encoder(load(made_of(last)))
    tried.require_roles(["tool"])
    with pytest.raises(ValueError, match=LOST):
        tried.require_roles(["tool", "tool"])


def test_a_short_answer_is_not_found_in_the_templates_own_text(load: Load) -> None:
    """The answer 's' of a role that is skipped: the tag of the next turn has this letter."""
    skipping = "{% for m in messages if m.role != 'tool' %}{{ m.content }}</s>{% endfor %}<assistant>"
    with pytest.raises(ValueError, match=LOST):
        encoder(load(skipping)).encode([{"role": "tool", "content": "s"}])


def test_a_reply_that_the_template_cuts_is_refused_when_it_comes(load: Load) -> None:
    cutting = encoder(load(made_of("{{ m.content.split('</think>')[-1] }}")))
    cutting.require_roles(["tool"])
    with pytest.raises(ValueError, match=LOST):
        cutting.encode([{"role": "tool", "content": "a</think>b"}])


@pytest.mark.parametrize("stops", [("<eos>",), ("<eos>", "<end_of_turn>")])
def test_every_stop_token_of_the_model_may_end_a_turn(stops: Sequence[str], tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}"
    others = {"<end_of_turn>"} - {*stops}
    tokenizer = load_tokenizer(str(PublishedTemplate(template, stops, tuple(others)).save(tmp_path)))
    if len(stops) == 2:
        assert following(tokenizer, "user") == "a-user<end_of_turn>"
        return
    with pytest.raises(ValueError, match="EOS token or another stop token"):
        following(tokenizer, "user")


@pytest.mark.parametrize("role", ["system", "tool"])
def test_a_prompts_message_that_the_template_leaves_out_is_refused(role: str, load: Load) -> None:
    """Instructions, or what a tool said, would be lost."""
    two_roles = load(
        "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}</s>{% endfor %}"
    )
    with pytest.raises(ValueError, match=rf"every message of a prompt, but leaves out .*'{role}'"):
        encode_prompt(two_roles, [{"role": role, "content": "1"}, QUESTION])


def test_a_prompts_message_may_be_rewritten_as_long_as_it_is_read(load: Load) -> None:
    smol = load("SmolLM3")
    prompt = [{"role": "system", "content": " /no_think"}, {"role": "user", "content": " 1\n"}]
    assert smol.decode(encode_prompt(smol, prompt)) == (
        "<|im_start|>system\ndate\n<|im_end|>\n<|im_start|>user\n 1\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n"
    )
    llama = load("Llama 3.1, 3.2")
    assert "\n\n1<|eot_id|>" in llama.decode(encode_prompt(llama, prompt))


SAID = {"role": "assistant", "content": "<think>\nlong\n</think>\n\nshort"}


def test_thinking_of_earlier_turns_may_be_left_out_of_a_prompt(load: Load) -> None:
    qwen = load("Qwen3")
    assert qwen.decode(encode_messages(qwen, [QUESTION, SAID, QUESTION])) == (
        "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\nshort<|im_end|>\n"
        "<|im_start|>user\nquestion<|im_end|>\n"
    )


def examples(tokenizer: Any, path: Path, *messages: dict[str, str]) -> str:
    path.write_text(json.dumps({"messages": messages}))
    (example,) = read_worked_examples([str(path)], "messages", tokenizer, 999)
    text: str = tokenizer.decode(example.answer_token_ids)
    return text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3", "<think>\nlong\n</think>\n\nshort<|im_end|>\n"),
        ("Qwen3 Thinking 2507", "long\n</think>\n\nshort<|im_end|>\n"),
        ("Gemma 3", "<think>\nlong\n</think>\n\nshort<end_of_turn>\n"),
    ],
)
def test_a_worked_example_learns_its_whole_answer(
    name: str, expected: str, load: Load, tmp_path: Path
) -> None:
    assert examples(load(name), tmp_path / "a.jsonl", QUESTION, SAID) == expected


def test_a_worked_example_whose_thinking_would_be_cut_off_is_refused(load: Load, tmp_path: Path) -> None:
    start = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    cutting = load(made_of("{{ m.content.split('</think>')[-1] }}") + start)
    with pytest.raises(ValueError, match="render the whole answer, but in row 0"):
        examples(cutting, tmp_path / "a.jsonl", QUESTION, SAID)
