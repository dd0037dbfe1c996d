"""Keys of `zero_optimization`, and of what DeepSpeed has around it."""

from __future__ import annotations

from zerofx.integrations.deepspeed.key import Key, keys

_ZERO = [
    Key(
        "zero_optimization.stage", "honoured", "option `stage`; by default 0", "count", needed=True
    ),
    Key("zero_optimization.overlap_comm", "honoured", "false: leaves out pass `schedule`", "bool"),
    Key(
        "zero_optimization.reduce_bucket_size",
        "honoured",
        "elements: `target_bytes` of pass `fuse_reduces`",
        "count",
    ),
    Key(
        "zero_optimization.allgather_bucket_size",
        "honoured",
        "elements: `target_bytes` of pass `fuse_unshards`",
        "count",
        stages=(1, 2),
    ),
    *keys(
        "honoured",
        "zero_optimization",
        [
            ("stage3_prefetch_bucket_size", "elements: `target_bytes` of pass `fuse_unshards`"),
            ("stage3_max_live_parameters", "elements: option `prefetch_bytes`"),
            ("stage3_max_reuse_distance", "elements: option `memory_budget` keeps half of them"),
            ("stage3_param_persistence_threshold", "elements: option `min_shard_numel`, one more"),
            ("stage3_model_persistence_threshold", "elements: option `max_replicated_numel`"),
        ],
        "count",
        stages=(3,),
    ),
    *keys(
        "honoured",
        "zero_optimization",
        [
            ("stage3_gather_16bit_weights_on_model_save", "`save_model` may gather"),
            ("stage3_gather_fp16_weights_on_model_save", "an older name of the same"),
        ],
        "bool",
        stages=(3,),
    ),
    Key("zero_optimization.mics_shard_size", "honoured", "option `replicate`: ranks / size"),
    *keys(
        "always",
        "zero_optimization",
        [
            ("allgather_partitions", "shards are gathered, never broadcast"),
            ("reduce_scatter", "gradients are reduce-scattered: the same mean, half the bytes"),
            ("contiguous_gradients", "a bucket is one buffer"),
            ("sub_group_size", "torch's optimizer steps over shards"),
            ("use_multi_rank_bucket_allreduce", "gradients are reduce-scattered"),
            ("round_robin_gradients", "no copies to the host to spread"),
            ("parameter_alignment", "torch allocates buffers aligned, one a parameter"),
            ("load_from_fp32_weights", "checkpoints hold the master weights"),
            ("elastic_checkpoint", "checkpoints load on any number of ranks"),
            ("compute_grad_norm", "a norm is computed only to clip by it"),
            ("stage3_module_granularity_threshold", "buckets follow the blocks of a model"),
            ("stage3_use_all_reduce_for_fetch_params", "the fastest way to gather is measured"),
            ("stage3_allgather_sequential", "gathers run in the order of use"),
            ("memory_efficient_linear", "no weight is saved for backward"),
            ("pipeline_loading_checkpoint", "each rank reads its rows only"),
            ("override_module_apply", "`meta_init` needs no patched modules"),
            ("log_trace_cache_warnings", "there is no trace that could be wrong"),
            ("enable_sanity_checks", "the verifier runs after every pass (option `verify`)"),
            ("leaf_module", "all ranks run one program: there is nothing to list"),
            ("mics_hierarchical_params_gather", "across nodes every byte travels once"),
            ("legacy_stage1", "there is one stage 1, with the same numbers"),
        ],
    ),
    *keys(
        "honoured",
        "zero_optimization",
        [
            ("zero_quantized_weights", "option `quantize_weights`: int8"),
            ("zero_quantized_gradients", "option `quantize_gradients`: int4 in both hops"),
            (
                "zero_quantized_nontrainable_weights",
                "pass `quantize_unshards` for frozen weights: int8, kept as codes once sent",
            ),
        ],
        "bool",
        stages=(3,),
    ),
    Key(
        "zero_optimization.zeropp_loco_param",
        "honoured",
        "`int4.feedback`, if gradients are quantized; `err_beta` is 0.8 and `reset_T` 1024",
        stages=(3,),
    ),
    Key(
        "zero_optimization.zero_hpz_partition_size",
        "honoured",
        "options `secondary_shards` and `ranks_per_node`, if there are more ranks than that",
        "count",
        stages=(3,),
    ),
    *keys(
        "missing",
        "zero_optimization",
        [
            ("offload_optimizer", "needs offloading"),
            ("offload_param", "needs offloading"),
            ("cpu_offload", "needs offloading"),
            ("cpu_offload_param", "needs offloading"),
            ("cpu_offload_params", "needs offloading"),
            ("cpu_offload_use_pin_memory", "needs offloading"),
            ("zenflow", "needs offloading"),
            ("save_muon_momentum_buffer_in_memory", "needs offloading"),
        ],
    ),
    Key(
        "zero_optimization.ignore_unused_parameters",
        "honoured",
        "false: a step in which a parameter has no gradient is an error",
        "bool",
    ),
]

_AROUND = [
    *keys(
        "always",
        "",
        [
            ("disable_allgather", "shards are gathered when they are read"),
            ("aio", "tunes offloading to files, which is asked for elsewhere"),
            ("checkpoint.tag_validation", "ranks save one checkpoint together"),
            ("checkpoint.load_universal", "every checkpoint loads at any stage, on any ranks"),
            ("checkpoint.parallel_write", "every rank writes its rows"),
            ("checkpoint.writer", "every rank writes its rows"),
            ("datastates_ckpt", "`zerofx.checkpoint.async_save` writes beside training"),
            ("disable_python_gc", "`gc.disable()` works as ever"),
            ("hybrid_engine", "`generate` runs on the model that is trained"),
            ("sparse_gradients", "gradients travel dense: the same sums"),
        ],
    ),
    Key(
        "checkpoint.use_node_local_storage",
        "honoured",
        "`node_local`, for `zerofx.checkpoint`: each node has a folder of its own",
        "bool",
    ),
    *keys(
        "always",
        "compile",
        [
            ("deepcompile", "the model is compiled with its communication"),
            ("debug_log", "see `ZEROFX_DUMP`"),
            ("free_activation", "values are freed after their last use"),
            ("free_activation_threshold", "values are freed after their last use"),
            ("double_buffer", "gathers run ahead as far as `prefetch_bytes` allows"),
            ("symmetric_memory", "how to move bytes is measured"),
            ("sync_before_reduce", "gradients are waited for where they are read"),
            ("sync_after_reduce", "gradients are waited for where they are read"),
            ("sync_before_allgather", "gathered values are waited for where they are read"),
            ("sync_after_allgather", "gathered values are waited for where they are read"),
            ("keep_int_input_tensors", "programs are traced without values"),
            ("keep_all_input_tensors", "programs are traced without values"),
            ("offload_activation_pin_memory", "tunes offloading, which is asked for elsewhere"),
        ],
    ),
    *keys(
        "always",
        "activation_checkpointing",
        [
            ("partition_activations", "each rank keeps its own, whole: the same numbers"),
            ("contiguous_memory_optimization", "where torch puts them makes no difference"),
            ("number_checkpoints", "your model's calls of `torch.utils.checkpoint` count"),
            ("synchronize_checkpoint_boundary", "autograd synchronizes where it must"),
            ("profile", "see `zerofx explain`"),
        ],
    ),
    *keys("missing", "activation_checkpointing", [("cpu_checkpointing", "needs offloading")]),
    *keys(
        "missing",
        "",
        [
            ("compile.offload_activation", "needs offloading"),
            ("compile.offload_opt_states", "needs offloading"),
            ("compile.offload_parameters", "needs offloading"),
        ],
    ),
    *keys(
        "refused",
        "",
        [
            ("moe", "expert parallelism; mixtures of experts train without it"),
            ("expert_parallel", "expert parallelism; mixtures of experts train without it"),
            ("use_data_before_expert_parallelism", "expert parallelism"),
            ("pipeline", "pipeline parallelism"),
            ("sparse_attention", "a model's attention is the model's; DeepSpeed removed it"),
            ("compression_training", "compression of models; DeepSpeed removed it"),
            ("quantize_training", "compression of models; DeepSpeed removed it"),
            ("weight_quantization", "compression of models, for inference"),
            ("compile.autoep_non_moe", "expert parallelism"),
            ("eigenvalue", "compression of models; DeepSpeed removed it"),
            ("amp", "say `fp16`, `bf16` or `torch_autocast`; DeepSpeed removed it"),
            ("nebula", "see `zerofx.checkpoint.async_save`; DeepSpeed removed it"),
            ("curriculum_learning", "the data loader is yours; DeepSpeed removed it"),
            ("progressive_layer_drop", "the model is yours; DeepSpeed removed it"),
            ("graph_harvesting", "CUDA graphs; DeepSpeed removed it"),
            ("autotuning", "see `zerofx plan` for what fits"),
            ("elasticity", "checkpoints load on any number of ranks; DeepSpeed removed it"),
        ],
    ),
]

ZERO_KEYS = [*_ZERO, *_AROUND]
