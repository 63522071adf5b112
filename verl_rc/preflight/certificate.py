"""The certificate: does an engine compute what the trainer does, operation by operation, to the last bit?"""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from verl_rc.config.models import model_source
from verl_rc.data.tokenize import load_tokenizer
from verl_rc.distributed.child_process import ChildProcess, RemoteError
from verl_rc.distributed.process_group import trainer_device
from verl_rc.exact import ENGINE_ARGUMENTS, capture, fix_summation_order
from verl_rc.preflight.captured_trainer import Compared
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.workers.environment import engine_environment, trainer_environment
from verl_rc.workers.host import usable_cores

_BATCHES = (1, 7, 64)
_NUM_TOKENS = 8
"""Sampled in each sequence."""
_LONGEST = 400
_PREFIX = 300
"""Tokens that sequences share: more than a block of the engine's cache has."""
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
"""Kinds of operations, by the ends of their names."""


@dataclass(frozen=True)
class Certificate:
    """What was compared, by batch, each in the order of computation."""

    compared: Mapping[str, Sequence[Compared]]
    cached: int
    """Tokens of prompts that came from the cache of prefixes."""

    @property
    def is_exact(self) -> bool:
        """Whether every operation of every batch was compared and is equal."""
        everything = [one for batch in self.compared.values() for one in batch]
        return self.cached > 0 and bool(everything) and not any(one.different for one in everything)

    def lines(self) -> Iterator[str]:
        """A line for each kind of operation, then the verdict."""
        yield f"{'operation':18} {'prefill':>10} {'decoding':>10}   first that differs"
        for kind, ends in _KINDS.items():
            places = [
                (batch, one)
                for batch, of_batch in self.compared.items()
                for one in of_batch
                if one.name.endswith(ends)
            ]
            phases = [
                _largest([one for _, one in places if one.decodes == decodes]) for decodes in (False, True)
            ]
            first = next((_place(batch, one) for batch, one in places if one.different), "")
            yield f"{kind:18} {phases[0]:>10} {phases[1]:>10}   {first}".rstrip()
        rows = sum(one.rows for batch in self.compared.values() for one in batch)
        batches = ", ".join(self.compared)
        yield f"{rows:,} rows of numbers, batches of {batches} ({self.cached:,} tokens)"
        different = [
            (batch, one) for batch, of_batch in self.compared.items() for one in of_batch if one.different
        ]
        if different:
            yield f"not exact; the first operation that differs is {_place(*different[0])}"
        elif not self.is_exact:
            yield "not shown: no prefix came from the cache"
        else:
            yield "exact: engine and trainer agree to the last bit"


def certify(model: str, dtype: str, prompts: Path | None = None, exact: bool = True) -> Certificate:
    """Sample with an engine and score with the trainer, each in a process, and compare what they computed:
    on a GPU where one is found.

    ``prompts``: a text file with a prompt in each line; None: random tokens. ``exact``: with the operations
    of exact mode, else as a run without it. Raises ``ValueError`` for a file without prompts,
    and where a side cannot compute.
    """
    config = AutoConfig.from_pretrained(model_source(model)).get_text_config()
    longest = min(_LONGEST, config.max_position_embeddings)
    texts = _random_prompts(config.vocab_size) if prompts is None else _read_prompts(model, prompts)
    texts = [tokens[: longest - _NUM_TOKENS] for tokens in texts]
    batches = {str(size): [texts[row % len(texts)] for row in range(size)] for size in _BATCHES}
    prefix = (max(texts, key=len) * _PREFIX)[: min(_PREFIX, longest - _NUM_TOKENS - 2)]
    shared = [[*prefix[: len(prefix) - row], texts[0][0]] for row in range(16)]
    device = trainer_device("auto").type
    arguments = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "skip_tokenizer_init": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 1 << 15,
        "distributed_executor_backend": "uni",
        **({"gpu_memory_utilization": 0.05} if device == "cuda" else {}),  # else nearly all must be free
        **(ENGINE_ARGUMENTS[device] if exact else {}),
    }
    options = VllmOptions(model_source(model), dtype, longest, arguments, exact=exact)
    if exact:
        fix_summation_order(device)
    cores = usable_cores()
    compared = {}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/engine.pt"
        engine = ChildProcess(
            "verl_rc.rollout.vllm.captured:CapturingEngine",
            engine_environment(cores, device, one_node=True),
            wait=False,
            options=options,
        )
        trainer = ChildProcess(
            "verl_rc.preflight.captured_trainer:CapturedTrainer",
            trainer_environment(cores, one_node=True),
            wait=False,
            model_path=model_source(model),
            dtype=dtype,
            exact=exact,
        )
        try:
            engine.answer()
            trainer.answer()
            for name, rows in batches.items():
                engine.call("sample", rows, _NUM_TOKENS, file)
                compared[name] = trainer.call("compare", rows, file)
            engine.call("sample", shared[:1], _NUM_TOKENS, file)  # fills the cache
            cached = engine.call("sample", shared, _NUM_TOKENS, file)
            compared[f"{len(shared)} with a prefix from the cache"] = trainer.call("compare", shared, file)
        except RemoteError as error:
            raise ValueError(str(error).strip().rpartition("\n")[2]) from error
        finally:
            engine.end()
            trainer.end()
    return Certificate(compared, cached)


def _random_prompts(vocabulary: int) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(vocabulary) for _ in range(5 + row % 19)] for row in range(max(_BATCHES))]


def _read_prompts(model: str, file: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    rows = [tokenizer.encode(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not any(rows):
        raise ValueError(f"--prompts must be a file with a prompt in each line, got none in {file}")
    return [row for row in rows if row]


def _largest(compared: Sequence[Compared]) -> str:
    if not compared:
        return "-"
    if not any(one.different for one in compared):
        return "equal"
    # max() would pass over NaN
    return f"{sorted((one.largest for one in compared), key=lambda size: (size != size, size))[-1]:.1e}"


def _place(batch: str, one: Compared) -> str:
    assert one.first is not None
    sequence, position = one.first
    phase = "decoding" if one.decodes else "prefill"
    return f"{one.name}, batch of {batch}, {phase}, sequence {sequence}, position {position}"
