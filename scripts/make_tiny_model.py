"""Make a small, untrained language model from nothing: a Hugging Face folder that transformers and vLLM load.

The model has Qwen2's architecture, Qwen3's with experts (--experts), or that of a model that reads pictures
(--vision). Its tokenizer maps every byte to one
token, so any text can be written. Its chat template puts an equals sign between a question and its answer:
"4071835926=" is answered by "0123456789" and the end token.

Example: python scripts/make_tiny_model.py --output_dir models/tiny
"""

import argparse
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_rc.config.paths import output_folder

# Qwen2's own names: transformers would add a token to the vocabulary if "<|endoftext|>" were missing.
END_TOKEN, PAD_TOKEN = "<|im_end|>", "<|endoftext|>"
PATCH = 14
"""Pixels of a patch in each direction."""
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ "
    "eos_token }}{%- else -%}{{ message['content'] }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt "
    "-%}={%- endif -%}"
)
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CONTENT = "message['content']"
_PARTS = (
    f"{{%- if {_CONTENT} is string -%}}{{{{ {_CONTENT} }}}}{{%- else -%}}{{%- for part in {_CONTENT} -%}}"
    "{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}"
    "{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
)
IMAGE_TEMPLATE = CHAT_TEMPLATE.replace(f"{{{{ {_CONTENT} }}}}", _PARTS)
"""The same for contents that may be lists of texts and pictures."""


def build_tokenizer(max_length: int, vision: bool = False) -> PreTrainedTokenizerFast:
    """One token per byte, plus an end and a padding token, and with ``vision`` those around pictures.

    It is a byte-level BPE without merges. transformers replaces normalizer and pre-tokenizer of a Qwen2
    folder by Qwen2's own when it is loaded through ``AutoTokenizer``: Unicode's NFC here as there, and
    without merges both cut text alike.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in (END_TOKEN, PAD_TOKEN, *(IMAGE_TOKENS if vision else ()))
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=IMAGE_TEMPLATE if vision else CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_model(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A randomly initialised model in fp32; equal seeds give equal weights."""
    torch.manual_seed(options.seed)
    shared = {
        "vocab_size": len(tokenizer),
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "max_position_embeddings": options.max_length,
        "tie_word_embeddings": options.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": torch.float32,
    }
    if options.vision:
        return vision_model(options, tokenizer, shared)
    if not options.experts:
        return Qwen2ForCausalLM(Qwen2Config(**shared))
    experts = {
        "num_experts": options.experts,
        "num_experts_per_tok": options.experts_per_token,
        "moe_intermediate_size": options.intermediate_size,
        "norm_topk_prob": True,
        "head_dim": options.hidden_size // options.num_heads,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts))


def vision_model(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, text: dict[str, Any]
) -> PreTrainedModel:
    """The same with a tower, half as wide, that makes a token of 28 x 28 pixels."""
    head_dim = options.hidden_size // options.num_heads
    third = head_dim // 2 // 3
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [head_dim // 2 - 2 * third, third, third],
    }
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    tower = {
        "depth": 2,
        "hidden_size": options.hidden_size // 2,
        "intermediate_size": options.hidden_size,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": options.hidden_size,
    }
    ids = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    if options.vision == "qwen2_5_vl":
        tower |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    else:
        text["rope_parameters"]["mrope_interleaved"], text["head_dim"] = True, head_dim
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model(
        options.vision,
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=options.tie_word_embeddings,
        **ids,
    )
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    return model.float()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument("--num_layers", type=int, default=3, help="transformer blocks")
    parser.add_argument("--hidden_size", type=int, default=192, help="width of the residual stream")
    parser.add_argument("--num_heads", type=int, default=4, help="query heads; must divide --hidden_size")
    parser.add_argument(
        "--num_kv_heads", type=int, default=2, help="key and value heads; must divide --num_heads"
    )
    parser.add_argument(
        "--intermediate_size", type=int, default=512, help="width of the MLP, or of each expert"
    )
    parser.add_argument("--experts", type=int, default=0, help="experts in each block; 0: a dense model")
    parser.add_argument("--experts_per_token", type=int, default=2, help="experts that a token takes")
    parser.add_argument("--vision", choices=PROCESSORS, help="family of a model that reads pictures")
    parser.add_argument("--max_length", type=int, default=1024, help="longest sequence, tokens")
    parser.add_argument(
        "--tie_word_embeddings",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share input and output embeddings, as most small models do",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights")
    options = parser.parse_args(arguments)
    if options.hidden_size % options.num_heads or options.num_heads % options.num_kv_heads:
        parser.error(
            "--num_heads must divide --hidden_size and --num_kv_heads must divide --num_heads, got "
            f"{options.hidden_size}, {options.num_heads}, {options.num_kv_heads}."
        )
    if options.experts and not 0 < options.experts_per_token < options.experts:
        parser.error(
            "--experts_per_token must be at least 1 and below --experts, got "
            f"{options.experts_per_token} of {options.experts}."
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    """Build tokenizer and model and write the folder."""
    options = parse_arguments(arguments)
    tokenizer = build_tokenizer(options.max_length, bool(options.vision))
    model = build_model(options, tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    if options.vision:
        # A processor's own save_pretrained needs torchvision.
        size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 64 * (2 * PATCH) ** 2}
        images = Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=2)
        images._processor_class = PROCESSORS[options.vision]
        images.save_pretrained(options.output_dir)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.output_dir}: {parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
