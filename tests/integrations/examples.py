"""For every honoured key two values that must not mean the same, in a file that lets it speak."""

from __future__ import annotations

from typing import Any

from tests.integrations.data_files import PACKED, ROUTED, metric
from zerofx.integrations.deepspeed.data_keys import (
    BATCHING,
    CURRICULUM,
    METRICS,
    RANDOM_LTD,
    ROUTING,
    SAMPLING,
)

Pair = tuple[dict[str, Any], Any, Any]

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
_ADAM = {**BASE, "optimizer.type": "AdamW"}
_SGD = {**BASE, "optimizer.type": "SGD"}
_STAGE_2 = {**BASE, "zero_optimization.stage": 2}
_STAGE_3 = {**BASE, "zero_optimization.stage": 3}
_FP16 = {**BASE, "fp16.enabled": True}
_AUTOCAST = {**BASE, "torch_autocast.enabled": True}
_WARMUP = {**BASE, "scheduler.type": "WarmupLR"}
_DECAY = {**BASE, "scheduler.type": "WarmupDecayLR", "scheduler.params.total_num_steps": 9}
_COSINE = {**_DECAY, "scheduler.type": "WarmupCosineLR"}
_RANGE = {**BASE, "scheduler.type": "LRRangeTest"}
_CSV = {**BASE, "csv_monitor.enabled": True}
_BOARD = {**BASE, "tensorboard.enabled": True}
_WANDB = {**BASE, "wandb.enabled": True}
_COMET = {**BASE, "comet.enabled": True}
_CODED = {**_STAGE_3, "zero_optimization.zero_quantized_gradients": True}
_FLOPS = {**BASE, "flops_profiler.enabled": True}
_COMMS = {**BASE, "comms_logger.enabled": True}
_PARTS = {**BASE, "tensor_parallel.autotp_size": 2}
_CYCLE = {
    **BASE,
    "scheduler.type": "OneCycle",
    "scheduler.params.cycle_min_lr": 0.1,
    "scheduler.params.cycle_max_lr": 0.3,
}
_METRIC = {**BASE, **metric()}
_PACKED = {**BASE, **PACKED}
_ROUTED = {**BASE, **ROUTED}
_NAME = f"{METRICS}.<name>"
_LTD = f"{RANDOM_LTD}.random_ltd_schedule"
_ROOT = metric(
    schedule_type="fixed_root",
    **{
        "schedule_config.total_curriculum_step": 8,
        "schedule_config.difficulty_step": 2,
        "schedule_config.root_degree": 2,
    },
)
_STEPS = metric(
    schedule_type="fixed_discrete",
    **{"schedule_config.difficulty": [2, 10], "schedule_config.max_step": [3]},
)

ENABLED = {
    **_ADAM,
    **metric(),
    **ROUTED,
    "bf16.enabled": True,
    "torch_autocast.enabled": True,
    "flops_profiler.enabled": True,
    "comms_logger.enabled": True,
}
"""Switches without which some keys are off."""
ENABLED_PACKED = {**_ADAM, **PACKED}
"""The one that excludes another."""

HONOURED: dict[str, Pair] = {
    "train_batch_size": ({}, 4, 8),
    "train_micro_batch_size_per_gpu": ({}, 4, 8),
    "gradient_accumulation_steps": (BASE, 1, 3),
    "optimizer.type": (BASE, "AdamW", "SGD"),
    "optimizer.params.lr": (_ADAM, 0.1, 0.2),
    "optimizer.params.betas": (_ADAM, [0.9, 0.9], [0.8, 0.9]),
    "optimizer.params.eps": (_ADAM, 1e-8, 1e-7),
    "optimizer.params.weight_decay": (_ADAM, 0.1, 0.2),
    "optimizer.params.momentum": (_SGD, 0.1, 0.2),
    "optimizer.params.dampening": (_SGD, 0.1, 0.2),
    "optimizer.params.nesterov": ({**_SGD, "optimizer.params.momentum": 0.9}, False, True),
    "optimizer.params.amsgrad": (_ADAM, False, True),
    "optimizer.params.maximize": (_ADAM, False, True),
    "optimizer.params.foreach": (_ADAM, False, True),
    "optimizer.params.fused": (_ADAM, False, True),
    "optimizer.params.capturable": (_ADAM, False, True),
    "optimizer.params.bias_correction": (_ADAM, False, True),
    "optimizer.params.adam_w_mode": ({**BASE, "optimizer.type": "Adam"}, False, True),
    "optimizer.params.torch_adam": (_ADAM, False, True),
    "scheduler.type": (BASE, "WarmupLR", "LRRangeTest"),
    "scheduler.params.warmup_min_lr": (_WARMUP, 0.1, 0.2),
    "scheduler.params.warmup_max_lr": (_WARMUP, 0.1, [0.1, 0.2]),
    "scheduler.params.warmup_num_steps": (_WARMUP, 10, 20),
    "scheduler.params.warmup_type": (_WARMUP, "log", "linear"),
    "scheduler.params.total_num_steps": (_DECAY, 10, 20),
    "scheduler.params.warmup_min_ratio": (_COSINE, 0.1, 0.2),
    "scheduler.params.cos_min_ratio": (_COSINE, 0.1, 0.2),
    "scheduler.params.cycle_min_lr": (_CYCLE, 0.1, 0.2),
    "scheduler.params.cycle_max_lr": (_CYCLE, 0.1, 0.2),
    "scheduler.params.decay_lr_rate": (_CYCLE, 0.1, 0.2),
    "scheduler.params.cycle_first_step_size": (_CYCLE, 10, 20),
    "scheduler.params.cycle_second_step_size": (_CYCLE, 10, 20),
    "scheduler.params.cycle_first_stair_count": (_CYCLE, 1, 2),
    "scheduler.params.cycle_second_stair_count": (_CYCLE, 1, 2),
    "scheduler.params.decay_step_size": (_CYCLE, 1, 2),
    "scheduler.params.cycle_momentum": (_CYCLE, True, False),
    "scheduler.params.cycle_min_mom": (_CYCLE, 0.1, 0.2),
    "scheduler.params.cycle_max_mom": (_CYCLE, 0.1, 0.2),
    "scheduler.params.decay_mom_rate": (_CYCLE, 0.1, 0.2),
    "scheduler.params.lr_range_test_min_lr": (_RANGE, 0.1, 0.2),
    "scheduler.params.lr_range_test_step_size": (_RANGE, 1, 2),
    "scheduler.params.lr_range_test_step_rate": (_RANGE, 0.1, 0.2),
    "scheduler.params.lr_range_test_staircase": (_RANGE, True, False),
    "fp16.enabled": (BASE, False, True),
    "fp16.auto_cast": (_FP16, False, True),
    "fp16.loss_scale": (_FP16, 0, 128.0),
    "fp16.initial_scale_power": (_FP16, 8, 16),
    "fp16.loss_scale_window": (_FP16, 8, 16),
    "fp16.hysteresis": (_FP16, 1, 2),
    "fp16.min_loss_scale": (_FP16, 1, 2),
    "fp16.consecutive_hysteresis": (_FP16, True, False),
    "bf16.enabled": (BASE, False, True),
    "bf16.check_grad_overflow": ({**BASE, "bf16.enabled": True}, False, True),
    "torch_autocast.enabled": (BASE, False, True),
    "torch_autocast.dtype": (_AUTOCAST, "bfloat16", "float16"),
    "communication_data_type": (_FP16, "fp16", "fp32"),
    "data_types.grad_accum_dtype": (_FP16, "fp16", "fp32"),
    "data_types.buffer_dtype": (BASE, "bf16", "fp32"),
    "data_types.keep_in_fp32_modules": (_FP16, [], ["*bias"]),
    "gradient_clipping": (BASE, 0.0, 0.5),
    "steps_per_print": (BASE, 1, 10),
    "wall_clock_breakdown": (BASE, False, True),
    "memory_breakdown": (BASE, False, True),
    "flops_profiler.enabled": (BASE, False, True),
    "flops_profiler.profile_step": (_FLOPS, 1, 5),
    "flops_profiler.module_depth": (_FLOPS, -1, 2),
    "flops_profiler.top_modules": (_FLOPS, 1, 3),
    "flops_profiler.detailed": (_FLOPS, False, True),
    "flops_profiler.output_file": (_FLOPS, None, "operations.txt"),
    "comms_logger.enabled": (BASE, False, True),
    "comms_logger.verbose": (_COMMS, False, True),
    "comms_logger.prof_all": ({**_COMMS, "comms_logger.prof_ops": ["send"]}, False, True),
    "comms_logger.prof_ops": ({**_COMMS, "comms_logger.prof_all": False}, ["send"], ["recv"]),
    "csv_monitor.enabled": (BASE, False, True),
    "csv_monitor.output_path": (_CSV, "one", "other"),
    "csv_monitor.job_name": (_CSV, "one", "other"),
    "tensorboard.enabled": (BASE, False, True),
    "tensorboard.output_path": (_BOARD, "one", "other"),
    "tensorboard.job_name": (_BOARD, "one", "other"),
    "wandb.enabled": (BASE, False, True),
    "wandb.group": (_WANDB, "one", "other"),
    "wandb.team": (_WANDB, "one", "other"),
    "wandb.project": (_WANDB, "one", "other"),
    "comet.enabled": (BASE, False, True),
    "comet.project": (_COMET, "one", "other"),
    "comet.workspace": (_COMET, "one", "other"),
    "comet.api_key": (_COMET, "one", "other"),
    "comet.experiment_name": (_COMET, "one", "other"),
    "comet.experiment_key": (_COMET, "one", "other"),
    "comet.mode": (_COMET, "get", "create"),
    "comet.online": (_COMET, False, True),
    "comet.samples_log_interval": (_COMET, 1, 100),
    "gradient_allreduce_op": (BASE, "mean", "sum"),
    "sequence_parallel_size": (BASE, 1, 2),
    "seq_parallel_communication_data_type": (
        {**BASE, "sequence_parallel_size": 2},
        "fp32",
        "bf16",
    ),
    "tensor_parallel.autotp_size": (BASE, 1, 2),
    "tensor_parallel.preset_model": (_PARTS, "llama", "bloom"),
    "tensor_parallel.partition_config.layer_specs": (_PARTS, [], [{"patterns": ["up"]}]),
    "tensor_parallel.partition_config.use_default_specs": (
        {
            **_PARTS,
            "tensor_parallel.preset_model": "llama",
            "tensor_parallel.partition_config.layer_specs": [{"patterns": ["up"]}],
        },
        False,
        True,
    ),
    "tensor_parallel.partition_config.strict_mode": (_PARTS, False, True),
    "dump_state": (BASE, False, True),
    "checkpoint.use_node_local_storage": (BASE, False, True),
    "dataloader_drop_last": (BASE, False, True),
    "scheduler.params.last_batch_iteration": (_WARMUP, -1, 3),
    "zero_optimization.ignore_unused_parameters": (_STAGE_2, False, True),
    "zero_optimization.stage": (BASE, 1, 2),
    "zero_optimization.overlap_comm": (_STAGE_3, False, True),
    "zero_optimization.reduce_bucket_size": (_STAGE_2, 1e6, 1e7),
    "zero_optimization.allgather_bucket_size": (_STAGE_2, 1e6, 1e7),
    "zero_optimization.stage3_prefetch_bucket_size": (_STAGE_3, 1e6, 1e7),
    "zero_optimization.stage3_max_live_parameters": (_STAGE_3, 1e6, 1e7),
    "zero_optimization.stage3_max_reuse_distance": (_STAGE_3, 1e6, 1e7),
    "zero_optimization.stage3_param_persistence_threshold": (_STAGE_3, 1e3, 1e4),
    "zero_optimization.stage3_model_persistence_threshold": (_STAGE_3, 1e3, 1e4),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (_STAGE_3, False, True),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (_STAGE_3, False, True),
    "zero_optimization.zero_quantized_weights": (_STAGE_3, False, True),
    "zero_optimization.zero_quantized_gradients": (_STAGE_3, False, True),
    "zero_optimization.zero_quantized_nontrainable_weights": (_STAGE_3, False, True),
    "zero_optimization.zeropp_loco_param": (_CODED, None, {"err_beta": 0.8, "reset_T": 1024}),
    "zero_optimization.zero_hpz_partition_size": (_STAGE_3, 1, 2),
    "zero_optimization.mics_shard_size": (_STAGE_3, 2, 4),
    "data_efficiency.enabled": (_METRIC, False, True),
    "data_efficiency.seed": (_METRIC, 1, 2),
    f"{SAMPLING}.enabled": (_METRIC, False, True),
    f"{SAMPLING}.num_epochs": (_METRIC, 1, 2),
    f"{SAMPLING}.num_workers": (_METRIC, 1, 2),
    f"{SAMPLING}.pin_memory": (_METRIC, False, True),
    f"{CURRICULUM}.enabled": (_METRIC, False, True),
    f"{_NAME}.index_to_sample_path": (_METRIC, "one", "other"),
    f"{_NAME}.index_to_metric_path": (_METRIC, "one", "other"),
    f"{_NAME}.difficulty_type": (_METRIC, "value", "percentile"),
    f"{_NAME}.clustering_type": (_METRIC, "schedule_based", "single_cluster"),
    f"{_NAME}.min_difficulty": (_METRIC, 1, 2),
    f"{_NAME}.max_difficulty": (_METRIC, 10, 20),
    f"{_NAME}.schedule_config.total_curriculum_step": (_METRIC, 8, 9),
    f"{_NAME}.schedule_config.difficulty_step": (_METRIC, 1, 2),
    f"{_NAME}.schedule_config.root_degree": ({**BASE, **_ROOT}, 2, 3),
    f"{_NAME}.schedule_config.difficulty": ({**BASE, **_STEPS}, [2, 10], [3, 10]),
    f"{_NAME}.schedule_config.max_step": ({**BASE, **_STEPS}, [3], [4]),
    f"{BATCHING}.enabled": (_PACKED, False, True),
    f"{BATCHING}.metrics_path": (_PACKED, "one", "other"),
    f"{BATCHING}.lr_scaling_method": (_PACKED, "linear", "sqrt"),
    f"{BATCHING}.min_batch_size": (_PACKED, 1, 2),
    f"{BATCHING}.max_batch_size": (_PACKED, 3, 4),
    f"{BATCHING}.max_tokens": (_PACKED, 10, 20),
    f"{BATCHING}.sequence_picking_order": (_PACKED, "random", "seqlen"),
    f"{ROUTING}.enabled": (_ROUTED, False, True),
    f"{RANDOM_LTD}.enabled": (_ROUTED, False, True),
    f"{RANDOM_LTD}.total_layer_num": (_ROUTED, 3, 4),
    f"{RANDOM_LTD}.random_ltd_layer_id": (_ROUTED, [0, 1], [0, 2]),
    f"{RANDOM_LTD}.model_mask_name": (_ROUTED, None, "mask"),
    f"{RANDOM_LTD}.model_type": (_ROUTED, "encoder", "decoder"),
    f"{RANDOM_LTD}.hidden_state_order": (_ROUTED, "batch_seq_dim", "seq_batch_dim"),
    f"{_LTD}.min_value": (_ROUTED, 4, 6),
    f"{_LTD}.max_value": (_ROUTED, 16, 18),
    f"{_LTD}.schedule_config.require_steps": (_ROUTED, 8, 9),
    f"{_LTD}.schedule_config.seq_per_step": (_ROUTED, 1, 2),
}

TOGETHER = {
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "data_parallel_size",
    "tensor_parallel.tensor_parallel.tp_size",
    "tensor_parallel.tp.tp_size",
    "compile.passes",
    f"{_NAME}.schedule_type",
    f"{RANDOM_LTD}.random_ltd_layer_num",
    f"{_LTD}.schedule_type",
}
"""Honoured keys that mean something together only, or are checked."""


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The content of a file."""
    content: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return content
