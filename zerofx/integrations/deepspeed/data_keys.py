"""Keys of the section `data_efficiency`: which samples a run sees, and which tokens its layers."""

from __future__ import annotations

from zerofx.integrations.deepspeed.key import Key, keys

SAMPLING = "data_efficiency.data_sampling"
CURRICULUM = f"{SAMPLING}.curriculum_learning"
METRICS = f"{CURRICULUM}.curriculum_metrics"
BATCHING = f"{SAMPLING}.dynamic_batching"
ROUTING = "data_efficiency.data_routing"
RANDOM_LTD = f"{ROUTING}.random_ltd"

NAME = "<name>"
"""In the path of a key: a section whose name is the user's."""

_METRIC = f"{METRICS}.{NAME}"
_PACE = f"{_METRIC}.schedule_config"
_SCHEDULE = f"{RANDOM_LTD}.random_ltd_schedule"

_SAMPLING = [
    Key("data_efficiency.enabled", "honoured", "false: all of the section is off", "bool"),
    Key("data_efficiency.seed", "honoured", "of `make_sampler` and `route_tokens`", "count"),
    Key(f"{SAMPLING}.enabled", "honoured", "`make_sampler`", "bool"),
    Key(f"{SAMPLING}.num_epochs", "honoured", "how often all samples are drawn", "count"),
    Key(f"{SAMPLING}.num_workers", "honoured", "`loader`, for your data loader", "count"),
    Key(f"{SAMPLING}.pin_memory", "honoured", "`loader`, for your data loader", "bool"),
    Key(f"{CURRICULUM}.enabled", "honoured", "`make_sampler`: easy samples first", "bool"),
    Key(f"{CURRICULUM}.data_cluster_path", "always", "clusters are in memory", "text"),
    *keys(
        "honoured",
        _METRIC,
        [
            ("index_to_sample_path", "samples in order of difficulty"),
            ("index_to_metric_path", "their difficulties, if `difficulty_type` is value"),
            ("difficulty_type", "value or percentile"),
            ("clustering_type", "schedule_based; single_cluster: all samples, always"),
            ("schedule_type", "fixed_linear, fixed_root, fixed_discrete; custom: a function"),
        ],
        "text",
    ),
    *keys(
        "honoured",
        _METRIC,
        [
            ("min_difficulty", "the largest at the beginning"),
            ("max_difficulty", "the largest of all"),
        ],
    ),
    Key(f"{_PACE}.total_curriculum_step", "honoured", "steps until `max_difficulty`", "count"),
    Key(f"{_PACE}.difficulty_step", "honoured", "difficulties are multiples of it", "number"),
    Key(f"{_PACE}.root_degree", "honoured", "of fixed_root: 2 for a square root", "number"),
    Key(f"{_PACE}.difficulty", "honoured", "of fixed_discrete: one after the other", "numbers"),
    Key(f"{_PACE}.max_step", "honoured", "of fixed_discrete: last step of each", "numbers"),
    Key(f"{BATCHING}.enabled", "honoured", "`make_sampler`: as many as have `max_tokens`", "bool"),
    Key(
        f"{BATCHING}.metrics_path",
        "honoured",
        "has `seqlen/seqlen_sample_to_metric`",
        "text",
    ),
    Key(
        f"{BATCHING}.lr_scaling_method",
        "honoured",
        "`make_scheduler`: rates follow the samples of a step: linear, sqrt or none",
        "text",
    ),
    *keys(
        "honoured",
        BATCHING,
        [
            ("min_batch_size", "samples that go together at least"),
            ("max_batch_size", "and at most; by default as many as there is room for"),
            ("max_tokens", "room for tokens"),
        ],
        "count",
    ),
    Key(
        f"{BATCHING}.sequence_picking_order",
        "honoured",
        "dataloader: as they lie; seqlen: by length; random",
        "text",
    ),
    Key(f"{BATCHING}.verbose", "always", "of DeepSpeed's own log", "bool"),
]

_ROUTING = [
    Key(f"{ROUTING}.enabled", "honoured", "`route_tokens`", "bool"),
    Key(f"{RANDOM_LTD}.enabled", "honoured", "`route_tokens`: layers see some tokens", "bool"),
    Key(f"{RANDOM_LTD}.total_layer_num", "honoured", "layers that tokens are counted in", "count"),
    Key(f"{RANDOM_LTD}.random_ltd_layer_num", "honoured", "layers of the next key", "count"),
    Key(f"{RANDOM_LTD}.random_ltd_layer_id", "honoured", "which see some tokens", "numbers"),
    Key(f"{RANDOM_LTD}.model_mask_name", "honoured", "argument of these layers", "text"),
    Key(f"{RANDOM_LTD}.model_type", "honoured", "how masks shrink: encoder or decoder", "text"),
    Key(
        f"{RANDOM_LTD}.hidden_state_order",
        "honoured",
        "batch_seq_dim or seq_batch_dim",
        "text",
    ),
    Key(f"{RANDOM_LTD}.micro_batch_size", "always", "that of the batch", "count"),
    Key(f"{RANDOM_LTD}.global_batch_size", "always", "that of the batch", "count"),
    *keys(
        "honoured",
        _SCHEDULE,
        [("min_value", "tokens at the beginning"), ("max_value", "tokens at the end")],
        "count",
    ),
    Key(f"{_SCHEDULE}.schedule_type", "honoured", "fixed_linear", "text"),
    *keys(
        "honoured",
        f"{_SCHEDULE}.schedule_config",
        [
            ("require_steps", "steps until `max_value`"),
            ("seq_per_step", "numbers of tokens are multiples of it"),
        ],
        "count",
    ),
    Key(
        f"{RANDOM_LTD}.layer_token_lr_schedule",
        "refused",
        "DeepSpeed does not have it yet, and raises an error",
    ),
]

DATA_KEYS = [*_SAMPLING, *_ROUTING]
