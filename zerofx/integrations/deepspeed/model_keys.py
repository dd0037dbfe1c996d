"""Keys of what ranks do with a model besides sharding it."""

from __future__ import annotations

from zerofx.integrations.deepspeed.key import Key, keys

_PARTS = [
    Key(
        "tensor_parallel.autotp_size",
        "honoured",
        "ranks that share a model: `parallelize` keeps this rank's part",
        "count",
    ),
    Key(
        "tensor_parallel.preset_model",
        "honoured",
        "rules for layers: llama, qwen2, bloom, chatglm, mixtral, deepseek_v2, phi3; without "
        "rules the model's `tp_plan` holds",
        "text",
    ),
    Key(
        "tensor_parallel.partition_config.layer_specs",
        "honoured",
        "rules for layers: patterns, partition_type, shape, partition_dim, model_types, "
        "gather_output, grad_allreduce",
    ),
    *keys(
        "honoured",
        "tensor_parallel.partition_config",
        [
            ("use_default_specs", "false: the preset's rules do not follow"),
            ("strict_mode", "a linear layer without a rule is an error"),
        ],
        "bool",
    ),
    Key("tensor_parallel.tensor_parallel.tp_size", "honoured", "autotp_size, checked", "count"),
    Key("tensor_parallel.tp.tp_size", "honoured", "autotp_size, checked", "count"),
    *keys(
        "always",
        "tensor_parallel",
        [
            ("dtype", "that of `fp16` or `bf16`"),
            ("tp_overlap_comm", "sums are scheduled with the program"),
            ("keep_module_on_host", "a model is divided where it is"),
            ("injection_policy_tuple", "DeepSpeed replaces it by what it finds"),
            ("replace_with_kernel_inject", "of inference"),
            ("kernel_inject", "of inference"),
            ("partition_config.tp_size", "autotp_size holds"),
            ("partition_config.embedding_partition_dim", "embeddings stay whole"),
            ("partition_config.lm_head_patterns", "layer_specs name what is cut"),
            ("tensor_parallel.tp_grain_size", "parts are equal"),
            ("tp.tp_grain_size", "parts are equal"),
        ],
    ),
    Key(
        "compile.passes",
        "honoured",
        "autosp: option `sequence_parallel`, as `sequence_parallel_size` says; z1, z3, autotp: "
        "checked, stage and `autotp_size` ask for them",
        "texts",
    ),
]

MODEL_KEYS = _PARTS
