"""Keys about training: batch, optimizer, schedule, precision and reports."""

from __future__ import annotations

import dataclasses

from zerofx.integrations.deepspeed.key import Key, keys
from zerofx.integrations.deepspeed.schedules import SHAPES

_WIDER = "option `reduce_dtype`: the wider of this and the "
_BATCH = [
    *keys(
        "honoured",
        "",
        [
            (
                "train_batch_size",
                "`train_batch_size` = micro-batch × accumulation × ranks, checked",
            ),
            ("train_micro_batch_size_per_gpu", "`micro_batch_size`: samples of one backward"),
            ("gradient_accumulation_steps", "`accumulation`, and option `accumulate`"),
        ],
        "count",
    ),
    *keys(
        "honoured",
        "",
        [
            (
                "sequence_parallel_size",
                "ranks of a sequence: `backward` adds their gradients up, unless zerofx cuts it",
            ),
            (
                "data_parallel_size",
                "ranks / `sequence_parallel_size`, checked",
            ),
        ],
        "count",
    ),
    *keys("always", "", [("managed_gradient_accumulation", "the loop is yours")], "bool"),
    Key("dataloader_drop_last", "honoured", "`drop_last`, for your data loader", "bool"),
]

_OPTIMIZER = [
    Key(
        "optimizer.type",
        "honoured",
        "`make_optimizer`: torch's Adam, AdamW or SGD; Adam means AdamW, as in DeepSpeed",
        "text",
    ),
    Key("optimizer.params.lr", "honoured", "by default 0.001", "number", needed=True),
    Key("optimizer.params.betas", "honoured", "of Adam and AdamW", "pair"),
    *keys(
        "honoured",
        "optimizer.params",
        [
            ("eps", "of Adam and AdamW"),
            ("weight_decay", "by default 0, also for AdamW, unless `torch_adam` is set"),
            ("momentum", "of SGD"),
            ("dampening", "of SGD"),
        ],
        "number",
    ),
    *keys(
        "honoured",
        "optimizer.params",
        [
            ("nesterov", "of SGD"),
            ("amsgrad", "of Adam and AdamW"),
            ("maximize", "passed to torch"),
            ("foreach", "passed to torch"),
            ("fused", "passed to torch"),
            ("capturable", "passed to torch"),
            ("adam_w_mode", "false: Adam adds weight decay to gradients"),
            ("torch_adam", "true: defaults are those of torch's class"),
        ],
        "bool",
    ),
    *keys("always", "optimizer.params", [("set_grad_none", "gradients are freed by `zero_grad`")]),
    *keys("always", "optimizer.params", [("fp32_optimizer_states", "they are")], "bool"),
    Key(
        "optimizer.params.bias_correction",
        "honoured",
        "false: Adam takes its first steps for late ones",
        "bool",
    ),
    *keys("refused", "optimizer.params", [("max_grad_norm", "say `gradient_clipping`")]),
    *keys(
        "refused",
        "optimizer.params",
        [
            ("max_coeff", "Lamb"),
            ("min_coeff", "Lamb"),
            ("freeze_step", "1-bit optimizers"),
            ("cuda_aware", "1-bit optimizers"),
            ("comm_backend_name", "1-bit optimizers"),
            ("var_freeze_step", "1-bit optimizers"),
        ],
    ),
    *keys("always", "optimizer", [("legacy_fusion", "torch's optimizers are used")], "bool"),
    *keys(
        "always",
        "",
        [
            ("zero_allow_untested_optimizer", "any optimizer steps on shards"),
            ("zero_force_ds_cpu_optimizer", "torch's optimizers are used"),
        ],
        "bool",
    ),
]


def _schedule_keys() -> list[Key]:
    owners: dict[str, list[str]] = {}
    for name, shape in SHAPES.items():
        for field in dataclasses.fields(shape):  # pyright: ignore[reportArgumentType]
            owners.setdefault(field.name, []).append(name)
    needed = ("total_num_steps", "warmup_num_steps", "warmup_max_lr")
    return [
        Key(
            f"scheduler.params.{name}",
            "honoured",
            f"of {', '.join(shapes)}",
            needed=name in needed,
        )
        for name, shapes in owners.items()
    ]


_SCHEDULER = [
    Key("scheduler.type", "honoured", f"`make_scheduler`: {', '.join(SHAPES)}", "text"),
    *_schedule_keys(),
    Key(
        "scheduler.params.last_batch_iteration",
        "honoured",
        "the schedule goes on from this step; rates change with the next one",
    ),
]

_PRECISION = [
    Key("fp16.enabled", "honoured", "option `param_dtype`; `make_scaler`", "bool", needed=True),
    Key("fp16.auto_cast", "honoured", "option `cast_forward_inputs`", "bool"),
    Key(
        "fp16.loss_scale",
        "honoured",
        "a scale that stays; 0: one that moves as the next keys say",
        "number",
    ),
    *keys(
        "honoured",
        "fp16",
        [
            ("initial_scale_power", "the scale begins at two to this power"),
            ("loss_scale_window", "clean steps until it doubles"),
            ("hysteresis", "overflows until it is halved"),
            ("min_loss_scale", "an overflow at this scale is an error"),
        ],
        "count",
    ),
    Key("fp16.consecutive_hysteresis", "honoured", "a clean step forgives overflows", "bool"),
    Key("bf16.enabled", "honoured", "option `param_dtype`", "bool", needed=True),
    Key("bf16.check_grad_overflow", "honoured", "`make_scaler`: skips; true by default", "bool"),
    Key("bf16.immediate_grad_update", "always", "a gradient is added when it is there", "bool"),
    Key(
        "fp16.fp16_master_weights_and_grads",
        "missing",
        "needs offloading, in DeepSpeed too",
        "bool",
    ),
    Key(
        "bf16.bf16_master_weights_and_grads",
        "honoured",
        "`cast_model`: parameters at rest; wants the next key, or offloading",
        "bool",
    ),
    Key("bf16.bf16_optimizer_states", "honoured", "states have their parameter's dtype", "bool"),
    Key("torch_autocast.enabled", "honoured", "`autocast`", "bool"),
    Key("torch_autocast.dtype", "honoured", "`autocast`", "text"),
    Key(
        "torch_autocast.lower_precision_safe_modules",
        "always",
        "what autocast alone reads travels in its dtype",
    ),
    Key("communication_data_type", "honoured", f"{_WIDER}next key", "text"),
    Key("data_types.grad_accum_dtype", "honoured", f"{_WIDER}key before", "text"),
    Key(
        "seq_parallel_communication_data_type",
        "honoured",
        "option `reduce_dtype` where several ranks share a sequence; by default fp32",
        "text",
    ),
    Key("data_types.param_dtype", "always", "it must name that of `fp16` or `bf16`", "text"),
    Key("data_types.buffer_dtype", "honoured", "`cast_model`: dtype of buffers", "text"),
    Key(
        "data_types.keep_in_fp32_modules",
        "honoured",
        "`cast_model`: patterns of buffers that 16-bit training keeps in fp32",
        "texts",
    ),
    Key("gradient_clipping", "honoured", "largest norm; by default 1.0; 0: no clipping", "number"),
    *keys(
        "always",
        "",
        [
            ("prescale_gradients", "sums are divided once, on gloo in fp32"),
            ("gradient_predivide_factor", "sums are divided once, on gloo in fp32"),
        ],
    ),
    Key("gradient_allreduce_op", "honoured", "sum: `backward` multiplies by the ranks", "text"),
]

_TARGETS = {
    "csv_monitor": {"output_path": "folder", "job_name": "folder below it"},
    "tensorboard": {"output_path": "folder", "job_name": "folder below it"},
    "wandb": {"group": "of the run", "team": "that owns it", "project": "that it belongs to"},
    "comet": {
        "project": "that it belongs to",
        "workspace": "of the project",
        "api_key": "of the account",
        "experiment_name": "of the run",
        "experiment_key": "of a run to go on with",
        "mode": "whether to go on with a run, or to begin one",
    },
}

_REPORTS = [
    *(
        Key(f"{name}.enabled", "honoured", "`make_report` writes figures there, too", "bool")
        for name in _TARGETS
    ),
    *(
        Key(f"{name}.{param}", "honoured", meaning, "text")
        for name, params in _TARGETS.items()
        for param, meaning in params.items()
    ),
    Key("comet.online", "honoured", "false: the run is written to files", "bool"),
    Key("comet.samples_log_interval", "honoured", "samples between figures of a name", "count"),
    Key("steps_per_print", "honoured", "`make_report`: a line every so many steps", "count"),
    Key("wall_clock_breakdown", "honoured", "`make_report`: times of each step", "bool"),
    Key("memory_breakdown", "honoured", "`make_report`: memory of each step", "bool"),
    Key("dump_state", "honoured", "`make_report` begins with this table", "bool"),
    Key("flops_profiler.enabled", "honoured", "`make_report` shows operations and speed", "bool"),
    *keys(
        "honoured",
        "flops_profiler",
        [
            ("profile_step", "steps taken before the one that is shown; by default 1"),
            ("top_modules", "classes shown of each depth; by default 1"),
        ],
        "count",
    ),
    Key("flops_profiler.module_depth", "honoured", "the deepest that is shown; by default -1: all"),
    Key("flops_profiler.detailed", "honoured", "shows each module; true by default", "bool"),
    Key("flops_profiler.output_file", "honoured", "which the text is added to", "text"),
    Key(
        "flops_profiler.recompute_fwd_factor",
        "always",
        "operations of backward are counted, not estimated",
    ),
    *keys(
        "honoured",
        "comms_logger",
        [
            ("enabled", "`make_report` shows communication in every step that has a line"),
            ("verbose", "shows each call, too"),
            ("prof_all", "shows all operations; true by default"),
        ],
        "bool",
    ),
    Key(
        "comms_logger.prof_ops",
        "honoured",
        "the operations shown if `prof_all` is false",
        "texts",
    ),
    Key(
        "comms_logger.debug",
        "always",
        "callers are the runtime's own; `zerofx explain` names what a program moves",
    ),
    *keys(
        "always",
        "",
        [
            ("vocabulary_size", "DeepSpeed only warns by it"),
            ("log_level", "of DeepSpeed's own log"),
            ("timers", "of DeepSpeed's own timers"),
        ],
    ),
]

TRAINING_KEYS = [*_BATCH, *_OPTIMIZER, *_SCHEDULER, *_PRECISION, *_REPORTS]
