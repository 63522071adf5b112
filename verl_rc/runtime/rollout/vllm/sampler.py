"""vLLM: a sampler for the step loop, whose weights and memory the engine asks for."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from verl_rc.records.image_reader import ImageReader
from verl_rc.records.parts import UNKNOWN, Part, Sample, context, num_since_sampled, num_tokens
from verl_rc.runtime.distributed.process_group import serve_store
from verl_rc.runtime.rollout.conversation import AnsweredSample, Conversations
from verl_rc.runtime.rollout.engine import EngineFacts, MemoryTag
from verl_rc.runtime.rollout.open_request import OpenRequest
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions, next_seed
from verl_rc.runtime.rollout.vllm import engine_worker, receiver
from verl_rc.runtime.rollout.vllm.adapters import REQUEST, adapter_arguments
from verl_rc.runtime.rollout.vllm.fp8_products import require_fp8_cache
from verl_rc.runtime.rollout.vllm.llm import build_llm, release_shared_memory
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.rollout.vllm.output import expert_lists, parts_of_output
from verl_rc.runtime.rollout.vllm.picture_input import picture_input
from verl_rc.runtime.rollout.vllm.supports import supports
from verl_rc.runtime.rollout.vllm.top_tokens import ReportedTokens
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle


@dataclass(frozen=True)
class _Decoding:
    """What the sampler knows of a request while vLLM decodes it."""

    internal_id: str
    """vLLM's own name of it."""
    first_version: int
    """Version of the weights when it began."""
    num_top_tokens: int
    """Most likely tokens that vLLM reports beside each sampled token."""
    num_unrecorded: int
    """Positions of its context whose experts come with its first token; 0 where experts are not recorded."""


class VllmSampler:
    """The one object that holds vLLM's ``LLM``; only the thread of the step loop touches it."""

    def __init__(self, options: VllmOptions) -> None:
        """Build vLLM; weights come with the first update. Raises ``ValueError`` for a cache in fp8 that this
        CPU cannot have."""
        if current_platform.is_cpu() and options.arguments.get("kv_cache_dtype", "auto") != "auto":
            require_fp8_cache()
        self.version = UNKNOWN
        """Version of the weights that the engine holds."""
        self._reuses_cache = options.on_update == "keep"
        self._adapter = REQUEST if options.adapter_rank else None
        """The adapter of every request."""
        self._conversations = (
            None if options.conversation is None else Conversations.from_options(options.conversation)
        )
        limits = options.pixel_limits
        self._images = None if limits is None else ImageReader(options.model_path, limits)
        self._store = options.node and serve_store(options.node.host, options.node.port)
        """Where the workers of several nodes meet."""
        self._llm = build_llm(options, **sampler_arguments(options))
        release_shared_memory(self._llm)
        # vLLM would queue further requests itself, and a later one with priority could not overtake them.
        self.capacity: int = self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        self._vocabulary_size: int = self._llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def begin(self, opened: OpenRequest) -> "Future[AnsweredSample] | None":
        """See ``Sampler``; raises ``ValueError`` when the sample does not fit the model's length."""
        reply = opened.begin(self._conversations)
        if reply is not None:
            return reply
        request, options, so_far = opened.request.request, opened.request.options, opened.sample
        # The salt keeps a prompt from cached blocks that older weights computed.
        salt = str(self.version) if self._reuses_cache else None
        token_ids = context(request.prompt_token_ids, so_far.parts)
        parameters = sampling_parameters(request, options, so_far, self._vocabulary_size)
        num_unrecorded = 0
        if options.records_experts:
            num_unrecorded = num_since_sampled(request.prompt_token_ids, so_far.parts)
            parameters.routed_experts_prompt_start = len(token_ids) - num_unrecorded
        given = tokens_input(token_ids, cache_salt=salt)
        if request.pictures is not None:
            assert self._images is not None
            given = picture_input(self._images, token_ids, request.pictures, self.version, salt)
            opened.sample = replace(so_far, pictures=request.pictures.number)
        internal_id = self._llm.llm_engine.add_request(
            str(opened.key), given, parameters, lora_request=self._adapter
        )
        opened.decoding = _Decoding(internal_id, self.version, parameters.logprobs or 0, num_unrecorded)
        return None

    def step(
        self, running: Mapping[int, OpenRequest]
    ) -> "list[tuple[OpenRequest, Sample | Exception | Future[AnsweredSample]]]":
        """See ``Sampler``. An error in vLLM's output takes the place of the sample."""
        ended: list[tuple[OpenRequest, Sample | Exception | Future[AnsweredSample]]] = []
        for request_output in self._llm.llm_engine.step():
            if not request_output.finished:
                continue
            opened, output = running[int(request_output.request_id)], request_output.outputs[0]
            try:
                parts = self._parts(opened, output)
            except (ValueError, RuntimeError) as error:
                opened.close(self._conversations)
                ended.append((opened, error))
            else:  # the other reason is "length"
                stopped = output.finish_reason == "stop"
                ended.append((opened, opened.end_turn(self._conversations, parts, stopped)))
            opened.decoding = None
        return ended

    def cut(self, requests: Sequence[OpenRequest]) -> None:
        """See ``Sampler``. Raises like ``parts_of_output``."""
        samples = [self.so_far(opened) for opened in requests]
        self._abort(requests)
        for opened, sample in zip(requests, samples, strict=True):
            opened.sample = sample

    def drop(self, requests: Sequence[OpenRequest]) -> None:
        """See ``Sampler``."""
        self._abort(requests)
        for opened in requests:
            opened.close(self._conversations)

    def _abort(self, requests: Sequence[OpenRequest]) -> None:
        """Take requests out of vLLM, whether they are in it or not."""
        decoding = [opened for opened in requests if opened.decoding is not None]
        self._llm.llm_engine.abort_request([str(opened.key) for opened in decoding])
        for opened in decoding:
            opened.decoding = None

    def so_far(self, opened: OpenRequest) -> Sample:
        """See ``Sampler``. Raises like ``parts_of_output``."""
        if opened.decoding is None:
            return opened.sample
        # vLLM's asynchronous engine makes the same output when it aborts a request.
        state = self._llm.llm_engine.output_processor.request_states[opened.decoding.internal_id]
        output = state.make_request_output([], None, FinishReason.ABORT, None)
        assert output is not None
        return opened.extended(self._parts(opened, output.outputs[0]))

    def _parts(self, opened: OpenRequest, output: Any) -> list[Part]:
        decoding: _Decoding = opened.decoding
        number, options, columns = opened.request.number, opened.request.options, {}
        if decoding.num_top_tokens:
            top = ReportedTokens.from_output(
                output.token_ids, output.logprobs, number, decoding.num_top_tokens
            )
            if limit := min(options.max_support, self._vocabulary_size):
                columns["support"] = supports(output.token_ids, top, number, limit, self._vocabulary_size)
            if options.head_tokens:
                columns["head"] = top.heads(options.head_tokens, number)
        if decoding.num_unrecorded and output.token_ids:
            columns["experts"] = expert_lists(
                output.routed_experts, decoding.num_unrecorded, len(output.token_ids), number
            )
        return parts_of_output(output, (decoding.first_version, self.version), number, columns)

    def weight_receiver(self) -> receiver.WeightReceiver:
        """The receiver of weight updates; it is in this process only without tensor parallelism."""
        engine = self._llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
        assert isinstance(engine, receiver.WeightReceiver)
        return engine

    def join_transfer(self, address: receiver.ReceiverAddress) -> None:
        """Let every worker join the transfer group."""
        self._llm.init_weight_transfer_engine({"init_info": vars(address)})

    def begin_update(self) -> None:
        """Make the model loadable."""
        self._llm.start_weight_update()

    def load(self, source: tuple[Manifest, int] | list[receiver.Bucket] | BucketHandle) -> None:
        """Load from the ``source`` of a ``receiver.ReceiveRequest``."""
        self._llm.update_weights({"update_info": {"source": source}})

    def finish_update(self, version: int) -> None:
        """End a weight update as ``version``."""
        self._llm.finish_weight_update(str(version))
        # After the weights: vLLM forgets adapters when weights are replaced.
        if self._adapter is not None:
            self._llm.collective_rpc("apply_adapter")
        self.version = version
        # The next request must find no blocks of the old weights.
        if not self._reuses_cache:
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes: vLLM keeps those of the old weights over an update."""
        # vLLM returns False, and keeps the cache, while a request still holds blocks of it.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "the engine's prefix cache must be empty after a weight update, but vLLM refused to reset it."
            )

    def receipts(self) -> list[LoadReceipt]:
        """A receipt per worker of the last update."""
        receipts: list[LoadReceipt] = self._llm.collective_rpc("weight_sync_receipt")
        return receipts

    def device_keys(self) -> list[str]:
        """The device of each worker."""
        keys: list[str] = self._llm.collective_rpc("weight_sync_device")
        return keys

    def facts(self) -> EngineFacts:
        """The block size of the KV cache, and the implementation of fp8 products, if a layer has any."""
        fp8_products = self._llm.collective_rpc("fp8_products")[0]
        return EngineFacts(
            self._llm.llm_engine.vllm_config.cache_config.block_size,
            {} if fp8_products is None else {"fp8 products": fp8_products},
        )

    def switch_trace(self, path: Path | None) -> None:
        """Begin or write the trace of every worker."""
        self._llm.collective_rpc("switch_trace", args=(path,))

    def sleep(self) -> None:
        """Free the memory of weights and KV cache."""
        # Level 1 copies the weights to host memory. Without an adapter the next update replaces them.
        self._llm.sleep(level=2 if self._adapter is None else 1)

    def wake_up(self, tags: Sequence[MemoryTag]) -> None:
        """Take memory again."""
        self._llm.wake_up(list(tags))


def sampler_arguments(options: VllmOptions) -> dict[str, Any]:
    """Arguments of vLLM that a sampler needs on every node."""
    return {
        # vLLM's default is raw_logprobs, from before temperature, top-k and top-p. A ratio needs the
        # probability under the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=receiver.BACKEND_NAME),
        "worker_extension_cls": engine_worker.EXTENSION,
        **(adapter_arguments(options.adapter_rank) if options.adapter_rank else {}),
    }


def sampling_parameters(
    request: GenerationRequest, options: SamplingOptions, so_far: Sample, vocabulary_size: int
) -> SamplingParams:
    """vLLM's parameters of a request that continues ``so_far``: its output has token ids and log-probs, no
    text, and comes once, at the end."""
    return SamplingParams(
        seed=next_seed(request.seed, so_far.parts),
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=request.limit(options) - num_tokens(so_far.parts),
        # vLLM's ignore_eos covers the model's EOS, not the tokens listed here.
        stop_token_ids=[] if options.ignore_eos else list(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        # The most likely tokens show which support a filter left, and are the head; greedy sampling has
        # neither. Flat lists of numbers replace vLLM's dict and object for each token, which the garbage
        # collector has to walk.
        logprobs=max(min(options.max_support, vocabulary_size), options.head_tokens)
        if options.temperature > 0
        else 0,
        flat_logprobs=True,
        detokenize=False,
        # The default returns every running request at every step.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
