"""Shapes are those of the loaded model, and every part of the estimate follows from them as worked out by
hand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_update import model_config
from planned_runs import ON_8_GPUS, Given, config_of
from small_models import VOCABULARY, write_small_model
from small_runs import ROOT
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from verl_rc.config.load import load_run_config
from verl_rc.config.verl.migration import arguments_of_script
from verl_rc.plan.driver import MIB, driver_bytes
from verl_rc.plan.memory import (
    ASLEEP_MIB,
    CONTEXT_MIB,
    CUDA_PROCESS_MIB,
    ENGINE_MIB,
    RAY_MIB,
    TRAINER_MIB,
    ModelShape,
    RoleMemory,
    TowerShape,
    checkpoint_bytes,
    choose_gradient_sums,
    estimate_roles,
    gpu_peaks,
    host_bytes,
    model_paths,
)

ACTOR, ROLLOUT, FSDP = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.actor.fsdp_config",
)
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
FULL: Given = {f"{FSDP}.dtype": "float32", f"{ROLLOUT}.dtype": "float32"}
RECOMPUTING: Given = {**FULL, CHECKPOINTING: True}
BIG = ModelShape(
    parameters=1_000_000_000,
    embedding_parameters=200_000_000,
    linear_width_sum=500_000,
    layers=10,
    width=2000,
    vocabulary=100_000,
    positions=4096,
)


def roles_of(given: Given, gpu_bytes: int | None = None) -> dict[str, RoleMemory]:
    config = config_of(given)
    return {
        role.role: role for role in estimate_roles(config, dict.fromkeys(model_paths(config), BIG), gpu_bytes)
    }


def test_a_shape_is_that_of_the_model(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    blocks = [
        part for name, part in model.named_modules() if "layers" in name and hasattr(part, "in_features")
    ]
    assert ModelShape.from_model_folder(str(folder)) == ModelShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=VOCABULARY * 32,  # tied: once
        linear_width_sum=sum(part.in_features + part.out_features for part in blocks),
        layers=2,
        width=32,
        vocabulary=VOCABULARY,
        positions=64,
        key_width=2 * 2 * 8,  # two heads of keys, each as wide as one of the four heads of 32 / 4
    )


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        ModelShape.from_model_folder(str(tmp_path))


def test_an_actor_in_fp32_holds_four_times_its_weights() -> None:
    actor = roles_of(FULL)["actor"]
    assert (actor.weights, actor.gradients, actor.optimizer) == (4_000_000_000, 4_000_000_000, 8_000_000_000)
    assert actor.baseline == TRAINER_MIB * MIB


def test_a_rank_imports_its_libraries_once_for_all_roles() -> None:
    roles = roles_of({**FULL, "critic.enable": True, f"{ACTOR}.use_kl_loss": True})
    libraries = {name: role.baseline // MIB for name, role in roles.items()}
    assert libraries == {"actor": TRAINER_MIB, "critic": 0, "reference": 0, "engine": ENGINE_MIB}


def test_ranks_share_and_gather() -> None:
    given: Given = {**FULL, "trainer.n_gpus_per_node": 2, f"{ROLLOUT}.n_gpus_per_node": 2}
    actor = roles_of(given)["actor"]
    assert actor.processes == 2
    assert (actor.weights, actor.gathered) == (
        2_000_000_000,
        (200_000_000 + 100_000_000) * 4,
    )  # embeddings and one layer
    assert (actor.gradients, actor.optimizer) == (
        4_000_000_000,
        4_000_000_000,
    )  # gradients are whole between micro-batches


def test_a_group_of_ranks_holds_a_whole_copy() -> None:
    given: Given = {
        **FULL,
        "trainer.n_gpus_per_node": 2,
        "trainer.nnodes": 2,
        f"{ACTOR}.fsdp_config.fsdp_size": 2,
    }
    actor = roles_of(given)["actor"]
    assert actor.processes == 4
    assert (actor.weights, actor.optimizer) == (
        2_000_000_000,
        4_000_000_000,
    )  # as on the two ranks of one node
    sharded = roles_of({**given, f"{ACTOR}.fsdp_config.fsdp_size": 4})["actor"]
    assert (sharded.weights, sharded.optimizer) == (1_000_000_000, 2_000_000_000)


def test_activations_grow_with_the_tokens_of_a_micro_batch() -> None:
    base: Given = {**RECOMPUTING, f"{ACTOR}.use_dynamic_bsz": True}
    base |= {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1}
    small, large = (
        roles_of({**base, f"{ACTOR}.ppo_max_token_len_per_gpu": tokens})["actor"].activations
        for tokens in (26, 52)
    )
    assert large == pytest.approx(2 * small, rel=1e-6)
    # 26 tokens x (width 2000 x 4 bytes x 10 checkpoints + one layer of 34 x 2 bytes x 2000), and the logits
    # of 21 predicted tokens: of a prompt of 6 and its four responses of 7, 28 of 34 are
    assert small == 26 * (2000 * 4 * 10 + 2000 * 172) + 21 * 100_000 * 4 * 4
    kept = roles_of(
        {**base, f"{ACTOR}.ppo_max_token_len_per_gpu": 26, CHECKPOINTING: None}
    )  # null: not on a CPU
    assert kept["actor"].activations == 26 * 2000 * 68 * 10 + 21 * 100_000 * 4 * 4


@pytest.mark.parametrize(("checkpointing", "layers"), [(True, 1), (None, 10)])
def test_rows_that_share_a_prompt_gather_its_keys(checkpointing: bool | None, layers: int) -> None:
    """In 68 tokens lie two groups: eight rows of 13 tokens, each with 24 numbers of 4 bytes in each layer."""
    given: Given = {**FULL, CHECKPOINTING: checkpointing, f"{ACTOR}.use_dynamic_bsz": True}
    given |= {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 1}
    config = config_of({**given, f"{ACTOR}.ppo_max_token_len_per_gpu": 68})
    with_keys, without = (
        next(role for role in estimate_roles(config, {"unused": shape}, None) if role.role == "actor")
        for shape in (replace(BIG, key_width=24), BIG)
    )
    assert with_keys.activations - without.activations == 8 * 13 * 24 * 4 * layers


def test_there_is_at_most_one_chunk_of_logits() -> None:
    given: Given = {**RECOMPUTING, "data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 64}
    given |= {f"{ACTOR}.use_dynamic_bsz": True}
    given |= {"data.max_prompt_length": 1000, "data.max_response_length": 1000}
    actor = roles_of({**given, f"{ACTOR}.ppo_max_token_len_per_gpu": 16_000})["actor"]
    assert (
        actor.activations == 16_000 * (2000 * 4 * 10) + 16_000 * 2000 * 172 + (1 << 24) * 4 * 4
    )  # 8,000 x 100,000 are more


def test_a_block_of_logits_takes_a_hundredth_of_a_gpu() -> None:
    """Logits and their gradient, in bf16; the estimate for 80 GiB beside the one for 40."""
    given: Given = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 32_768}
    config = config_of({**ON_8_GPUS, **given})
    large, small = (
        next(
            role
            for role in estimate_roles(config, {"unused": SEVEN}, gibibytes << 30)
            if role.role == "actor"
        )
        for gibibytes in (80, 40)
    )
    assert large.activations - small.activations == pytest.approx((40 << 30) / 100, abs=4)


def test_a_micro_batch_is_never_larger_than_the_mini_batch() -> None:
    given: Given = {**FULL, f"{ACTOR}.use_dynamic_bsz": True}
    sizes = {
        roles_of({**given, f"{ACTOR}.ppo_max_token_len_per_gpu": tokens})["actor"].activations
        for tokens in (1000, 10_000)
    }
    assert len(sizes) == 1


def test_lora_trains_its_adapters_alone() -> None:
    actor = roles_of({**FULL, "actor_rollout_ref.model.lora_rank": 8})["actor"]
    assert actor.weights == 4_000_000_000
    assert actor.optimizer == 2 * 8 * 500_000 * 4


def test_an_engine_holds_its_adapter_twice_the_second_time_with_room_for_rank_8() -> None:
    given: Given = {f"{ROLLOUT}.dtype": "bfloat16", "actor_rollout_ref.model.lora_rank": 3}
    assert roles_of(given)["engine"].weights == 2_000_000_000
    apart = roles_of({**given, "actor_rollout_ref.model.lora.merge": False})["engine"]
    assert apart.weights == 2_000_000_000 + (3 + 8) * 500_000 * 2


def test_roles_that_a_run_has() -> None:
    assert set(roles_of({})) == {"actor", "engine"}
    given: Given = {"algorithm.adv_estimator": "gae", f"{ACTOR}.use_kl_loss": True}
    roles = roles_of(given)
    assert set(roles) == {"actor", "critic", "reference", "engine"}
    assert roles["reference"].optimizer == roles["reference"].gradients == 0
    assert set(roles_of({**given, "actor_rollout_ref.model.lora_rank": 8})) == {"actor", "critic", "engine"}
    teacher = "distillation.teacher_models.teacher_model"
    taught = roles_of({"distillation.enabled": True, f"{teacher}.model_path": "teacher"})["teacher"]
    assert taught.optimizer == taught.gradients == 0
    assert "actor_rollout_ref.ref.fsdp_config.model_dtype" in taught.reducing_keys


def test_an_engine_on_a_cpu_and_on_a_gpu() -> None:
    engine = roles_of({f"{ROLLOUT}.dtype": "bfloat16", f"{ROLLOUT}.kv_cache_megabytes": 64})["engine"]
    assert (engine.weights, engine.cache, engine.baseline) == (2_000_000_000, 64 * MIB, ENGINE_MIB * MIB)
    quantized = roles_of({f"{ROLLOUT}.dtype": "bfloat16", f"{ROLLOUT}.quantization": "fp8_per_channel"})[
        "engine"
    ]
    assert (quantized.weights, quantized.cache) == (200_000_000 * 2 + 800_000_000, 256 * MIB)
    on_gpu = roles_of({f"{ROLLOUT}.gpu_memory_utilization": 0.5}, gpu_bytes=10**11)["engine"]
    assert on_gpu.model == 5 * 10**10


def test_a_head_in_float32_costs_an_engine_on_a_cpu_a_copy_and_a_gpu_wider_logits() -> None:
    """Of the shape's 100,000 words and its width of 2,000."""
    head: Given = {"actor_rollout_ref.model.head_dtype": "float32"}
    for dtype, copies in (("bfloat16", 1), ("float32", 0)):
        given: Given = {f"{ROLLOUT}.dtype": dtype}
        more = roles_of({**given, **head})["engine"].weights - roles_of(given)["engine"].weights
        assert more == copies * 100_000 * 2_000 * 4
    on_gpu: Given = {f"{ROLLOUT}.dtype": "bfloat16", f"{ACTOR}.fsdp_config.dtype": "bfloat16"}
    plain, wide = (roles_of(given, gpu_bytes=10**11) for given in (on_gpu, {**on_gpu, **head}))
    assert wide["engine"].model == plain["engine"].model
    assert wide["actor"].activations >= plain["actor"].activations


@pytest.mark.parametrize(("megabytes", "expected"), [(2048, 4.43), (1024, 2.43)])
def test_an_engine_alone_needs_two_buckets_and_a_layer_beside_its_share(
    megabytes: int, expected: float
) -> None:
    """Of Qwen2.5-7B in bfloat16, whose layer has (7.616 - 1.090) / 28 = 0.233 billion weights."""
    given: Given = {
        f"{ROLLOUT}.gpu_memory_utilization": 0.8,
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": megabytes,
    }
    size, shapes = 80 << 30, {"unused": SEVEN}
    beside = {}
    for shared in (True, False):
        config = config_of({**given, "trainer.device": "cuda", "actor_rollout_ref.hybrid_engine": shared})
        engine = next(role for role in estimate_roles(config, shapes, size) if role.role == "engine")
        beside[shared] = (engine.model - int(0.8 * size)) / (1 << 30)
    assert beside[True] == 0
    assert beside[False] == pytest.approx(expected, abs=0.01)


def test_the_host_holds_everything_on_a_cpu_and_libraries_on_a_gpu() -> None:
    config = config_of(FULL)
    roles = list(roles_of(FULL).values())
    common = driver_bytes(config) + RAY_MIB * MIB
    assert (
        host_bytes(config, roles, on_gpu=False)
        == sum(role.model for role in roles) + common + (TRAINER_MIB + ENGINE_MIB) * MIB
    )
    critic = RoleMemory(
        "critic", 1, weights=10, gathered=2, activations=5
    )  # in the actor's process, after it
    both = host_bytes(config_of({**FULL, **CRITIC}), [*roles, critic], on_gpu=False)
    assert both == host_bytes(config, roles, on_gpu=False) + 10
    roles = list(roles_of(FULL, gpu_bytes=10**11).values())
    assert host_bytes(config, roles, on_gpu=True) == common + 2 * CUDA_PROCESS_MIB * MIB
    offloading = config_of({**FULL, f"{FSDP}.param_offload": True, f"{FSDP}.optimizer_offload": True})
    assert host_bytes(offloading, roles, on_gpu=True) == common + 2 * CUDA_PROCESS_MIB * MIB + 12 * 10**9
    copying = {**FULL, "actor_rollout_ref.actor.checkpoint.async_save": True}
    assert host_bytes(config_of(copying), roles, on_gpu=True) == host_bytes(config, roles, on_gpu=True)
    saving = config_of({**copying, "trainer.save_freq": 5})
    assert host_bytes(saving, roles, on_gpu=True) == host_bytes(config, roles, on_gpu=True) + 12 * 10**9


CRITIC: Given = {"critic.enable": True}
QUICKSTART = ModelShape(1_318_080, 258 * 192, 3 * 4480, 3, 192, 258, 1024)


def test_the_quickstart_takes_what_was_measured() -> None:
    given: Given = {
        **FULL,
        "data.train_batch_size": 32,
        "data.max_prompt_length": 20,
        "data.max_response_length": 12,
        f"{ACTOR}.ppo_mini_batch_size": 16,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 4096,
        f"{ROLLOUT}.n": 8,
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.quantization": "fp8_per_channel",
        f"{ROLLOUT}.kv_cache_megabytes": 64,
    }
    config = config_of(given)
    roles = estimate_roles(config, {"unused": QUICKSTART}, gpu_bytes=None)
    measured = 2.2 * (1 << 30)  # docs/experiment_log.md: PSS of 13 processes at the peak
    assert 0.75 * measured <= host_bytes(config, roles, on_gpu=False) <= 1.25 * measured


def test_a_reward_model_is_a_process_of_its_own() -> None:
    given: Given = {"reward.reward_model.enable": True, "reward.reward_model.model_path": "judge"}
    judge = roles_of(given)["reward model"]
    assert judge.weights == 4 * 10**9
    assert judge.activations == 8 * 13 * 2000 * 68
    assert set(model_paths(config_of(given))) == {"unused", "judge"}
    assert set(gpu_peaks(config_of(given), list(roles_of(given).values()))) == {"an update", "generation"}


def test_an_engine_of_a_reward_model_has_a_cache() -> None:
    judge = "reward.reward_model"
    given: Given = {
        f"{judge}.enable": True,
        f"{judge}.model_path": "judge",
        f"{judge}.dtype": "bfloat16",
        f"{judge}.rollout.name": "vllm",
        f"{judge}.rollout.tensor_model_parallel_size": 2,
    }
    on_cpu = roles_of(given)["reward model"]
    assert (on_cpu.processes, on_cpu.weights, on_cpu.cache) == (2, 10**9, 256 * MIB)
    assert on_cpu.baseline == ENGINE_MIB * MIB
    on_gpus: Given = {**given, "trainer.device": "cuda", f"{judge}.n_gpus_per_node": 2}
    engine = roles_of({**on_gpus, f"{judge}.rollout.gpu_memory_utilization": 0.75}, 40 * 10**9)
    assert engine["reward model"].model == 30 * 10**9


def test_who_shares_a_gpu_with_whom() -> None:
    """Actor and critic are one process, with one context."""
    actor = RoleMemory("actor", 1, weights=4, gathered=1, gradients=4, optimizer=8, activations=10)
    critic = replace(actor, role="critic", activations=2)
    engine = RoleMemory("engine", 1, weights=2, cache=30)
    context, sleeping = CONTEXT_MIB * MIB, ASLEEP_MIB * MIB
    asleep = gpu_peaks(config_of(CRITIC), [actor, critic, engine])
    assert asleep == {"an update": 12 + 27 + context + sleeping, "generation": 32 + 24 + 1 + context}
    awake = gpu_peaks(config_of({**CRITIC, f"{ROLLOUT}.free_cache_engine": False}), [actor, critic, engine])
    assert awake["an update"] == 12 + 27 + 32 + context
    offload: Given = {**CRITIC, f"{FSDP}.param_offload": True, f"{FSDP}.optimizer_offload": True}
    offloaded = gpu_peaks(config_of(offload), [actor, critic, engine])
    assert (
        offloaded["generation"] == 32 + 12 + (4 + 1) + context
    )  # the actor's weights are needed for canary tokens
    assert offloaded["an update"] == 12 + 27 + context + sleeping  # the actor's, beside the critic at rest
    own_devices: Given = {**CRITIC, "actor_rollout_ref.hybrid_engine": False}
    apart = gpu_peaks(config_of(own_devices), [actor, critic, engine])
    assert apart == {"an update": 39 + context, "generation": 32}


SEVEN = ModelShape(7_615_616_512, 1_089_994_752, 0, 28, 3584, 152_064, 131_072)
"""Qwen2.5-7B."""
ONCE = "fsdp_config.use_no_sync_for_gradient_accumulation"
SHARED = "fsdp_config.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("shared", "once", "measured"), [(1, True, 51.7), (1, False, 27.5), (4, True, 40.0), (4, False, 15.9)]
)
def test_ranks_that_share_rows_hold_their_part_of_them(shared: int, once: bool, measured: float) -> None:
    """An update of Qwen2.5-7B on 8 ranks with micro-batches of a row of 32,768 tokens, without moments: GiB
    by fake execution (``tests/helpers/counting/fake_update.py 28 32768 1`` and ``4``)."""
    one_row: Given = {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    given: Given = {**one_row, f"{ACTOR}.{SHARED}": shared, f"{ACTOR}.{ONCE}": once}
    config = config_of({**ON_8_GPUS, **given, "data.max_response_length": 32_768 - 1024})
    actor = next(role for role in estimate_roles(config, {"unused": SEVEN}, 80 << 30) if role.role == "actor")
    assert (actor.model - actor.optimizer) / (1 << 30) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "once", "measured"),
    [
        *((4096, True, 19.32), (4096, False, 11.19), (16_384, True, 22.42), (16_384, False, 14.29)),
        *((32_768, True, 27.43), (32_768, False, 19.3)),
    ],
)
def test_experts_get_copies_of_their_tokens(tokens: int, once: bool, measured: float, tmp_path: Path) -> None:
    """An update of four layers of Qwen3-30B-A3B on 8 ranks, without moments: GiB by fake execution
    (``tests/helpers/counting/fake_update.py --experts 4 16384 1``)."""
    model_config(4, experts=True).save_pretrained(tmp_path)
    shape = ModelShape.from_model_folder(str(tmp_path))
    one_row: Given = {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    given: Given = {**ON_8_GPUS, **one_row, f"{ACTOR}.{ONCE}": once}
    config = config_of({**given, "data.max_response_length": tokens - 1024})
    actor = next(role for role in estimate_roles(config, {"unused": shape}, 80 << 30) if role.role == "actor")
    assert (actor.model - actor.optimizer) / (1 << 30) == pytest.approx(measured, rel=0.1)


def test_the_width_of_experts_is_that_of_an_mlp_where_it_has_no_name_of_its_own(tmp_path: Path) -> None:
    """Two of experts of width 48 at 32: 36 + 2 (11 + 9.3 x 1.5) bytes."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    MixtralConfig(**sizes, **heads, num_local_experts=4).save_pretrained(tmp_path)
    found = ModelShape.from_model_folder(str(tmp_path)).recomputed_bytes
    assert found == pytest.approx(36 + 2 * (11 + 9.3 * 1.5))


@pytest.mark.parametrize("heads", [(1, 2), (4, 4)])
def test_a_recurrent_layer_keeps_what_its_backward_pass_saves(heads: tuple[int, int], tmp_path: Path) -> None:
    """Bytes of a token, of all tensors that autograd saves in a layer in bfloat16."""
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1], "hidden_size": 512}
    config = Qwen3_5TextConfig(**sizes, num_hidden_layers=4, vocab_size=VOCABULARY)
    config.save_pretrained(tmp_path)
    layer, saved = Qwen3_5GatedDeltaNet(config, 0).bfloat16(), dict[int, int]()
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        keep.append(tensor)
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    keep = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(torch.randn(1, 256, 512, dtype=torch.bfloat16, requires_grad=True))
    layers = config.layer_types.count("linear_attention")
    found = ModelShape.from_model_folder(str(tmp_path)).state_bytes
    assert found == pytest.approx(layers * sum(saved.values()) / 256, rel=0.1)


def test_pictures_take_their_pixels_and_what_the_tower_keeps() -> None:
    """100 tokens of 4 patches, of 1,176 numbers each, in a tower of 32 layers of width 1,280 in bfloat16:
    pixels in float32, then 34 bytes a number of each layer, or 2 of each and 86 of one."""
    tower, patches = TowerShape(32, 1280, 4, 1176), 400
    pixels = 4 * 1176
    assert tower.bytes_of(100, 2, True, False) == patches * (pixels + 1280 * 34 * 32)
    assert tower.bytes_of(100, 2, True, True) == patches * (pixels + 1280 * (86 + 2 * 32))
    assert tower.bytes_of(100, 2, False, False) == patches * (pixels + 1280 * 34)


def test_gradients_take_what_was_measured_at_7b() -> None:
    """31.5 GiB between two micro-batches with whole gradients, 7.0 with shards (weights included), by fake
    execution."""

    def between(once: bool) -> float:
        config = config_of({**ON_8_GPUS, f"{ACTOR}.{ONCE}": once})
        actor = next(
            role for role in estimate_roles(config, {"unused": SEVEN}, 80 << 30) if role.role == "actor"
        )
        return (actor.weights + actor.gradients) / (1 << 30)

    assert between(once=True) == pytest.approx(31.5, abs=0.5)
    assert between(once=False) == pytest.approx(7.0, abs=0.2)


@pytest.mark.parametrize(
    ("gibibytes", "further", "chosen"),
    [
        (79, {}, {"actor": True}),
        (40, {}, {"actor": False}),
        (82, {"algorithm.adv_estimator": "gae"}, {"actor": True, "critic": True}),
        (
            79,
            {"algorithm.adv_estimator": "gae"},
            {"actor": True, "critic": False},
        ),  # whose micro-batches have 32,768 tokens
        (
            79,
            {"algorithm.adv_estimator": "gae", "critic.ppo_max_token_len_per_gpu": 16_384},
            {"actor": True, "critic": True},
        ),
        (60, {"algorithm.adv_estimator": "gae"}, {"actor": False, "critic": False}),
        (40, {f"{ACTOR}.{ONCE}": True}, {}),
        (79, {f"{ACTOR}.{ONCE}": False}, {}),
        (79, {"trainer.n_gpus_per_node": 1}, {}),
        (None, {}, {}),
    ],
)
def test_whole_gradients_where_an_update_with_them_fits(
    gibibytes: int | None, further: Given, chosen: dict[str, bool]
) -> None:
    config = config_of({**ON_8_GPUS, **further})
    size = None if gibibytes is None else gibibytes << 30
    decided, choices = choose_gradient_sums(config, {"unused": SEVEN}, size)
    assert {choice.role: choice.unsharded for choice in choices} == chosen
    sections = {"actor": decided.actor_rollout_ref.actor.fsdp_config, "critic": decided.critic.fsdp_config}
    for role, whole in chosen.items():
        assert sections[role].use_no_sync_for_gradient_accumulation is whole
    if not chosen:
        assert decided == config
    words = {True: "once a mini-batch", False: "after every micro-batch"}
    assert all(
        words[choice.unsharded] in str(choice) and f"of a GPU's {gibibytes} GiB" in str(choice)
        for choice in choices
    )


def test_a_checkpoint_holds_weights_and_moments_of_what_learns() -> None:
    def size(given: Given) -> int:
        config = config_of(given)
        return checkpoint_bytes(config, dict.fromkeys(model_paths(config), BIG))

    assert size({}) == 12 * 10**9
    assert size({"algorithm.adv_estimator": "gae"}) == 24 * 10**9
    assert size({f"{FSDP}.model_dtype": "bfloat16"}) == 6 * 10**9
    assert size({"actor_rollout_ref.model.lora_rank": 8}) == 3 * 8 * 500_000 * 4


def test_models_of_a_run() -> None:
    given: Given = {
        "algorithm.adv_estimator": "gae",
        "critic.model.path": "critic",
        f"{ACTOR}.use_kl_loss": True,
    }
    assert set(model_paths(config_of(given))) == {"unused", "critic"}
    other = {
        **given,
        "actor_rollout_ref.ref.model_path": "other",
        "actor_rollout_ref.model.trust_remote_code": True,
    }
    assert model_paths(config_of(other)) == {"unused": True, "critic": True, "other": True}


CRITIC: Given = {"critic.enable": True}
QUICKSTART = ModelShape(
    parameters=1_318_080,
    embedding_parameters=99_072,
    linear_width_sum=10_368,
    layers=3,
    width=192,
    vocabulary=258,
    positions=1024,
)
MEASURED: dict[str, dict[str, tuple[float, float]]] = {
    "quickstart_digits_cpu": {"actor": (616, 626), "engine": (716, 726), "all": (2186, 2204)},
    "digits_cpu_gae": {"actor and critic": (613, 613), "engine": (648, 709), "all": (1943, 2060)},
}
"""PSS at the peak in MiB, lowest and highest seen, 2026-11-21; with a critic, which is in the actor's
process, 2026-11-23."""


@pytest.mark.parametrize("recipe", MEASURED)
def test_the_estimate_is_within_a_quarter_of_what_was_measured(recipe: str) -> None:
    config = load_run_config(arguments_of_script(str(ROOT / "recipes" / f"{recipe}.sh")))
    roles = estimate_roles(config, dict.fromkeys(model_paths(config), QUICKSTART), None)
    estimated = {role.role: role.total / MIB for role in roles} | {
        "all": host_bytes(config, roles, on_gpu=False) / MIB
    }
    if config.needs_critic:  # whose activations come after the actor's
        actor, critic = (role for role in roles if role.role in ("actor", "critic"))
        again = min(role.gathered + role.activations for role in (actor, critic)) / MIB
        estimated["actor and critic"] = estimated.pop("actor") + estimated.pop("critic") - again
    assert set(estimated) == set(MEASURED[recipe])
    for name, (lowest, highest) in MEASURED[recipe].items():
        assert 0.75 * highest < estimated[name] < 1.25 * lowest, name
