"""vLLM as the step loop sees it: a sampler that is stepped by hand."""

from collections.abc import Sequence
from concurrent.futures import Future

from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from verl_rc.data.parts import UNKNOWN, Part, Sample, num_tokens, token_ids
from verl_rc.rollout.conversation import Conversations, OpenSamples
from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, next_seed
from verl_rc.rollout.vllm import engine_worker, receiver
from verl_rc.rollout.vllm.fp8_products import require_fp8_cache
from verl_rc.rollout.vllm.options import EngineOptions
from verl_rc.rollout.vllm.output import parts_of_output
from verl_rc.rollout.vllm.process_cleanup import unlink_shared_memory


class VllmSampler:
    """vLLM as the step loop sees it."""

    def __init__(self, options: EngineOptions) -> None:
        """Build vLLM; weights come with the first update. Raises ``ValueError`` for a cache in fp8 that this
        CPU cannot have."""
        if current_platform.is_cpu() and options.arguments.get("kv_cache_dtype", "auto") != "auto":
            require_fp8_cache()
        self.version = UNKNOWN
        """Version of the weights that the engine holds."""
        self._keeps_cache = options.on_update == "keep"
        self._open = OpenSamples(
            None if options.conversation is None else Conversations.open(options.conversation)
        )
        """Samples without the tokens of the requests in vLLM."""
        self._requests: dict[str, tuple[str, int]] = {}
        """vLLM's own names of the requests in it, and the version of the weights when each began."""
        self.llm = LLM(
            model=options.model_path,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            # vLLM's default is raw_logprobs, from before temperature, top-k and top-p. A ratio needs the
            # probability under the distribution that was sampled from.
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend=receiver.BACKEND_NAME),
            # A name, not the class: with tensor parallelism vLLM imports it in processes of its own.
            worker_extension_cls=f"{engine_worker.__name__}.{engine_worker.EngineWorkerExtension.__name__}",
            **options.arguments,
        )
        # Once the constructor returns, all processes of the engine have mapped what they share.
        self.llm.collective_rpc("unlink_shared_memory")
        unlink_shared_memory()
        # vLLM would queue further requests itself, where a later one with priority could not overtake them.
        self.capacity: int = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    def begin(self, key: str, sample: QueuedSample) -> "Future[list[str]] | None":
        """See ``Sampler``; raises ``ValueError`` when the sample does not fit the model's length."""
        so_far, answers = self._open.begin(key, sample)
        if answers is not None:
            return answers
        request = sample.request
        # With another salt a prompt does not find the blocks that older weights computed.
        salt = str(self.version) if self._keeps_cache else None
        prompt = tokens_input([*request.prompt_token_ids, *token_ids(so_far.parts)], cache_salt=salt)
        parameters = sampling_parameters(request, sample.options, so_far)
        self._requests[key] = self.llm.llm_engine.add_request(key, prompt, parameters), self.version
        return None

    def step(self) -> "list[tuple[str, Sample | Exception | Future[list[str]]]]":
        """See ``Sampler``. What is wrong with vLLM's output takes the place of its sample."""
        ended: list[tuple[str, Sample | Exception | Future[list[str]]]] = []
        for request in self.llm.llm_engine.step():
            if not request.finished:
                continue
            key, output = request.request_id, request.outputs[0]
            _, version = self._requests.pop(key)
            try:
                parts = parts_of_output(output, (version, self.version), self._open[key].number)
            except (ValueError, RuntimeError) as error:
                self._open.drop(key)
                ended.append((key, error))
            else:  # the other reason is "length"
                ended.append((key, self._open.end_turn(key, parts, output.finish_reason == "stop")))
        return ended

    def proceed(self, key: str, answer: Sequence[str]) -> Sample | None:
        """See ``Sampler``: ``answer`` has the tools' answers."""
        return self._open.proceed(key, answer)

    def cut(self, keys: Sequence[str]) -> None:
        """See ``Sampler``. Raises like ``parts_of_output``."""
        for key, parts in {key: self._parts_now(key) for key in keys}.items():
            self._open.grow(key, parts)
        self.llm.llm_engine.abort_request(list(keys))
        for key in keys:
            del self._requests[key]

    def drop(self, keys: Sequence[str]) -> None:
        """See ``Sampler``."""
        self.llm.llm_engine.abort_request([key for key in keys if key in self._requests])
        for key in keys:
            self._requests.pop(key, None)
            self._open.drop(key)

    def so_far(self, key: str) -> Sample | None:
        """See ``Sampler``. Raises like ``parts_of_output``."""
        return self._open.grown(key, self._parts_now(key)) if key in self._requests else self._open.get(key)

    def _parts_now(self, key: str) -> list[Part]:
        """Return what the request that is in vLLM has sampled."""
        # What vLLM itself puts into a queue when it aborts a request of its asynchronous engine; here it has
        # no queue.
        name, version = self._requests[key]
        state = self.llm.llm_engine.output_processor.request_states[name]
        output = state.make_request_output([], None, FinishReason.ABORT, None)
        assert output is not None
        return parts_of_output(output.outputs[0], (version, self.version), self._open[key].number)

    def weight_receiver(self) -> receiver.WeightReceiver:
        """The receiving end of weight updates; only an engine without tensor parallelism has it in this
        process."""
        found = self.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
        assert isinstance(found, receiver.WeightReceiver)
        return found

    def finish_update(self, version: int) -> None:
        """End a weight update as ``version``."""
        self.llm.finish_weight_update(str(version))
        self.version = version


def sampling_parameters(
    request: GenerationRequest, options: SamplingOptions, so_far: Sample
) -> SamplingParams:
    """Sampling parameters of what follows ``so_far``: token ids and log-probs without text, returned at its
    end."""
    return SamplingParams(
        seed=next_seed(request.seed, so_far.parts),
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=request.limit(options) - num_tokens(so_far.parts),
        # vLLM's ignore_eos covers the model's EOS, not the tokens listed here.
        stop_token_ids=[] if options.ignore_eos else list(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        # 0 is the sampled token alone; 1 would add the most likely one. Flat: lists of numbers, where the
        # default builds a dict and an object for each token, which the garbage collector has to walk.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # The default returns every running request at every step.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
