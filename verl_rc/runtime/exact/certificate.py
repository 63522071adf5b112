"""The certificate: does an engine compute the bits of the trainer, operation by operation?"""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from verl_rc.config.models import model_source
from verl_rc.records.tokenize import load_tokenizer
from verl_rc.runtime.distributed.child_process import ChildProcess, RemoteError
from verl_rc.runtime.distributed.process_group import trainer_device
from verl_rc.runtime.exact import capture, fix_summation_order
from verl_rc.runtime.exact.captured_trainer import ComparedOperation
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.workers.environment import engine_environment, trainer_environment
from verl_rc.runtime.workers.host import usable_cores

_BATCH_SIZES = (1, 7, 64)
_SHARED_ROWS = 16
"""Sequences of the batch behind a shared prefix."""
_RESPONSE_TOKENS = 8
_MAX_TOKENS = 400
"""Longest sequence, tokens."""
_PREFIX_TOKENS = 300
"""Longer than a block of the engine's KV cache."""
_KINDS = {
    "embedding": (capture.EMBEDDING,),
    "sum with residual": (capture.RESIDUAL,),
    "norm": ("norm",),
    "linear": (capture.QKV, capture.OUTPUT, capture.GATE_UP, capture.DOWN),
    "rotary": (capture.ROTARY,),
    "attention": (capture.ATTENTION,),
    "activation": (capture.ACTIVATION,),
    "head": (capture.HEAD,),
    "log-softmax": (capture.LOG_PROBS,),
}
"""Kinds of operations, and the suffixes of their names."""


@dataclass(frozen=True)
class Certificate:
    """The comparison of engine and trainer."""

    operations: Mapping[str, Sequence[ComparedOperation]]
    """Operations of each batch, in the order of computation."""
    cached_tokens: int
    """Tokens of prompts that the engine took from its prefix cache."""

    @property
    def is_exact(self) -> bool:
        """Whether operations were compared, also behind the prefix cache, and all are equal."""
        differences = [operation.different_rows for _, operation in self._with_batches()]
        return self.cached_tokens > 0 and bool(differences) and not any(differences)

    def _with_batches(self) -> list[tuple[str, ComparedOperation]]:
        return [(batch, operation) for batch, compared in self.operations.items() for operation in compared]

    def lines(self) -> Iterator[str]:
        """A line for each kind of operation, then the verdict."""
        operations = self._with_batches()
        yield f"{'operation':18} {'prefill':>10} {'decoding':>10}   first that differs"
        for kind, suffixes in _KINDS.items():
            compared = [
                (batch, operation) for batch, operation in operations if operation.name.endswith(suffixes)
            ]
            prefill, decoding = (
                _largest_difference([operation for _, operation in compared if operation.decoding is phase])
                for phase in (False, True)
            )
            yield f"{kind:18} {prefill:>10} {decoding:>10}   {_first_difference(compared)}".rstrip()
        rows = sum(operation.rows for _, operation in operations)
        batches = ", ".join(self.operations)
        yield f"{rows:,} rows of numbers, batches of {batches} ({self.cached_tokens:,} tokens)"
        if first := _first_difference(operations):
            yield f"not exact; the first operation that differs is {first}"
        elif not self.is_exact:
            yield "not shown: no prefix came from the cache"
        else:
            yield "exact: engine and trainer agree to the last bit"


def certify(model: str, dtype: str, prompts: Path | None = None, exact: bool = True) -> Certificate:
    """Sample with an engine, score with the trainer, and compare operation by operation; on a GPU if there is
    one.

    ``prompts``: a text file with a prompt in each line. None means random tokens. ``exact``: with the
    operations of exact mode, else with those of an ordinary run. Raises ``ValueError`` for a file without
    prompts, and where a side cannot compute.
    """
    config = AutoConfig.from_pretrained(model_source(model)).get_text_config()
    max_tokens = min(_MAX_TOKENS, config.max_position_embeddings)
    token_ids = _random_prompts(config.vocab_size) if prompts is None else _read_prompts(model, prompts)
    token_ids = [ids[: max_tokens - _RESPONSE_TOKENS] for ids in token_ids]
    batches = {str(size): [token_ids[row % len(token_ids)] for row in range(size)] for size in _BATCH_SIZES}
    prefix_tokens = min(_PREFIX_TOKENS, max_tokens - _RESPONSE_TOKENS - 2)
    prefix = (max(token_ids, key=len) * prefix_tokens)[:prefix_tokens]
    behind_prefix = [[*prefix[: len(prefix) - row], token_ids[0][0]] for row in range(_SHARED_ROWS)]
    device = trainer_device("auto").type
    arguments = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "skip_tokenizer_init": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 1 << 15,
        "distributed_executor_backend": "uni",
        **({"gpu_memory_utilization": 0.05} if device == "cuda" else {}),  # else nearly all must be free
    }
    options = VllmOptions(model_source(model), dtype, max_tokens, arguments, exact=exact)
    if exact:
        fix_summation_order(device)
    cores = usable_cores()
    operations = {}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/engine.pt"
        engine = ChildProcess(
            "verl_rc.runtime.exact.captured_engine:CapturingEngine",
            engine_environment(cores, device, one_node=True),
            wait=False,
            options=options,
        )
        trainer = ChildProcess(
            "verl_rc.runtime.exact.captured_trainer:CapturedTrainer",
            trainer_environment(cores, one_node=True),
            wait=False,
            model_path=model_source(model),
            dtype=dtype,
            exact=exact,
        )
        try:
            engine.answer()
            trainer.answer()
            for name, batch in batches.items():
                engine.call("sample", batch, _RESPONSE_TOKENS, file)
                operations[name] = trainer.call("compare", batch, file)
            engine.call("sample", behind_prefix[:1], _RESPONSE_TOKENS, file)  # fills the cache
            cached_tokens = engine.call("sample", behind_prefix, _RESPONSE_TOKENS, file)
            operations[f"{_SHARED_ROWS} with a prefix from the cache"] = trainer.call(
                "compare", behind_prefix, file
            )
        except RemoteError as error:
            raise ValueError(str(error).strip().rpartition("\n")[2]) from error
        finally:
            engine.end()
            trainer.end()
    return Certificate(operations, cached_tokens)


def _random_prompts(vocab_size: int) -> list[list[int]]:
    generator = random.Random(0)
    return [
        [generator.randrange(vocab_size) for _ in range(5 + row % 19)] for row in range(max(_BATCH_SIZES))
    ]


def _read_prompts(model: str, file: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    lines = file.read_text(encoding="utf-8").splitlines()
    prompts = [ids for line in lines if line.strip() and (ids := tokenizer.encode(line))]
    if not prompts:
        raise ValueError(f"--prompts must be a file with a prompt in each line, got none in {file}")
    return prompts


def _largest_difference(operations: Sequence[ComparedOperation]) -> str:
    if not any(operation.different_rows for operation in operations):
        return "equal" if operations else "-"
    # max() would pass over NaN
    sizes = torch.tensor([operation.largest_difference for operation in operations], dtype=torch.float64)
    return f"{float(sizes.max()):.1e}"


def _first_difference(operations: Sequence[tuple[str, ComparedOperation]]) -> str:
    """The place of the first difference of the first operation that differs; empty where none does."""
    for batch, operation in operations:
        if operation.first_difference is not None:
            sequence, position = operation.first_difference
            phase = "decoding" if operation.decoding else "prefill"
            return f"{operation.name}, batch of {batch}, {phase}, sequence {sequence}, position {position}"
    return ""
