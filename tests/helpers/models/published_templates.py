"""Chat templates of published models, each written down anew by its rules, with a tokenizer of its tokens.

The rules are those that decide what the text of a conversation is: which roles there are and in which order,
what is left out, rewritten or added, what ends a turn. Texts that a template adds (default system messages,
instructions for tools, dates) are a word here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from make_tiny_model import build_tokenizer
from tokenizers import AddedToken


@dataclass(frozen=True)
class PublishedTemplate:
    """The rules of a model's template, with its stop tokens."""

    template: str
    stops: Sequence[str]
    """The tokenizer's EOS token, then the others of ``generation_config.json``."""
    others: Sequence[str] = ()
    """Special tokens that end no response."""

    def save(self, folder: Path) -> Path:
        """Write a folder with tokenizer, template and ``generation_config.json``: a token for each byte, and
        the special ones."""
        tokenizer = build_tokenizer(1024)
        tokens = [AddedToken(token, special=True, normalized=False) for token in (*self.stops, *self.others)]
        tokenizer.add_tokens(tokens)
        tokenizer.eos_token = self.stops[0]
        tokenizer.chat_template = "".join(line.strip() for line in self.template.splitlines())
        tokenizer.save_pretrained(folder)
        ids = tokenizer.convert_tokens_to_ids(list(self.stops))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
        return folder


_ALTERNATE = r"""
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
"""

_QWEN_SYSTEM = r"""
{% set system = messages[0].content if messages[0].role == 'system' else default %}
{% if system or tools %}
  {{ '<|im_start|>system\n' + system }}
  {% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}
  {{ '<|im_end|>\n' }}
{% endif %}
"""
# Answers of tools that follow each other share a block of the user.
_QWEN_TOOL = r"""
{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
"""
_CHATML = r"""
{% elif m.role != 'system' or not loop.first %}
  {{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{% endif %}
"""
_QWEN = (
    _QWEN_SYSTEM
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + _QWEN_TOOL
    + _CHATML
    + r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Thinking of turns before the user's last question is left out; later turns keep it, and the last message has
# an empty block if it has none.
_QWEN3 = (
    "{% set default = '' %}"
    + _QWEN_SYSTEM
    + r"""
{% set ns = namespace(question=-1) %}
{% for m in messages %}
  {% if m.role == 'user' and not m.content.startswith('<tool_response>') %}
    {% set ns.question = loop.index0 %}
  {% endif %}
{% endfor %}
{% for m in messages %}
  {% if m.role == 'tool' %}"""
    + _QWEN_TOOL
    + r"""
  {% elif m.role == 'assistant' %}
    {% set parts = m.content.split('</think>') %}
    {% set thoughts = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}
    {{ '<|im_start|>assistant\n' }}
    {% if loop.index0 > ns.question and (loop.last or thoughts) %}
      {{ '<think>\n' + thoughts + '\n</think>\n\n' }}
    {% endif %}
    {{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}"""
    + _CHATML
    + r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + OPENING }}{% endif %}"
)
_EMPTY_THOUGHTS = r"('<think>\n\n</think>\n\n' if enable_thinking is false else '')"

# The date is in the system block; answers of tools are written as JSON, texts too.
_LLAMA3 = r"""
{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ndate\n\n' }}
{{ (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}
{% for m in messages %}
  {% if m.role == 'tool' %}
    {{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
  {% elif m.role != 'system' or not loop.first %}
    {{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# System message and tools belong to the user's last message; answers need the id of their call.
_MISTRAL = r"""
{{ '<s>' }}
{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{% set ns = namespace(expected='user', last=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% for m in messages %}
  {% if m.role == 'user' or m.role == 'assistant' %}
    {% if m.role != ns.expected %}{{ raise_exception('roles must alternate') }}{% endif %}
    {% set ns.expected = 'assistant' if m.role == 'user' else 'user' %}
  {% endif %}
  {% if m.role == 'user' %}
    {% if tools and loop.index0 == ns.last %}
      {{ '[AVAILABLE_TOOLS]' + S + tools | tojson + '[/AVAILABLE_TOOLS]' }}
    {% endif %}
    {{ '[INST]' + S + (system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
  {% elif m.role == 'assistant' %}{{ S + m.content + '</s>' }}
  {% elif m.role == 'tool' %}
    {% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
      {{ raise_exception('an id has 9 letters') }}
    {% endif %}
    {{ '[TOOL_RESULTS]' + S + '{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}
    {{ '[/TOOL_RESULTS]' }}
  {% elif not loop.first %}{{ raise_exception('no such role') }}
  {% endif %}
{% endfor %}
"""

_GEMMA_TURN = (
    _ALTERNATE
    + r"""
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{ (system if loop.first else '') + (m.content | trim) + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
)
_GEMMA2 = (
    "{{ '<bos>' }}{% set system = '' %}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}" + _GEMMA_TURN
)
# The system message is the beginning of the user's first message.
_GEMMA3 = (
    r"{{ '<bos>' }}{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}" + _GEMMA_TURN
)

_PHI4 = r"""
{% for m in messages %}
  {% if m.role in ('system', 'user', 'assistant') %}
    {{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""

# Thinking is cut off every turn, also the last; the last system message is the first text; answers of tools
# share a block, which the next turn continues, and only the first block of a conversation is opened.
_DEEPSEEK_R1 = r"""
{% set ns = namespace(system='', tool=false, first=true) %}
{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}
{{ '<|begin|>' + ns.system }}
{% for m in messages %}
  {% if m.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + m.content }}
  {% elif m.role == 'assistant' %}
    {% if ns.tool %}{{ '<|outputs_end|>' + m.content + '<|end|>' }}
    {% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
    {% endif %}
    {% set ns.tool = false %}
  {% elif m.role == 'tool' %}
    {{ ('<|outputs_begin|>' if ns.first else '\n') + '<|output_begin|>' + m.content + '<|output_end|>' }}
    {% set ns.tool = true %}
    {% set ns.first = false %}
  {% endif %}
{% endfor %}
{% if ns.tool %}{{ '<|outputs_end|>' }}
{% elif add_generation_prompt %}{{ '<|Assistant|><think>\n' }}
{% endif %}
"""

# An earlier turn ends with a token that ends no response; a tool's answer needs a call with a name before it.
_GPT_OSS = r"""
{{ '<|start|>system<|message|>date<|end|>' }}
{% set ns = namespace(call=none) %}
{% for m in messages %}
  {% if m.role == 'system' %}
    {% if loop.first %}{{ '<|start|>developer<|message|>' + m.content + '<|end|>' }}{% endif %}
  {% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
  {% elif m.role == 'assistant' %}
    {% set ns.call = m.tool_calls[0].function.name if m.tool_calls else none %}
    {{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
  {% elif m.role == 'tool' %}
    {% if ns.call is none %}{{ raise_exception('a tool answers a call of the assistant') }}{% endif %}
    {{ '<|start|>functions.' + ns.call + '<|message|>' + m.content | tojson + '<|end|>' }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""

_SMOLLM2 = r"""
{% if messages[0].role != 'system' %}{{ '<|im_start|>system\ndefault<|im_end|>\n' }}{% endif %}
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# A switch in the system message, which is not rendered itself, turns thinking off: turns then begin with an
# empty block. Answers of tools are messages of the user.
_SMOLLM3 = r"""
{% set system = messages[0].content if messages[0].role == 'system' else '' %}
{% set opening = '<think>\n\n</think>\n' if '/no_think' in system or enable_thinking is false else '' %}
{{ '<|im_start|>system\ndate\n' + system.replace('/no_think', '').replace('/think', '').rstrip() }}
{{ '<|im_end|>\n' }}
{% for m in messages %}
  {% if m.role in ('user', 'tool') %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
  {% elif m.role == 'assistant' %}
    {{ '<|im_start|>assistant\n' + opening + m.content.lstrip('\n') + '<|im_end|>\n' }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + opening }}{% endif %}
"""

_ZEPHYR = r"""
{% for m in messages %}
  {% if m.role in ('user', 'system', 'assistant') %}
    {{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}
  {% endif %}
  {% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
{% endfor %}
"""

_QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
_QWEN_OTHERS = ("<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA_STOPS = ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
_LLAMA_OTHERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_INST = ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL_OTHERS = (*_INST, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_GEMMA_STOPS, _GEMMA_OTHERS = ("<eos>", "<end_of_turn>"), ("<bos>", "<start_of_turn>")
_OUTPUTS = ("<|outputs_begin|>", "<|outputs_end|>", "<|output_begin|>", "<|output_end|>")
_DEEPSEEK_OTHERS = ("<|begin|>", "<|User|>", "<|Assistant|>", *_OUTPUTS)
_GPT_OSS_STOPS = ("<|return|>", "<|endoftext|>", "<|call|>")
_GPT_OSS_OTHERS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>")
PUBLISHED_TEMPLATES = {
    "Qwen2.5": PublishedTemplate("{% set default = 'default' %}" + _QWEN, _QWEN_STOPS, _QWEN_OTHERS),
    "Qwen3": PublishedTemplate(_QWEN3.replace("OPENING", _EMPTY_THOUGHTS), _QWEN_STOPS, _QWEN_OTHERS),
    "Qwen3 Instruct 2507": PublishedTemplate("{% set default = '' %}" + _QWEN, _QWEN_STOPS, _QWEN_OTHERS),
    "Qwen3 Thinking 2507": PublishedTemplate(
        _QWEN3.replace("OPENING", r"'<think>\n'"), _QWEN_STOPS, _QWEN_OTHERS
    ),
    "Llama 3.1, 3.2": PublishedTemplate(_LLAMA3, _LLAMA_STOPS, _LLAMA_OTHERS),
    "Mistral v0.3": PublishedTemplate("{% set S = ' ' %}" + _MISTRAL, ("</s>",), _MISTRAL_OTHERS),
    "Mistral Nemo": PublishedTemplate("{% set S = '' %}" + _MISTRAL, ("</s>",), _MISTRAL_OTHERS),
    "Gemma 2": PublishedTemplate(_GEMMA2, _GEMMA_STOPS, _GEMMA_OTHERS),
    "Gemma 3": PublishedTemplate(_GEMMA3, _GEMMA_STOPS, _GEMMA_OTHERS),
    "Phi-4": PublishedTemplate(_PHI4, ("<|im_end|>",), ("<|im_start|>", "<|im_sep|>")),
    "DeepSeek-R1 distilled": PublishedTemplate(_DEEPSEEK_R1, ("<|end|>",), _DEEPSEEK_OTHERS),
    "gpt-oss": PublishedTemplate(_GPT_OSS, _GPT_OSS_STOPS, _GPT_OSS_OTHERS),
    "SmolLM2": PublishedTemplate(_SMOLLM2, ("<|im_end|>",), ("<|im_start|>",)),
    "SmolLM3": PublishedTemplate(_SMOLLM3, ("<|im_end|>",), ("<|im_start|>",)),
    "Zephyr, TinyLlama": PublishedTemplate(_ZEPHYR, ("</s>",)),
}
"""By the models' names."""
