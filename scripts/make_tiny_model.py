"""Make a small, untrained language model from nothing: a Hugging Face folder that transformers and vLLM load.

The model has Qwen2's architecture, or Qwen3's with experts (--experts). Its tokenizer maps every byte to one
token, so any text can be written. Its chat template puts an equals sign between a question and its answer:
"4071835926=" is answered by "0123456789" and the end token.

Example: python scripts/make_tiny_model.py --output_dir models/tiny
"""

import argparse

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from verl_rc.config.paths import output_folder

# Qwen2's own names: transformers would add a token to the vocabulary if "<|endoftext|>" were missing.
END_TOKEN, PAD_TOKEN = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}={{ message['content'] }}{{ "
    "eos_token }}{%- else -%}{{ message['content'] }}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt "
    "-%}={%- endif -%}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """One token per byte, plus an end and a padding token.

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
        [AddedToken(token, special=True, normalized=False) for token in (END_TOKEN, PAD_TOKEN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
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
    tokenizer = build_tokenizer(options.max_length)
    model = build_model(options, tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.output_dir}: {parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
